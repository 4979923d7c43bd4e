"""Groups of which a worker is lost: what was interrupted is done again among those who are left."""

import itertools
import os
import signal
import threading
import time
from typing import Any

import pytest
import torch
from pool import Pool, RemoteError

import hocket

STEPS = 30
PLACES: dict[str, dict[str, Any]] = {
    "one host": {},
    "TCP": {"hosts": (1, 2, 1), "transport": "tcp"},
}


def go_on(dead: int, delay: float, count: int) -> tuple[list[list[float]], int, tuple[int, ...]]:
    """What each step gives, on a job of four of whom one is killed; who this is then, and who is left of a group."""
    me, group = hocket.rank(), hocket.group([0, 1, 3])
    is_in, x = me in group.ranks, torch.ones(count)
    found: list[list[float]] = []
    for step in range(STEPS):
        if step == 5 and me == dead:
            threading.Timer(delay, os.kill, [os.getpid(), signal.SIGKILL]).start()
        if step == STEPS - 2 and me == dead:
            time.sleep(60)  # the others come to the last steps without it, however late the timer is
        summed = hocket.allreduce(x, "sum", wait=False)
        rows = hocket.allgather_rows(x[: me + 1], wait=False)
        mine = float(hocket.reduce_scatter(x, "sum", group=group).sum()) if is_in else 0.0
        told = float(hocket.broadcast(torch.tensor(float(step)), root=0, group=group)) if is_in else float(step)
        later = float(hocket.allreduce(x, "sum")[-1])
        assert told == step
        found.append([float(summed.wait()[0]), float(len(rows.wait())), later, mine])
    return found, hocket.rank(), group.ranks


SOME = [("one host", 1, 0.004, 10), ("TCP", 3, 0.01, 200_000)]
DEATHS = list(itertools.product(PLACES, [1, 3], [0.0, 0.004, 0.01], [10, 200_000]))


@pytest.mark.few(1)
@pytest.mark.parametrize(
    ("place", "dead", "delay", "count"),
    [pytest.param(*each, marks=[] if each in SOME else pytest.mark.all_combinations) for each in DEATHS],
)
def test_the_others_go_on(pool: Pool, place: str, dead: int, delay: float, count: int) -> None:
    outcomes = pool.outcomes_with_death(
        4, go_on, dead, dead, delay, count, on_loss="continue", timeout=50.0, **PLACES[place]
    )
    left = {rank: outcome for rank, outcome in enumerate(outcomes) if rank != dead}
    assert not any(isinstance(each, RemoteError) for each in left.values()), left
    assert [outcome[1] for outcome in left.values()] == [0, 1, 2]  # ranks of those who are left
    assert all(outcome[2] == ((0, 2) if dead == 1 else (0, 1)) for outcome in left.values())
    fewer = 10 - (dead + 1)
    for steps in zip(*(outcome[0] for outcome in left.values()), strict=True):
        assert len({tuple(row[:3]) for row in steps}) == 1, steps  # all have the same
        summed, rows, later, _ = steps[0]
        assert (summed, rows, later) in {(4, 10, 4), (4, 10, 3), (4, fewer, 3), (3, fewer, 3)}
    assert left[0][0][0][:3] == [4, 10, 4] and left[0][0][-1][:3] == [3, fewer, 3]
    assert sum(left[rank][0][-1][3] for rank in left if rank != 2) == 2 * count
