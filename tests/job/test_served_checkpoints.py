"""Checkpoints of trainings with parameter servers: what is on the servers is saved, and brought back there."""

from pathlib import Path
from typing import Any

import pytest
import torch
from pool import Pool, needs

import hocket
from hocket.job.checkpoint.saver import Saver
from hocket.job.worker import current

STEPS = 4  # between checkpoints


class Enough(Exception):
    """The end of an interrupted training."""


def train(strategy: str, optimizer: str, options: dict[str, Any], stop: int | None, sparse: bool = False) -> list[Any]:
    """Three epochs of 12 batches; ``stop`` is the step of rank 0 after which all end."""
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(6, 30), torch.nn.Tanh(), torch.nn.Linear(30, 1)).double()
    if sparse:
        model = torch.nn.Sequential(torch.nn.Embedding(40, 6, sparse=True, dtype=torch.float64), model)
    made = getattr(torch.optim, optimizer)(model.parameters(), **options)
    scheduler = torch.optim.lr_scheduler.StepLR(made, 5, 0.7)
    random = torch.Generator().manual_seed(1)
    x = torch.randint(0, 40, (48,), generator=random) if sparse else torch.randn(48, 6, generator=random).double()
    y = torch.sin(x.double() if sparse else x.sum(1))[:, None]
    loader: Any = torch.utils.data.DataLoader(torch.utils.data.TensorDataset(x, y), 4, shuffle=True)
    model, made, loader = hocket.distribute(model, made, loader, strategy=strategy)
    position = hocket.resume(model=model, optimizer=made, scheduler=scheduler, loader=loader)
    taken = position.step
    seen = 0
    for _ in range(position.epoch, 3):
        for a, b in loader:
            saver = current().training.saver
            if isinstance(saver, Saver):
                saver.settle()  # else the next checkpoint is left out on a busy machine
            if taken == stop:
                hocket.barrier()  # so that rank 0 has saved what is due
                return [position.step, seen]
            ((model(a) - b) ** 2).mean().backward()
            made.step()
            made.zero_grad()
            scheduler.step()
            taken += 1
            seen += len(a)
    state = made.state_dict()["state"]
    values = [v for entry in state.values() for v in entry.values() if isinstance(v, torch.Tensor)]
    return [position.step, seen, [*model.state_dict().values()], values, made.param_groups[0]["lr"]]


def run(pool: Pool, workers: int, servers: int, folder: Path, *args: Any) -> list[Any]:
    settings = {"checkpoint": str(folder), "checkpoint_every": STEPS, "launched": True}
    return pool.run(workers, train, *args, servers=servers, **settings)


@pytest.mark.few(2)
@pytest.mark.parametrize(
    ("optimizer", "options"), [("Adam", {"lr": 0.01}), ("Adagrad", {"lr": 0.05}), ("Adafactor", {"lr": 0.01})]
)
@pytest.mark.parametrize("servers", [(1, 1), (2, 3)])
def test_a_bulk_synchronous_training_goes_on_exactly(
    pool: Pool, tmp_path: Path, servers: tuple[int, int], optimizer: str, options: dict[str, Any]
) -> None:
    whole = run(pool, 2, 1, tmp_path / "whole", "bsp", optimizer, options, None)[0]
    run(pool, 2, servers[0], tmp_path / "parts", "bsp", optimizer, options, 2 * STEPS + 1)
    rest = run(pool, 2, servers[1], tmp_path / "parts", "bsp", optimizer, options, None)[0]
    assert rest[0] == 2 * STEPS
    for mine, theirs in zip([*whole[2], *whole[3]], [*rest[2], *rest[3]], strict=True):
        assert torch.allclose(mine, theirs, rtol=1e-9, atol=1e-9)
    assert rest[4] == whole[4]


