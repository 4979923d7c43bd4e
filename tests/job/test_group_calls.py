"""Collectives in groups, messages, and handles: over shared memory, TCP and Gloo, simulated, and alone."""

import itertools
import os
import re
import signal
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import load
import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st
from pool import Pool, RemoteError
from products import product

import hocket
from hocket.errors import DeadlineExceeded, MismatchError, UsageError, WorkerLost
from hocket.job.simulated_job import SimulatedJob
from hocket.job.worker import current
from hocket.transport.simulated import Speed
from job.calls import make_all

WITH_POOL = [HealthCheck.function_scoped_fixture]
SOON = 5.0  # seconds in which the others are told of a death
PLACES: dict[str, dict[str, Any]] = {
    "one host": {},
    "TCP": {"hosts": (2, 1), "transport": "tcp"},
    "TLS": {"hosts": (1, 1, 1), "transport": "tcp", "tls": "on"},
    "Gloo": {"hosts": (1, 2), "transport": "gloo"},
    "coordinator": {"coordinated": True},
}


@settings(max_examples=6, suppress_health_check=WITH_POOL)
@given(seed=st.integers(0, 10**6), workers=st.integers(1, 5))
@example(seed=0, workers=5)
def test_on_one_host(pool: Pool, seed: int, workers: int) -> None:
    pool.run(workers, make_all, seed, workers)


@settings(max_examples=4, suppress_health_check=WITH_POOL)
@given(seed=st.integers(0, 10**6), place=st.sampled_from(list(PLACES)[1:]))
def test_between_hosts(pool: Pool, seed: int, place: str) -> None:
    pool.run(3, make_all, seed, 3, **PLACES[place])


@settings(max_examples=4)
@given(seed=st.integers(0, 10**6), workers=st.integers(1, 6), latency=st.sampled_from([0.0, 0.1]))
def test_simulated(seed: int, workers: int, latency: float) -> None:
    SimulatedJob(workers, speed=Speed(latency, 1e9)).run(lambda: make_all(seed, workers))


def wrong_calls(_: str) -> list[str]:
    """What goes wrong on this worker alone is told at once, without the others."""
    x, rank = torch.zeros(4, 2), hocket.rank()
    calls: list[Callable[[], Any]] = [
        lambda: hocket.reduce(x, "median"),
        lambda: hocket.reduce(x, root=2),
        lambda: hocket.reduce(x, root=1.0),  # type: ignore[call-overload]
        lambda: hocket.allreduce(x.to(torch.int8), wait=False),
        lambda: hocket.allreduce(x.to(torch.complex64), "max"),
        lambda: hocket.allreduce(x.to(torch.float8_e4m3fn)),
        lambda: hocket.allgather_rows(torch.tensor(1.0)),
        lambda: hocket.allreduce(x, group=hocket.group([1 - rank])),
        lambda: hocket.allreduce(x, group=[0, 1]),  # type: ignore[call-overload]
        lambda: hocket.group([0, 0]),
        lambda: hocket.group([0, 2]),
        lambda: hocket.group([]),
        lambda: hocket.send(x, rank),
        lambda: hocket.receive(2),
        lambda: hocket.alltoall(x, [4, 1]),
        lambda: hocket.alltoall(x, [5, -1]),
        lambda: hocket.reduce_scatter(x, rows=[4]),
        lambda: hocket.scatter([x], root=rank),
        lambda: hocket.scatter([x, x.double()], root=rank),
        lambda: hocket.gather([1, 2]),
        lambda: hocket.gather(np.array(["a"])),
        lambda: hocket.broadcast(np.broadcast_to(np.zeros(1), (3,))),
        lambda: hocket.allreduce(x, out=torch.zeros(4)),
    ]
    said = []
    for call in calls:
        with pytest.raises(UsageError) as error:
            call()
        said.append(str(error.value))
    return said


def test_wrong_use_is_told_without_the_others(pool: Pool) -> None:
    told = pool.run(2, wrong_calls, "")[1]
    remedies = [
        "hocket.reduce(): operation 'median': the choices are mean, sum",
        "hocket.reduce(): root 2 is none of the ranks 0, 1",
        "hocket.reduce(): root 1.0 is none of the ranks 0, 1",
        "use operation='sum'",
        "complex numbers have no max",
        "torch has no mean of torch.float8_e4m3fn",
        "hocket.allgather_rows() takes tensors with rows",
        "hocket.allreduce() in the group of ranks 0, which rank 1 is no member of",
        "write group=hocket.group([0, 1])",
        "hocket.group([0, 0])",
        "of ranks 0 to 1",
        "at least one rank",
        "which for rank 1 are: 0",
        "hocket.receive(): rank 2",
        "splits=[4, 1] of a tensor with 4 rows",
        "splits=[5, -1]",
        "rows=[4]",
        "1 tensors, for 2 ranks",
        "may differ in their numbers of rows alone",
        "not list",
        "arrays of numbers",
        "read-only",
        "out has torch.float32[4]",
    ]
    for words, remedy in zip(told, remedies, strict=True):
        assert remedy in words


