"""Batches of one queue in real processes: each counts once, whatever is prepared ahead, kept back or lost."""

import multiprocessing
import os
from pathlib import Path
from typing import Any

import pytest
import torch
from pool import Pool, RemoteError
from server.serving import until
from strategies.training import Case, make
from torch.utils.data import DataLoader

import hocket

EPOCHS = 2


def train(
    strategy: str, processes: int, dies: int = -1, died: Path | None = None
) -> tuple[list[list[float]], list[torch.Tensor]]:
    """The samples that this worker had in each epoch, and its parameters in the end.

    The worker ``dies`` has one batch only, and writes ``died``; the others keep their first until it has.
    """
    case = Case()
    model, _, original = make(case, 1)
    loader: Any = DataLoader(original.dataset, case.batch, shuffle=True, num_workers=processes)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    model, optimizer, loader = hocket.distribute(model, optimizer, loader, strategy=strategy)
    seen: list[list[float]] = []
    for _ in range(EPOCHS):
        seen.append([])
        for x, y in loader:
            if died is not None and hocket.rank() == dies:
                for child in multiprocessing.active_children():  # would notice by themselves, seconds later
                    child.kill()
                    child.join()
                died.touch()
                os._exit(1)
            if died is not None:  # or all batches of both epochs could be done before it has one
                until(died.exists, 30)
            if loader.weight:  # not a repeated one, that keeps this worker in step
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


@pytest.mark.few(2)
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


@pytest.mark.few(1)
@pytest.mark.parametrize("processes", [0, 2])
def test_what_a_dead_worker_had_taken_is_done_by_others(pool: Pool, tmp_path: Path, processes: int) -> None:
    found = pool.outcomes_with_death(3, train, 2, "asynchronous", processes, 2, tmp_path / "died", servers=1)
    check(found[:2])


def with_synchronised_batch_norm() -> None:
    model = torch.nn.Sequential(torch.nn.Linear(2, 3), hocket.SyncBatchNorm(3), torch.nn.Linear(3, 1))
    model, _ = hocket.distribute(model, torch.optim.SGD(model.parameters(), lr=0.1), strategy="asynchronous")
    model(torch.ones(4, 2))


def test_batch_norm_over_all_workers_is_refused(pool: Pool) -> None:
    with pytest.raises(RemoteError, match="SyncBatchNorm needs all workers in every step"):
        pool.run(2, with_synchronised_batch_norm, servers=1)


def prepared(strategy: str, batches: int, buffers: bool = False) -> tuple[Any, Any, Any]:
    torch.manual_seed(0)
    layers = [torch.nn.Linear(2, 3), torch.nn.BatchNorm1d(3)] if buffers else [torch.nn.Linear(2, 3)]
    model = torch.nn.Sequential(*layers, torch.nn.Linear(3, 1)).double()
    x = torch.randn(2 * batches, 2, dtype=torch.float64)
    data = torch.utils.data.TensorDataset(x, x.sum(1, keepdim=True))
    given = hocket.distribute(
        model, torch.optim.SGD(model.parameters(), lr=0.1), DataLoader(data, 2), strategy=strategy
    )
    model, optimizer, loader = given
    return model, optimizer, loader


def step(model: Any, optimizer: Any, batch: Any) -> None:
    ((model(batch[0]) - batch[1]) ** 2).mean().backward()
    optimizer.step()
    optimizer.zero_grad()


def after_a_glance(strategy: str) -> tuple[int, list[torch.Tensor]]:
    model, optimizer, loader = prepared(strategy, 6)
    next(iter(loader))
    taken = 0
    for batch in loader:
        step(model, optimizer, batch)
        taken += 1
    return taken, [p.detach().clone() for p in model.parameters()]


def test_a_glance_at_the_data_is_no_pass(pool: Pool) -> None:
    results = pool.run(2, after_a_glance, "bsp", servers=1)
    assert sum(taken for taken, _ in results) == 6
    alone = pool.run(1, after_a_glance, "bsp", servers=1)[0]
    assert alone[0] == 6
    assert [taken for taken, _ in results] == [3, 3]  # rounds of both


