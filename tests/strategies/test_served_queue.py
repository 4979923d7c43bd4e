"""Batches of one queue in real processes: each counts once, whatever is prepared ahead, kept back or lost."""

import multiprocessing
import os
from typing import Any

import pytest
import torch
from pool import Pool, RemoteError
from strategies.training import Case, make
from torch.utils.data import DataLoader

import hocket

EPOCHS = 2


def train(strategy: str, processes: int, dies: int = -1) -> tuple[list[list[float]], list[torch.Tensor]]:
    """The samples that this worker had in each epoch, and its parameters in the end; ``dies`` has one batch only."""
    case = Case()
    model, _, original = make(case, 1)
    loader: Any = DataLoader(original.dataset, case.batch, shuffle=True, num_workers=processes)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    model, optimizer, loader = hocket.distribute(model, optimizer, loader, strategy=strategy)
    seen: list[list[float]] = []
    for _ in range(EPOCHS):
        seen.append([])
        for x, y in loader:
            if hocket.rank() == dies:
                for child in multiprocessing.active_children():  # would notice by themselves, seconds later
                    child.kill()
                    child.join()
                os._exit(1)
            seen[-1] += x[:, 0].tolist()
            ((model(x) - y) ** 2).mean().backward()
            optimizer.step()
            optimizer.zero_grad()
    return seen, [parameter.detach().clone() for parameter in model.parameters()]


def check(results: list[Any]) -> None:
    dataset: Any = make(Case(), 1)[2].dataset
    everything = sorted(dataset.tensors[0][:, 0].tolist())
    for epoch in range(EPOCHS):
        assert sorted(value for seen, _ in results for value in seen[epoch]) == everything
    for _, parameters in results:
        assert all(map(torch.equal, results[0][1], parameters))


@pytest.mark.parametrize("processes", [0, 2])
@pytest.mark.parametrize("strategy", ["bsp", "asynchronous", "downpour(push=5, fetch=3)"])
def test_every_sample_counts_once(pool: Pool, strategy: str, processes: int) -> None:
    check(pool.run(3, train, strategy, processes, servers=1))


def few_batches(epochs: int) -> list[list[float]]:
    """Two batches for four workers, some of whom have none in some epochs; the script has a generator of its own."""
    case = Case(samples=8, batch=5)
    model, optimizer, loader = hocket.distribute(*make(case, 1), strategy="bsp")
    seen: list[list[float]] = []
    for _ in range(epochs):
        seen.append([])
        for x, y in loader:
            seen[-1] += x[:, 0].tolist()
            ((model(x) - y) ** 2).mean().backward()
            optimizer.step()
            optimizer.zero_grad()
    return seen


def test_who_has_no_batch_in_an_epoch_knows_the_order_of_the_next(pool: Pool) -> None:
    found = pool.run(4, few_batches, 12, servers=1)
    dataset: Any = make(Case(samples=8), 1)[2].dataset
    for epoch in range(12):
        assert sorted(value for each in found for value in each[epoch]) == sorted(dataset.tensors[0][:, 0].tolist())


@pytest.mark.parametrize("processes", [0, 2])
def test_what_a_dead_worker_had_taken_is_done_by_others(pool: Pool, processes: int) -> None:
    found = pool.outcomes_with_death(3, train, 2, "asynchronous", processes, 2, servers=1)
    check(found[:2])


def with_synchronised_batch_norm() -> None:
    model = torch.nn.Sequential(torch.nn.Linear(2, 3), hocket.SyncBatchNorm(3), torch.nn.Linear(3, 1))
    model, _ = hocket.distribute(model, torch.optim.SGD(model.parameters(), lr=0.1), strategy="asynchronous")
    model(torch.ones(4, 2))


def test_batch_norm_over_all_workers_is_refused(pool: Pool) -> None:
    with pytest.raises(RemoteError, match="SyncBatchNorm needs all workers in every step"):
        pool.run(2, with_synchronised_batch_norm, servers=1)
