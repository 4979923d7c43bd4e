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
from hocket.job.checkpoint.save_load_resume import _saver
from hocket.job.worker import current

WOLFE = {"lr": 1.0, "max_iter": 5, "history_size": 3, "line_search_fn": "strong_wolfe"}
PLAIN = {"lr": 0.3, "max_iter": 4, "history_size": 3}


def train(case: Case, model: nn.Module, optimizer: Any, loader: Any, form: str) -> Any:
    """Two steps of a batch optimizer; the parameters, the losses and how often the closure was called."""
    calls, losses = 0, []

    def closure() -> Any:
        nonlocal calls
        calls += 1
        optimizer.zero_grad()
        if "penalty before" in form:
            penalty(model).backward()
        total: Any = 0.0
        for x, y in loader:
            errors = (model(x) - y) ** 2
            loss = errors.sum() / case.samples if "sum" in form else errors.mean() / len(loader)
            if "one backward" not in form:
                loss.backward()
                loss = loss.detach()
            total = total + (float(loss) if "floats" in form else loss)
        if "one backward" in form:
            total.backward()
        if "penalty after" in form:
            penalty(model).backward()
        return total

    for _ in range(2):
        if "no closure" in form:
            losses.append(float(closure()))
            optimizer.step()
        else:
            losses.append(float(optimizer.step(closure)))
    return [p.detach().clone() for p in model.parameters()], losses, calls


def penalty(model: nn.Module) -> torch.Tensor:
    return 0.01 * sum((p**2).sum() for p in model.parameters())


def together(case: Case, form: str) -> Any:
    model, optimizer, loader = make(case, 1)
    hocket.distribute(model, optimizer, strategy="full_batch(reduction='sum')" if "sum" in form else "full_batch")
    if "sampler" in form:  # batches of 5, 8, 8, 8, 3 and so on, in number as many as nobody knows before
        cuts = torch.arange(case.samples).split([5, *[8] * (case.samples // 8 - 1), case.samples % 8 + 3])
        loader = DataLoader(loader.dataset, batch_sampler=[cut.tolist() for cut in cuts])
    loader = hocket.distribute(loader=loader)
    result = train(case, model, optimizer, loader, form)
    assert current().training.strategies[0].steps == result[2]  # one exchange for each call
    return result


def over_all_data(case: Case, form: str) -> Any:
    """One plain process, all the data in one batch."""
    model, optimizer, loader = make(case, 1)
    return train(case, model, optimizer, DataLoader(loader.dataset, case.samples), form)


SGD = {"lr": 0.1}


@pytest.mark.few(5)
@pytest.mark.parametrize(
    ("workers", "optimizer", "options", "form", "hosts", "samples"),
    [
        (1, "LBFGS", WOLFE, "tensors", None, 49),
        (2, "LBFGS", WOLFE, "tensors", None, 49),
        (3, "LBFGS", WOLFE, "tensors", None, 49),  # a batch that some have, and a repeated one
        (3, "LBFGS", WOLFE, "sum, floats", None, 49),
        (3, "LBFGS", PLAIN, "floats", [2, 1], 53),
        (2, "LBFGS", WOLFE, "one backward", None, 48),
        (1, "LBFGS", WOLFE, "sampler", None, 53),
        (2, "SGD", {"lr": 0.1, "momentum": 0.9}, "sampler", None, 48),
        (1, "SGD", SGD, "tensors", None, 53),
        (2, "SGD", {"lr": 0.1, "momentum": 0.9}, "penalty after", None, 53),
        (3, "SGD", SGD, "no closure, penalty before", None, 53),
        (3, "SGD", SGD, "sum, no closure", None, 49),
        (2, "SGD", SGD, "no closure", [1, 1], 49),
    ],
)
def test_many_workers_are_one_with_all_the_data(
    pool: Pool, workers: int, optimizer: str, options: Any, form: str, hosts: Any, samples: int
) -> None:
    case = Case(model="matrices", optimizer=optimizer, options=options, samples=samples, batch=8)
    parameters, losses, calls = over_all_data(case, form)
    many = pool.run(workers, together, case, form, hosts=hosts)
    for found, seen, called in many:
        for mine, theirs in zip(parameters, found, strict=True):
            assert torch.allclose(mine, theirs, rtol=1e-9, atol=1e-9), (mine - theirs).abs().max()
        assert all(map(torch.equal, many[0][0], found)) and called == calls
        if "no closure" not in form and "penalty" not in form:
            assert seen == pytest.approx(losses, rel=1e-9) and seen == many[0][1]


@pytest.mark.parametrize(
    ("workers", "form"), [(1, "one backward"), (3, "one backward"), (2, "one backward, no closure")]
)
def test_batches_that_count_differently_need_a_backward_each(pool: Pool, workers: int, form: str) -> None:
    case = Case(model="matrices", optimizer="SGD", options=SGD, samples=49, batch=8)
    for outcome in pool.outcomes(workers, together, case, form):
        assert outcome.kind == "UsageError" and "call it inside of the loop over the loader" in outcome.message


def step_by_step(case: Case) -> Any:
    """Each batch on its own, as other strategies do it, and with several calls of a closure for each."""
    model, optimizer, loader = hocket.distribute(*make(case, 1), strategy="full_batch")
    for x, y in loader:

        def closure(x: Any = x, y: Any = y) -> Any:
            optimizer.zero_grad()
            loss = ((model(x) - y) ** 2).mean()
            loss.backward()
            return loss

        optimizer.step(closure)
    return [p.detach().clone() for p in model.parameters()]


def test_a_step_for_each_batch_is_one_on_that_batch(pool: Pool) -> None:
    case = Case(model="matrices", optimizer="LBFGS", options=PLAIN, samples=53, batch=8)
    model, optimizer, loader = make(case, 2)
    for x, y in loader:

        def closure(x: Any = x, y: Any = y) -> Any:
            optimizer.zero_grad()
            loss = ((model(x) - y) ** 2).mean()
            loss.backward()
            return loss

        optimizer.step(closure)
    for found in pool.run(2, step_by_step, case):
        for mine, theirs in zip(model.parameters(), found, strict=True):
            assert torch.allclose(mine, theirs, rtol=1e-9, atol=1e-9)


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