def differ(number: int) -> list[str]:
    """Two ranks of three call something different in a group; what each is told, and whether the group is of use."""
    rank = hocket.rank()
    if rank == 1:
        return []
    group, x = hocket.group([0, 2]), torch.ones(4, 2)
    is_first = rank == 0
    calls: list[Callable[[], Any]] = [
        lambda: hocket.allreduce(x if is_first else x[:3], group=group),
        lambda: hocket.allreduce(x if is_first else x.double(), group=group),
        lambda: hocket.allreduce(x, "sum" if is_first else "max", group=group),
        lambda: hocket.reduce(x, root=0 if is_first else 2, group=group),
        lambda: hocket.broadcast(x, root=0 if is_first else 2, group=group),
        lambda: hocket.gather(x if is_first else x[0], group=group),
        lambda: hocket.scatter([x, x], root=rank, group=group),
        lambda: hocket.allgather(x if is_first else x[:1], group=group),
        lambda: hocket.allgather_rows(x if is_first else x[:, :1], group=group),
        lambda: hocket.reduce_scatter(x, rows=[4, 0] if is_first else [0, 4], group=group),
        lambda: hocket.alltoall(x if is_first else x.int(), group=group),
        lambda: hocket.barrier(group=group) if is_first else hocket.allgather(x, group=group),
        lambda: hocket.send(x, 2) if is_first else hocket.receive(0, out=torch.ones(3)),
        lambda: (hocket.allreduce if is_first else hocket.allgather)(x, group=group, wait=False).wait(),
    ]
    with pytest.raises(MismatchError) as error:
        calls[number]()
    assert float(hocket.allreduce(torch.tensor(float(rank)), "sum", group=group)) == 2
    return [str(error.value)]


def differ_in_all(_: str) -> list[list[str]]:
    return [differ(number) for number in range(14)]


@product(place=["one host", "TCP"], on_loss=["continue", "end"])
def test_what_differs_is_told_to_all(pool: Pool, place: str, on_loss: str) -> None:
    """Where workers may be lost, too, and a call is over only when all say so."""
    found = pool.run(3, differ_in_all, "", on_loss=on_loss, **PLACES[place])
    for mine, theirs in zip(found[0], found[2], strict=True):
        assert mine == theirs
        assert "rank 0" in mine[0] and "rank 2" in mine[0]
    texts = [each[0] for each in found[0]]
    assert "rank 0: hocket.allreduce(): allreduce of float32[4, 2], mean; rank 2: " in texts[0]
    assert "rank 2: hocket.reduce(): reduce of float32[4, 2], mean, to rank 2" in texts[3]
    assert "rank 0 sends float32[4, 2], and rank 2 receives it into float32[3]" in texts[12]


def handles(_: str) -> None:
    rank, size = hocket.rank(), hocket.size()
    x = torch.full((3,), float(rank))
    if rank > 0:
        hocket.receive(0)
    began = hocket.allreduce(x, "sum", wait=False)
    if rank == 0:
        assert not began.done()
        for seconds in (0.05, 0):
            with pytest.raises(DeadlineExceeded, match="goes on, so wait for it again"):
                began.wait(timeout=seconds)
        for other in range(1, size):  # which begin when they have this
            hocket.send(x, other)
    results = [began.wait(), began.wait()]
    assert results[0] is results[1] and began.done() and float(results[0][0]) == sum(range(size))
    # In the order in which they were begun, and nothing waits for the script.
    many = [hocket.allgather(torch.tensor(float(rank + number)), wait=False) for number in range(20)]
    assert float(hocket.allreduce(torch.tensor(1.0), "sum")) == size  # after all of them
    assert all(each.done() for each in many)
    for number, each in reversed(list(enumerate(many))):
        assert each.wait(5).tolist() == [float(other + number) for other in range(size)]
    # Everybody sends before anybody receives.
    right, left = (rank + 1) % size, (rank - 1) % size
    big = torch.full((3_000_000,), float(rank))
    sent = [hocket.send(big, right, wait=False), hocket.send(x, right, wait=False)]
    place = torch.empty(3_000_000)
    assert hocket.receive(left, out=place) is place and float(place[-1]) == left
    assert float(hocket.receive(left)[0]) == left
    for each_ in sent:
        each_.wait()
    # A result in its place, when it was waited for.
    out = torch.zeros(3)
    handle = hocket.allreduce(x, "max", out=out, wait=False)
    assert handle.wait() is out and float(out[0]) == size - 1
    # The group of all is all, who need no group.
    everyone = hocket.group(range(size)) if rank else None
    assert float(hocket.allreduce(x, "sum", group=everyone)[0]) == sum(range(size))
    # By one thread.
    handle = hocket.allreduce(x, "max", wait=False)
    said: list[str] = []

    def wait() -> None:
        try:
            handle.wait()
        except UsageError as error:
            said.append(str(error))

    thread = threading.Thread(target=wait, name="other")
    thread.start()
    thread.join()
    assert "wait() in thread 'other'" in said[0]
    handle.wait()


