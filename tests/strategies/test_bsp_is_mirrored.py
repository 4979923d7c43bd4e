"""Bulk-synchronous training with servers is ``mirrored``: the same batches, updates, numbers, and ends of loops."""

from typing import Any

import pytest
import torch
from pool import Pool, RemoteError
from strategies.training import Case, make
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import hocket
from hocket.job.worker import current

MAX_STEPS = 19  # in the third of epochs of 8


def until_max_steps(strategy: str) -> dict[str, Any]:
    """A script that ends at a number of steps, in the middle of an epoch."""
    model, optimizer, loader = hocket.distribute(*make(Case(samples=47), 1), strategy=strategy)
    scheduler = torch.optim.lr_scheduler.OneCycleLR(optimizer, 0.02, total_steps=MAX_STEPS + 1)
    steps, seen, weights = 0, [], []
    while steps < MAX_STEPS:
        for x, y in loader:
            seen.append(x[:, 0].tolist())
            weights.append(loader.weight)
            ((model(x) - y) ** 2).mean().backward()
            optimizer.step()
            optimizer.zero_grad()
            scheduler.step()
            steps += 1
            if steps % 5 == 0:
                hocket.mean(float(x.sum()))
            if steps == MAX_STEPS:
                break
    return {
        "parameters": [p.detach().clone() for p in model.parameters()],
        "steps": steps,
        "seen": seen,
        "weights": weights,
        "samples": current().training.counts.samples,
        "mean": hocket.mean(float(hocket.rank())),
    }


@pytest.mark.parametrize("workers", [2, 3])
def test_with_max_steps_over_several_epochs(pool: Pool, workers: int) -> None:
    mirrored = pool.run(workers, until_max_steps, "mirrored")
    first, again = (pool.run(workers, until_max_steps, "bsp", servers=2) for _ in range(2))
    assert pool.served[0]["updates"] == MAX_STEPS
    for one, two, three in zip(mirrored, first, again, strict=True):
        for key in ("steps", "seen", "weights", "samples", "mean"):
            assert one[key] == two[key] == three[key], key
        for mine, theirs, later in zip(one["parameters"], two["parameters"], three["parameters"], strict=True):
            assert torch.allclose(mine, theirs, rtol=1e-9, atol=1e-9)
            assert torch.equal(theirs, later)  # bit for bit


def three_folds(strategy: str) -> list[float]:
    """Cross-validation: a new model for each fold, a loop that is left, and a mean over all workers."""
    found = []
    for fold in range(3):
        model, optimizer, loader = hocket.distribute(*make(Case(samples=21 + fold), 1), strategy=strategy)
        for step, (x, y) in enumerate(loader, start=1):
            loss = ((model(x) - y) ** 2).mean()
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            if step == 3:
                break
        found.append(hocket.mean(float(loss)))
    return found


def test_three_folds_that_are_left(pool: Pool) -> None:
    mirrored = pool.run(2, three_folds, "mirrored")
    assert pool.run(2, three_folds, "bsp", servers=1) == [pytest.approx(each, abs=1e-9) for each in mirrored]


def accumulating(strategy: str, sparse: bool) -> list[torch.Tensor]:
    """Steps of two batches, of which the last of an epoch is smaller; perhaps with an embedding by rows."""
    torch.manual_seed(0)
    table = nn.Embedding(11, 4, sparse=sparse)
    model: Any = nn.Sequential(table, nn.Tanh(), nn.Linear(4, 1)).double()
    data = TensorDataset(torch.arange(22) % 11, torch.sin(torch.arange(22.0).double()[:, None]))
    optimizer: Any = torch.optim.SGD(model.parameters(), lr=0.3)
    model, optimizer, loader = hocket.distribute(model, optimizer, DataLoader(data, 3), strategy=strategy)
    for _ in range(2):
        for number, (x, y) in enumerate(loader, start=1):
            loss = ((model(x) - y) ** 2).mean()
            if number % 2:
                with hocket.accumulate():
                    loss.backward()
            else:
                loss.backward()
                optimizer.step()
                optimizer.zero_grad()
    return [*model.state_dict().values()]


@pytest.mark.parametrize("sparse", [False, True])
def test_accumulation_weighs_smaller_batches_alike(pool: Pool, sparse: bool) -> None:
    for one, other in zip(
        pool.run(2, accumulating, "mirrored", False), pool.run(2, accumulating, "bsp", sparse, servers=2), strict=True
    ):
        for mine, theirs in zip(one, other, strict=True):
            assert torch.allclose(mine, theirs, rtol=1e-9, atol=1e-9)


def editing(strategy: str, edit: str, sparse: bool) -> None:
    layers = [nn.Embedding(5, 4, sparse=True), nn.Linear(4, 1)] if sparse else [nn.Linear(4, 4), nn.Linear(4, 1)]
    model: Any = nn.Sequential(*layers)
    optimizer: Any = torch.optim.SGD(model.parameters(), lr=0.1)
    model, optimizer = hocket.distribute(model, optimizer, strategy=strategy)
    for _ in range(2):
        model(torch.tensor([1, 2]) if sparse else torch.ones(2, 4)).mean().backward()
        if edit == "clip":
            nn.utils.clip_grad_norm_(model[1].parameters(), 1e6)
        elif edit == "scale":
            model[0].weight.grad = model[0].weight.grad * 2
        elif edit == "read":
            assert float(model[1].weight.grad.abs().sum()) > 0
        optimizer.step()
        optimizer.zero_grad(set_to_none=edit != "read")


@pytest.mark.parametrize(
    ("edit", "sparse", "strategy"),
    [("clip", False, "bsp"), ("scale", False, "ps"), ("scale", True, "softsync(1)"), ("clip", True, "bsp")],
)
def test_gradients_that_servers_will_average_cannot_be_changed(
    pool: Pool, edit: str, sparse: bool, strategy: str
) -> None:
    with pytest.raises(RemoteError, match=r"gradients were changed.*--strategy '\w+\(clip=1.0\)'"):
        pool.run(2, editing, strategy, edit, sparse, servers=1)


def test_gradients_may_be_read_and_those_of_one_worker_or_one_by_one_changed(pool: Pool) -> None:
    pool.run(2, editing, "bsp", "read", False, servers=1)
    pool.run(1, editing, "bsp", "clip", False, servers=1)
    pool.run(2, editing, "ssp", "scale", True, servers=1)


def scaled(strategy: str) -> list[torch.Tensor]:
    """GradScaler with a scale that grows on the way."""
    case = Case(samples=24)
    model, optimizer, loader = hocket.distribute(*make(case, 1), strategy=strategy)
    scaler = torch.amp.GradScaler("cpu", init_scale=8.0, growth_interval=3)
    for x, y in loader:
        scaler.scale(((model(x) - y) ** 2).mean()).backward()
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()
    return [torch.tensor(scaler.get_scale()), *(p.detach().clone() for p in model.parameters())]


def test_a_scaler_of_gradients(pool: Pool) -> None:
    for one, other in zip(pool.run(2, scaled, "mirrored"), pool.run(2, scaled, "bsp", servers=1), strict=True):
        for mine, theirs in zip(one, other, strict=True):
            assert torch.allclose(mine, theirs, rtol=1e-9, atol=1e-9)
