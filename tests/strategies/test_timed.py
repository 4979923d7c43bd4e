"""Rounds that last seconds: averages by samples, batches in the pace of each worker, every sample once."""

import time
from collections.abc import Iterable, Iterator
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from pool import Pool
from strategies.training import Case, alone, assert_equal, make, together
from torch.utils.data import DataLoader

import hocket
from hocket.job.loader.timed_rounds import RoundDeal
from hocket.job.simulated_job import SimulatedJob

SHORTEST = "local_sgd(time=1e-9)"


@pytest.mark.parametrize("workers", [2, 3])
def test_rounds_of_one_batch_are_mirrored(pool: Pool, workers: int) -> None:
    case = Case(groups=True)
    assert_equal(alone(case, workers), pool.run(workers, together, case, SHORTEST), 1e-9)


def test_over_hosts(pool: Pool) -> None:
    assert_equal(alone(Case(), 3), pool.run(3, together, Case(), SHORTEST, hosts=[2, 1]), 1e-9)


def train(processes: int, leaves: int | None, slow: float) -> tuple[list[list[float]], list[torch.Tensor]]:
    """The samples that this worker had in each epoch, and its parameters in the end."""
    case = Case(samples=200)
    model, _, original = make(case, 1)
    loader: Any = DataLoader(original.dataset, case.batch, shuffle=True, num_workers=processes)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    model, optimizer, loader = hocket.distribute(model, optimizer, loader, strategy="local_sgd(time=0.05)")
    seen: list[list[float]] = []
    for _ in range(2):
        seen.append([])
        for step, (x, y) in enumerate(loader):
            seen[-1] += x[:, 0].tolist()
            ((model(x) - y) ** 2).mean().backward()
            optimizer.step()
            optimizer.zero_grad()
            if hocket.rank() == 1:
                time.sleep(slow)
            if step == leaves:
                break
    hocket.barrier()
    return seen, [parameter.detach().clone() for parameter in model.parameters()]


@pytest.mark.parametrize(("processes", "slow"), [(0, 0.03), (2, 0.0)])
def test_every_sample_counts_once(pool: Pool, processes: int, slow: float) -> None:
    found = pool.run(3, train, processes, None, slow)
    dataset: Any = make(Case(samples=200), 1)[2].dataset
    for epoch in range(2):
        assert sorted(value for seen, _ in found for value in seen[epoch]) == sorted(dataset.tensors[0][:, 0].tolist())
    for _, parameters in found:
        assert all(map(torch.equal, found[0][1], parameters))


@pytest.mark.parametrize("processes", [0, 2])
def test_loops_that_are_left_early_leave_equal_replicas(pool: Pool, processes: int) -> None:
    found = pool.run(3, train, processes, 4, 0.02)
    for seen, parameters in found:
        assert all(map(torch.equal, found[0][1], parameters))
        assert [len(epoch) for epoch in seen] == [15, 15]


def prefetch(batches: Iterable[Any]) -> Iterator[Any]:
    it = iter(batches)
    ahead = next(it, None)
    while ahead is not None:
        now, ahead = ahead, next(it, None)
        yield now


def simulate(job: SimulatedJob, seconds: float, *, ahead: bool, leaves: int | None) -> tuple[list[Any], list[Any]]:
    """The samples that this worker had in each epoch, and its parameters after each."""
    model, optimizer, loader = hocket.distribute(*make(Case(samples=50, batch=2), 1))
    seen: list[list[float]] = [[], []]
    states: list[list[torch.Tensor]] = []
    for epoch in range(2):
        for step, (x, y) in enumerate(prefetch(loader) if ahead else loader, start=1):
            seen[epoch] += x[:, 0].tolist()
            job.compute(seconds * (1 + hocket.rank() % 2))
            ((model(x) - y) ** 2).mean().backward()
            optimizer.step()
            optimizer.zero_grad()
            if (step, hocket.rank(), epoch) == (leaves, 0, 0):
                break
        states.append([parameter.detach().clone() for parameter in model.parameters()])
    return seen, states