@pytest.mark.parametrize("place", ["one host", "TCP"])
def test_handles(pool: Pool, place: str) -> None:
    pool.run(3, handles, "", **PLACES[place])


def drop(_: str) -> list[str]:
    """What nobody waits for, or comes to, keeps nobody."""
    if hocket.rank() == 0:
        hocket.send(torch.zeros(10), 1, wait=False)
        hocket.receive(2, wait=False)
        hocket.barrier(wait=False)
    found = current().groups.unfinished(0.1)
    before = {1: 2, 2: 0}  # one after the other, so that nobody ends before rank 0 has looked
    if hocket.rank() in before:
        hocket.receive(before[hocket.rank()])
    if hocket.rank() in before.values():
        hocket.send(torch.zeros(1), 2 if hocket.rank() == 0 else 1)
    return found


@pytest.mark.parametrize("place", ["one host", "TCP", "Gloo"])
def test_what_is_never_waited_for_keeps_nobody(pool: Pool, place: str) -> None:
    found = pool.run(3, drop, "", **PLACES[place])
    assert found[1:] == [[], []]
    assert [words.split(":")[0] for words in found[0]] == ["hocket.send()", "hocket.receive()", "hocket.barrier()"]


def left_early(_: str) -> str:
    """Rank 1 ends its script; who waits for it in a group is told."""
    if hocket.rank() == 1:
        return ""
    with pytest.raises(WorkerLost) as error:
        hocket.receive(1) if hocket.rank() == 0 else hocket.barrier(group=hocket.group([1, 2]))
    return str(error.value)


@pytest.mark.parametrize("place", ["one host", "TCP"])
def test_a_member_that_has_ended(pool: Pool, place: str) -> None:
    found = pool.outcomes(3, left_early, "", **PLACES[place])
    for told in (found[0], found[2]):  # the other one may have ended, too, before this one is told
        assert re.search(r"ranks? (0, )?1(, 2)? finished the script", told), told


CALLS: dict[str, Callable[[torch.Tensor], Any]] = {
    "allreduce": lambda x: hocket.allreduce(x, wait=False).wait(),
    "reduce": lambda x: hocket.reduce(x, root=1),
    "broadcast": lambda x: hocket.broadcast(x, root=2, wait=False).wait(),
    "allgather": lambda x: hocket.allgather(x, wait=False).wait(),
    "allgather_rows": lambda x: hocket.allgather_rows(x),
    "gather": lambda x: hocket.gather(x, root=1),
    "scatter": lambda x: hocket.scatter([x] * 3, root=2),
    "reduce_scatter": lambda x: hocket.reduce_scatter(x),
    "alltoall": lambda x: hocket.alltoall(x),
    "barrier": lambda x: hocket.barrier(wait=False).wait(),
    "send": lambda x: around(x),
}


def around(x: torch.Tensor) -> None:
    rank, size = hocket.rank(), hocket.size()
    sent = hocket.send(x, (rank + 1) % size, wait=False)
    hocket.receive((rank - 1) % size)
    sent.wait()


def until_lost(name: str, dead: int, folder: str) -> tuple[float, str]:
    """Make a call again and again until a worker is killed in it; after how long this one was told, and what."""
    died = Path(folder) / "died"

    def die() -> None:
        died.write_text(str(time.time()))
        os.kill(os.getpid(), signal.SIGKILL)

    x = torch.zeros(300_000)
    for step in range(100_000):
        if step == 3 and hocket.rank() == dead:
            threading.Timer(0.01, die).start()
        try:
            CALLS[name](x)
        except WorkerLost as error:
            return time.time() - float(died.read_text()), str(error)
    raise AssertionError("nobody was lost")


SOME = [("allreduce", 1, "one host"), ("send", 2, "TCP"), ("alltoall", 0, "Gloo")]
KILLS = [*SOME, *(each for each in itertools.product(CALLS, range(3), ["one host", "TCP", "Gloo"]) if each not in SOME)]


@pytest.mark.few(1)
@pytest.mark.parametrize(
    ("name", "dead", "place"),
    [pytest.param(*kill, marks=[] if kill in SOME else pytest.mark.all_combinations) for kill in KILLS],
)
def test_killed(pool: Pool, tmp_path: Path, name: str, dead: int, place: str) -> None:
    found = pool.outcomes_with_death(3, until_lost, dead, name, dead, str(tmp_path), timeout=50.0, **PLACES[place])
    told = [found[rank] for rank in range(3) if rank != dead]
    assert not any(isinstance(each, RemoteError) for each in told), told
    for seconds, words in told:
        assert seconds < SOON + load.share() - 1, told
        assert f"rank {dead}" in words and "hocket." in words, told
