"""The law of full batches: P workers with a part of the data each are one process with all of it."""

from pathlib import Path
from typing import Any

import pytest
import torch
from pool import Pool
from strategies.training import Case, make
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import hocket
from hocket.job.checkpoint.resuming import _saver
from hocket.job.runtime import current

WOLFE = {"lr": 1.0, "max_iter": 5, "history_size": 3, "line_search_fn": "strong_wolfe"}
PLAIN = {"lr": 0.3, "max_iter": 4, "history_size": 3}


def train(case: Case, model: nn.Module, optimizer: Any, loader: Any, reduction: str, form: str) -> Any:
    """Two steps of a batch optimizer; the parameters, the losses and how often the closure was called."""
    calls, losses = 0, []

    def closure() -> Any:
        nonlocal calls
        calls += 1
        optimizer.zero_grad()
        total: Any = 0.0
        for x, y in loader:
            errors = (model(x) - y) ** 2
            loss = errors.mean() / len(loader) if reduction == "mean" else errors.sum() / case.samples
            if form != "one backward":
                loss.backward()
                loss = loss.detach()
            total = total + (float(loss) if form == "floats" else loss)
        if form == "one backward":
            total.backward()
        return total

    for _ in range(2):
        if form == "no closure":
            losses.append(float(closure()))
            optimizer.step()
        else:
            losses.append(float(optimizer.step(closure)))
    return [p.detach().clone() for p in model.parameters()], losses, calls


def together(case: Case, reduction: str, form: str) -> Any:
    model, optimizer, loader = make(case, 1)
    hocket.distribute(model, optimizer, strategy=f"full_batch(reduction={reduction!r})")
    loader = hocket.distribute(loader=loader)
    result = train(case, model, optimizer, loader, reduction, form)
    if hocket.size() > 1:
        assert current().strategies[0].steps == result[2]  # one exchange for each call
    return result


@pytest.mark.parametrize(
    ("workers", "optimizer", "options", "reduction", "form", "hosts", "samples"),
    [
        (1, "LBFGS", WOLFE, "mean", "tensors", None, 49),
        (2, "LBFGS", WOLFE, "mean", "tensors", None, 48),
        (3, "LBFGS", WOLFE, "mean", "tensors", None, 49),  # a batch that some have, and a repeated one
        (3, "LBFGS", WOLFE, "sum", "floats", None, 49),
        (3, "LBFGS", PLAIN, "mean", "floats", [2, 1], 49),
        (2, "LBFGS", WOLFE, "mean", "one backward", None, 48),
        (2, "SGD", {"lr": 0.1, "momentum": 0.9}, "mean", "tensors", None, 49),
        (3, "SGD", {"lr": 0.1}, "sum", "no closure", None, 49),
        (2, "SGD", {"lr": 0.1}, "mean", "no closure", [1, 1], 49),
    ],
)
def test_many_workers_are_one(
    pool: Pool, workers: int, optimizer: str, options: Any, reduction: str, form: str, hosts: Any, samples: int
) -> None:
    case = Case(model="matrices", optimizer=optimizer, options=options, samples=samples, batch=8)
    parameters, losses, calls = train(case, *make(case, workers), reduction, form)
    many = pool.run(workers, together, case, reduction, form, hosts=hosts)
    for found, seen, called in many:
        for mine, theirs in zip(parameters, found, strict=True):
            assert torch.allclose(mine, theirs, rtol=1e-9, atol=1e-9), (mine - theirs).abs().max()
        assert all(map(torch.equal, many[0][0], found)) and called == calls
        if form != "no closure":
            assert seen == pytest.approx(losses, rel=1e-9) and seen == many[0][1]


def test_batches_that_count_differently_need_a_backward_each(pool: Pool) -> None:
    case = Case(model="matrices", optimizer="LBFGS", options=WOLFE, samples=49, batch=8)
    for outcome in pool.outcomes(3, together, case, "mean", "one backward"):
        assert outcome.kind == "UsageError" and "call it inside of the loop over the loader" in outcome.message


def resumed(stop: int | None) -> Any:
    torch.manual_seed(3)
    model = nn.Sequential(nn.Linear(2, 8), nn.Tanh(), nn.Linear(8, 1))
    optimizer = torch.optim.LBFGS(model.parameters(), **WOLFE)
    x = torch.randn(22, 2)
    loader = DataLoader(TensorDataset(x, x.prod(1, keepdim=True)), 4)
    model, optimizer, loader = hocket.distribute(model, optimizer, loader, strategy="full_batch")
    where = hocket.resume(model=model, optimizer=optimizer, loader=loader)

    def closure() -> torch.Tensor:
        optimizer.zero_grad()
        total = torch.zeros(())
        for x, y in loader:
            loss = nn.functional.mse_loss(model(x), y) / len(loader)
            loss.backward()
            total += loss.detach()
        return total

    for step in range(where.step, 5):
        optimizer.step(closure)
        if current().config.checkpoint:
            _saver(current())._last.wait()
        if step + 1 == stop:
            break
    return where.step, [p.tolist() for p in model.parameters()]


def test_a_resumed_training_is_the_uninterrupted_one(pool: Pool, tmp_path: Path) -> None:
    whole = pool.run(2, resumed, None)
    settings = {"checkpoint": str(tmp_path), "checkpoint_every": 2}
    pool.run(2, resumed, 3, **settings)
    rest = pool.run(2, resumed, None, **settings)
    assert rest[0][0] == 2 and [parameters for _, parameters in rest] == [parameters for _, parameters in whole]
