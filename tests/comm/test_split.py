"""Averages in two halves: several may be under way at once, beside other collectives."""

import os
import signal
from typing import Any

import pytest
import torch
from pool import Pool

import hocket
from hocket.comm.layout import Layout
from hocket.job.runtime import current

PLACES: list[tuple[int, list[int] | None]] = [(1, None), (2, None), (3, None), (2, [1, 1]), (4, [2, 2]), (3, [2, 1])]


def values(rank: int, number: int, count: int) -> torch.Tensor:
    return torch.rand(count, generator=torch.Generator().manual_seed(100 * rank + number), dtype=torch.float64)


def overlap(counts: list[int], rounds: int) -> None:
    """All begin, other collectives are called, all end; ranks look after what is under way at different times."""
    communicator = current().communicator
    layouts = [Layout([torch.zeros(count, dtype=torch.float64)]) for count in counts]
    averagers = [communicator.split_averager(layout) for layout in layouts]
    for round_number in range(rounds):
        for number, (averager, count) in enumerate(zip(averagers, counts, strict=True)):
            mine = values(hocket.rank(), round_number + number, count)
            averager.slots[0][:count].copy_(mine).mul_(averager.scale)
            averager.begin(7, hocket.rank(), "a test")
            for _ in range(hocket.rank()):
                averager.progress()
            assert float(hocket.allreduce(torch.ones(1), "sum")) == hocket.size()
        for number, (averager, count) in enumerate(zip(averagers, counts, strict=True)):
            assert averager.finish() == list(range(hocket.size()))
            everyone = [values(rank, round_number + number, count) for rank in range(hocket.size())]
            assert torch.allclose(averager.results[0][:count], torch.stack(everyone).mean(0), rtol=1e-12)
    for averager in averagers:
        averager.slots[0].zero_()
        assert averager.average(1, 3, "both halves at once") == [3] * hocket.size()
        averager.close()


@pytest.mark.parametrize(("workers", "hosts"), PLACES)
def test_several_at_once(pool: Pool, workers: int, hosts: list[int] | None) -> None:
    pool.run(workers, overlap, [1000, 3, 40_000], 3, hosts=hosts)


def meet(differs: bool, dies: bool) -> None:
    communicator = current().communicator
    averager = communicator.split_averager(Layout([torch.zeros(5)]))
    if dies and hocket.rank() == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    averager.begin(hocket.rank() if differs else 0, 0, f"the thing of rank {hocket.rank()}")
    averager.finish()


@pytest.mark.parametrize("hosts", [None, [1, 1]])
def test_ranks_that_do_something_else_are_told(pool: Pool, hosts: list[int] | None) -> None:
    outcomes = pool.outcomes(2, meet, True, False, hosts=hosts)
    assert [each.kind for each in outcomes] == ["MismatchError"] * 2
    assert "the thing of rank 0" in outcomes[0].message


def test_a_lost_rank_is_noticed(pool: Pool) -> None:
    outcome: Any = pool.outcomes_with_death(2, meet, 1, False, True)[0]
    assert outcome.kind == "WorkerLost" and "rank 1" in outcome.message