def leaving_early(strategy: str) -> int:
    model, optimizer, loader = prepared(strategy, 40)
    taken = 0
    for batch in loader:
        if hocket.rank() == 0 and taken == 3:
            break
        step(model, optimizer, batch)
        taken += 1
    return int(hocket.total(taken))


@pytest.mark.parametrize("strategy", ["asynchronous", "bsp", "ssp(staleness=2)"])
def test_who_leaves_a_loop_early_holds_back_nobody(pool: Pool, strategy: str) -> None:
    assert pool.run(2, leaving_early, strategy, servers=2) == [40, 40]


def two_loaders(strategy: str) -> int:
    model, optimizer, first = prepared(strategy, 6)
    second: Any = hocket.distribute(loader=DataLoader(first.original.dataset, 2))
    taken = 0
    for loader in (first, first, first, second, first):
        for batch in loader:
            step(model, optimizer, batch)
            taken += 1
    return int(hocket.total(taken))


@pytest.mark.parametrize("strategy", ["bsp", "ssp(staleness=1)", "downpour(fetch=2, push=2)"])
def test_one_loader_after_the_other(pool: Pool, strategy: str) -> None:
    assert pool.run(2, two_loaders, strategy, servers=1) == [30, 30]


def collective_in_a_loop(strategy: str) -> list[float]:
    model, optimizer, loader = prepared(strategy, 5)
    found = []
    for batch in loader:
        step(model, optimizer, batch)
        found.append(hocket.mean(float(hocket.rank())))
    return found


def test_a_collective_in_a_loop_is_told_and_does_not_hang(pool: Pool) -> None:
    outcomes = pool.outcomes(2, collective_in_a_loop, "ssp", servers=1)
    assert any(isinstance(o, RemoteError) and "call collectives after the loop" in o.message for o in outcomes)


def test_workers_in_step_may_meet_in_a_loop(pool: Pool) -> None:
    assert pool.run(2, collective_in_a_loop, "bsp", servers=1) == [[0.5] * 3] * 2


def without_rank_0(died: Path) -> str:
    model, optimizer, loader = prepared("asynchronous", 12, buffers=True)
    for count, batch in enumerate(loader):
        if count == 2 and hocket.rank() == 0:
            died.touch()
            os._exit(1)
        if count == 2:  # or these two could take all batches before rank 0 has its third one
            until(died.exists, 30)
        step(model, optimizer, batch)
    hocket.distribute(loader=DataLoader(loader.original.dataset, 2))  # needs a seed that all share
    return "done"


def test_buffers_and_seeds_without_rank_0(pool: Pool, tmp_path: Path) -> None:
    outcomes = pool.outcomes_with_death(3, without_rank_0, 0, tmp_path / "died", servers=1)
    assert outcomes[1:] == ["done", "done"]


def warm_start() -> str:
    model, optimizer, loader = prepared("downpour(warmup=100)", 8)
    for batch in loader:
        step(model, optimizer, batch)
    return "done"


def test_a_warm_start_that_is_longer_than_the_data_ends_with_it(pool: Pool) -> None:
    assert pool.run(3, warm_start, servers=1) == ["done"] * 3


def loaded_embedding() -> bool:
    table = torch.nn.Embedding(9, 2, sparse=True)
    model, _ = hocket.distribute(table, torch.optim.SGD(table.parameters(), lr=0.1), strategy="asynchronous")
    model.load_state_dict({"weight": torch.arange(18.0).view(9, 2)})
    rows = model(input=torch.tensor([3, 8]))
    return torch.equal(rows.detach(), torch.tensor([[6.0, 7.0], [16.0, 17.0]]))


def test_embeddings_that_were_loaded_are_on_the_servers(pool: Pool) -> None:
    assert pool.run(1, loaded_embedding, servers=2) == [True]
