"""Exchanges: several may be under way at once, beside other collectives, and all ranks get the same means."""

import os
import signal
from typing import Any

import pytest
import torch
from pool import Pool

import hocket
from hocket.comm.bucket_layout import Layout
from hocket.comm.exchange import Ticket
from hocket.job.worker import current

PLACES: list[tuple[int, list[int] | None]] = [(1, None), (2, None), (3, None), (2, [1, 1]), (4, [2, 2]), (3, [2, 1])]


def values(rank: int, number: int, count: int) -> torch.Tensor:
    return torch.rand(count, generator=torch.Generator().manual_seed(100 * rank + number), dtype=torch.float64)


def overlap(counts: list[int], rounds: int, background: bool, turns: int) -> None:
    """All begin, other collectives are called, all end; ranks look after what is under way at different times."""
    communicator = current().communicator
    layouts = [Layout([torch.zeros(count, dtype=torch.float64)]) for count in counts]
    exchanges = [communicator.exchange(layout, background=background, turns=turns) for layout in layouts]
    for round_number in range(rounds):
        for number, (exchange, count) in enumerate(zip(exchanges, counts, strict=True)):
            exchange.put([values(hocket.rank(), round_number + number, count)])
            exchange.begin(Ticket(7, hocket.rank(), "a test"))
            for _ in range(hocket.rank()):
                exchange.progress()
            assert float(hocket.allreduce(torch.ones(1), "sum")) == hocket.size()
        for number, (exchange, count) in enumerate(zip(exchanges, counts, strict=True)):
            assert exchange.finish() == list(range(hocket.size()))
            everyone = [values(rank, round_number + number, count) for rank in range(hocket.size())]
            assert torch.allclose(exchange.result_views[0], torch.stack(everyone).mean(0), rtol=1e-12)
    for exchange in exchanges:
        exchange.put([None])
        exchange.begin(Ticket(1, 3, "both halves at once"))
        assert exchange.finish() == [3] * hocket.size()
        assert not exchange.result_views[0].any()
        exchange.close()


@pytest.mark.few(6)
@pytest.mark.parametrize(("background", "turns"), [(True, 1), (True, 2), (False, 1)])
@pytest.mark.parametrize(("workers", "hosts"), PLACES)
def test_several_at_once(pool: Pool, workers: int, hosts: list[int] | None, background: bool, turns: int) -> None:
    pool.run(workers, overlap, [1000, 3, 40_000], 3, background, turns, hosts=hosts)


def race(rounds: int) -> None:
    """Ranks write their next values at once, while others may still read the last ones."""
    exchange = current().communicator.exchange(Layout([torch.zeros(200_000, dtype=torch.float64)]))
    for number in range(rounds):
        exchange.put([torch.full((200_000,), float(number + hocket.rank()), dtype=torch.float64)], weight=2.0)
        exchange.begin(Ticket(number, 0, "a race"))
        exchange.finish()
        mean = 2 * number + hocket.size() - 1
        assert torch.equal(exchange.result_views[0], torch.full((200_000,), mean, dtype=torch.float64))


@pytest.mark.parametrize("workers", [2, 4])
def test_nobody_overwrites_what_others_still_read(pool: Pool, workers: int) -> None:
    pool.run(workers, race, 50)


def meet(differs: bool, dies: bool) -> None:
    communicator = current().communicator
    exchange = communicator.exchange(Layout([torch.zeros(5)]), background=True)
    if dies and hocket.rank() == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    exchange.begin(Ticket(hocket.rank() if differs else 0, 0, f"the thing of rank {hocket.rank()}"))
    exchange.finish()


@pytest.mark.parametrize("hosts", [None, [1, 1]])
def test_ranks_that_do_something_else_are_told(pool: Pool, hosts: list[int] | None) -> None:
    outcomes = pool.outcomes(2, meet, True, False, hosts=hosts)
    assert [each.kind for each in outcomes] == ["MismatchError"] * 2
    assert "the thing of rank 0" in outcomes[0].message


def test_a_lost_rank_is_noticed(pool: Pool) -> None:
    outcome: Any = pool.outcomes_with_death(2, meet, 1, False, True)[0]
    assert outcome.kind == "WorkerLost" and "rank 1" in outcome.message