@pytest.mark.few(5)
@pytest.mark.parametrize("seconds", [0.01, 0.1, 0.3])
@pytest.mark.parametrize(
    ("workers", "ahead", "leaves"), [(2, True, None), (4, True, None), (2, False, 1), (3, False, 3)]
)
def test_who_asks_ahead_or_leaves_early_ends_the_rounds_with_the_others(
    workers: int, ahead: bool, leaves: int | None, seconds: float
) -> None:
    job = SimulatedJob(workers, "local_sgd(time=0.5)")
    found = job.run(lambda: simulate(job, seconds, ahead=ahead, leaves=leaves))
    dataset: Any = make(Case(samples=50), 1)[2].dataset
    for epoch in range(2):
        assert sorted(value for seen, _ in found for value in seen[epoch]) == sorted(dataset.tensors[0][:, 0].tolist())
        for _, states in found:
            assert all(map(torch.equal, found[0][1][epoch], states[epoch]))


def test_slow_workers_have_fewer_samples() -> None:
    job = SimulatedJob(4, "local_sgd(time=0.5)")
    found = job.run(lambda: simulate(job, 0.1, ahead=False, leaves=None))  # ranks 1 and 3 take twice as long
    for epoch in range(2):
        counts = [len(seen[epoch]) for seen, _ in found]
        assert max(counts[1], counts[3]) < min(counts[0], counts[2]) and sum(counts) == 50


@given(
    total=st.integers(0, 60),
    size=st.integers(1, 5),
    speeds=st.lists(st.lists(st.integers(0, 6), min_size=5, max_size=5), min_size=1, max_size=8),
    ahead=st.integers(0, 3),
    leaves=st.lists(st.integers(1, 20), min_size=4, max_size=4),
)
def test_batches_are_dealt_once_whatever_the_speeds_and_whoever_leaves(
    total: int, size: int, speeds: list[list[int]], ahead: int, leaves: list[int]
) -> None:
    deals = [RoundDeal(rank, range(size)) for rank in range(size)]
    done: list[int] = []
    held: list[list[int]] = [[] for _ in range(size)]
    for round_number in range(1000):
        rows = []
        for rank, deal in enumerate(deals):
            if rank < size - 1 and round_number >= leaves[rank]:
                rows.append([deal.drawn, len(held[rank]), 1])
                held[rank] = []
                continue
            wanted = speeds[round_number % len(speeds)][rank] + (round_number in (0, *range(len(speeds), 1000)))
            while len(held[rank]) < wanted + ahead and (number := deal.take(1, total)) is not None:
                held[rank].append(number)
            done += held[rank][:wanted]
            held[rank] = held[rank][wanted:]
            rows.append([deal.drawn, len(held[rank]), 0])
        over = {deal.end_round(dict(enumerate(rows))) for deal in deals}
        assert len(over) == 1
        states = [deal.state() for deal in deals]
        assert all(state == states[0] for state in states)
        if over.pop():
            break
    assert round_number < 100, "who is left gets all batches at once"
    assert sorted(done) == list(range(total))


def glance() -> list[list[float]]:
    model, optimizer, loader = hocket.distribute(*make(Case(), 1), strategy="local_sgd(time=0.05)")
    next(iter(loader))
    seen: list[list[float]] = [[], []]
    for epoch in range(2):
        for x, y in loader:
            seen[epoch] += x[:, 0].tolist()
            ((model(x) - y) ** 2).mean().backward()
            optimizer.step()
            optimizer.zero_grad()
    return seen


def test_a_glance_at_the_data_takes_nothing(pool: Pool) -> None:
    found = pool.run(2, glance)
    dataset: Any = make(Case(), 1)[2].dataset
    for epoch in range(2):
        assert sorted(value for seen in found for value in seen[epoch]) == sorted(dataset.tensors[0][:, 0].tolist())


def without_a_loader() -> None:
    model, optimizer, _ = make(Case(), 1)
    model, optimizer = hocket.distribute(model, optimizer, strategy=SHORTEST)
    model(torch.ones(2, 6, dtype=torch.float64)).sum().backward()
    optimizer.step()


def test_it_needs_a_loader(pool: Pool) -> None:
    with pytest.raises(Exception, match="train on the loader"):
        pool.run(2, without_a_loader)