def test_sparse_tables_are_saved_whole(pool: Pool, tmp_path: Path) -> None:
    args = ("bsp", "Adagrad", {"lr": 0.1})
    whole = run(pool, 2, 2, tmp_path / "whole", *args, None, True)[0]
    run(pool, 2, 2, tmp_path / "parts", *args, 2 * STEPS + 1, True)
    rest = run(pool, 2, 1, tmp_path / "parts", *args, None, True)[0]
    for mine, theirs in zip([*whole[2], *whole[3]], [*rest[2], *rest[3]], strict=True):
        assert torch.allclose(mine, theirs, rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize("strategy", ["asynchronous", "ssp(staleness=2)"])
def test_an_asynchronous_training_repeats_at_most_what_others_held(pool: Pool, tmp_path: Path, strategy: str) -> None:
    args = (strategy, "SGD", {"lr": 0.01})
    run(pool, 2, 2, tmp_path, *args, STEPS + 1)
    rest = run(pool, 2, 2, tmp_path, *args, None)
    assert rest[0][0] == STEPS
    total = rest[0][1] + rest[1][1]
    assert 3 * 48 - 2 * STEPS * 4 - 8 <= total < 3 * 48  # batches of four samples


def test_the_number_of_workers_may_change(pool: Pool, tmp_path: Path) -> None:
    args = ("asynchronous", "SGD", {"lr": 0.01})
    run(pool, 2, 1, tmp_path, *args, STEPS + 1)
    rest = run(pool, 3, 2, tmp_path, *args, None)
    assert sum(result[1] for result in rest) < 3 * 48


def go_through(strategy: str, stop: int | None) -> list[list[int]]:
    """The samples that this worker had in each of two epochs, if it goes so far; all stop after that many steps."""
    model = torch.nn.Linear(1, 1).double()
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    data = torch.utils.data.TensorDataset(torch.arange(53).double()[:, None])
    loader: Any = torch.utils.data.DataLoader(data, 3, shuffle=True)
    model, optimizer, loader = hocket.distribute(model, optimizer, loader, strategy=strategy)
    position = hocket.resume(model=model, optimizer=optimizer, loader=loader)
    seen: list[list[int]] = []
    steps = position.step
    for _ in range(position.epoch, 2):
        seen.append([])
        for (x,) in loader:
            saver = current().training.saver
            if isinstance(saver, Saver):
                saver.settle()
            if steps == stop:
                hocket.barrier()
                return seen
            if loader.weight:
                seen[-1] += x[:, 0].int().tolist()
            model(x).mean().backward()
            optimizer.step()
            optimizer.zero_grad()
            steps += 1
    return seen


@pytest.mark.few(3)
@pytest.mark.parametrize(
    ("first", "then"),
    [
        ("mirrored", "bsp"), ("mirrored", "ssp"), ("mirrored", "gossip"), ("mirrored", "hogwild"), ("bsp", "mirrored"),
        ("bsp", "asynchronous"), ("bsp", "local_sgd(period=2)"),
    ],
)  # fmt: skip
def test_another_kind_of_strategy_goes_on_where_the_first_was(
    pool: Pool, tmp_path: Path, first: str, then: str
) -> None:
    settings = {"checkpoint": str(tmp_path), "checkpoint_every": STEPS}
    before = pool.run(3, go_through, first, STEPS, **needs(first), **settings)
    rest = pool.run(2, go_through, then, None, **needs(then), **settings)
    assert sorted(number for rank in [*before, *rest] for number in rank[0]) == list(range(53))
    assert sorted(number for rank in rest for number in rank[1]) == list(range(53))


@pytest.mark.parametrize("first", ["ssp", "hogwild", "gossip"])
def test_what_others_held_is_done_again_and_nothing_is_left_out(pool: Pool, tmp_path: Path, first: str) -> None:
    settings = {"checkpoint": str(tmp_path), "checkpoint_every": STEPS}
    before = pool.run(2, go_through, first, STEPS, **needs(first), **settings)
    rest = pool.run(3, go_through, "mirrored", None, **settings)
    again = [number for rank in rest for number in rank[0]]
    assert len(set(again)) == len(again) < 53
    assert {number for rank in before for number in rank[0]} | set(again) == set(range(53))


def shuffled(strategy: str) -> list[int]:
    """The order of an epoch and a half, as far as this worker sees it, with the first numbers of rank 0's seed."""
    data = torch.utils.data.TensorDataset(torch.arange(12).double()[:, None])
    model = torch.nn.Linear(1, 1).double()
    torch.manual_seed(4)
    loader: Any = torch.utils.data.DataLoader(data, 1, shuffle=True)
    optimizer: Any = torch.optim.SGD(model.parameters(), 1e-6)
    model, optimizer, loader = hocket.distribute(model, optimizer, loader, strategy=strategy)
    found = []
    for _ in range(2):
        for (x,) in loader:  # a batch that nobody trains on goes back, and another worker may get it
            optimizer.zero_grad()
            model(x).sum().backward()
            optimizer.step()
            found.append(int(x))
    return found


def test_all_strategies_shuffle_alike(pool: Pool) -> None:
    mirrored, bsp = pool.run(2, shuffled, "mirrored"), pool.run(2, shuffled, "bsp", servers=1)
    assert bsp == mirrored
    one = pool.run(1, shuffled, "asynchronous", servers=1)[0]
    assert one[:12] == [number for pair in zip(mirrored[0][:6], mirrored[1][:6], strict=True) for number in pair]


def with_dropout(stop: int | None) -> list[torch.Tensor]:
    """Two epochs of 5 rounds, with a data set that draws, dropout and batch norm."""
    torch.manual_seed(0)
    layers = [torch.nn.Linear(4, 8), torch.nn.BatchNorm1d(8), torch.nn.Dropout(0.5), torch.nn.Linear(8, 1)]
    model: Any = torch.nn.Sequential(*layers).double()
    optimizer: Any = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    loader: Any = torch.utils.data.DataLoader(
        torch.utils.data.TensorDataset(torch.eye(4).repeat(10, 1).double()), 4, True
    )
    model, optimizer, loader = hocket.distribute(model, optimizer, loader, strategy="bsp")
    position = hocket.resume(model=model, optimizer=optimizer, loader=loader)
    steps = position.step
    for _ in range(position.epoch, 2):
        for (x,) in loader:
            saver = current().training.saver
            if isinstance(saver, Saver):
                saver.settle()
            if steps == stop:
                hocket.barrier()
                return []
            (model(x + 0.1 * torch.randn_like(x)) ** 2).mean().backward()
            optimizer.step()
            optimizer.zero_grad()
            steps += 1
    return [*model.state_dict().values()]


def test_workers_in_step_go_on_bit_for_bit_with_dropout(pool: Pool, tmp_path: Path) -> None:
    settings = {"servers": 1, "checkpoint_every": 3}
    whole = pool.run(2, with_dropout, None, checkpoint=str(tmp_path / "whole"), **settings)
    pool.run(2, with_dropout, 4, checkpoint=str(tmp_path / "parts"), **settings)
    rest = pool.run(2, with_dropout, None, checkpoint=str(tmp_path / "parts"), **settings)
    for one, other in zip(whole, rest, strict=True):
        assert all(map(torch.equal, one, other))
