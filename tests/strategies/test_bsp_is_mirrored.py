"""Bulk-synchronous training with servers is ``mirrored``: the same batches, updates, numbers, and ends of loops."""

from dataclasses import dataclass
from typing import Any

import pytest
import torch
from pool import Pool, RemoteError
from products import product
from strategies.training import Case, assert_same_state, make
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import hocket
from hocket.errors import NonFiniteError
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


def counting(strategy: str) -> list[torch.Tensor]:
    """Batches count as often as the script says, also the last one, of which workers have different shares."""
    model, optimizer, loader = hocket.distribute(*make(Case(samples=17), 1), strategy=strategy)
    for x, y in loader:
        hocket.weight(float(x[:, 0].abs().sum()))
        ((model(x) - y) ** 2).mean().backward()
        optimizer.step()
        optimizer.zero_grad()
    return [p.detach().clone() for p in model.parameters()]


def test_what_the_script_counts_is_the_weight_of_a_smaller_batch(pool: Pool) -> None:
    for one, other in zip(pool.run(2, counting, "mirrored"), pool.run(2, counting, "bsp", servers=1), strict=True):
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


@dataclass(frozen=True)
class Job:
    """A job in which one rank has an infinity in one batch of each epoch.

    Attributes:
        strategy: What is to be equal to ``mirrored``.
        workers: How many workers there are.
        servers: How many servers there are.
        rank: The rank with the infinity.
        last: Whether the batch is the last one, of which ranks have different shares.
    """

    strategy: str
    workers: int
    servers: int
    rank: int
    last: bool


JOBS = [
    Job("bsp", 2, 1, rank=1, last=False),
    Job("ps(staleness=0)", 3, 2, rank=0, last=True),
    Job("softsync(1)", 2, 2, rank=0, last=True),
    Job("bsp", 3, 1, rank=2, last=True),  # which has nothing of that batch, so that it counts
    Job("bsp", 1, 2, rank=0, last=False),
]


def infinite(how: str, job: Job, strategy: str) -> dict[str, Any]:
    torch.manual_seed(0)
    rows = "rows" in how
    table = nn.Embedding(11, 4, sparse=rows and strategy != "mirrored")
    first: list[nn.Module] = [table] if rows else [nn.Linear(1, 4), nn.Linear(4, 4)]
    model: Any = nn.Sequential(*first, nn.Tanh(), nn.Linear(4, 1)).double()
    count = 6 * hocket.size() + 5  # two full batches, and a rest that is not the same on all ranks
    x, y = torch.arange(count) % 11, torch.sin(torch.arange(count).double()[:, None])
    data = TensorDataset(x if rows else x.double()[:, None] / 5, y)
    optimizer: Any = torch.optim.SGD(model.parameters(), lr=0.2, momentum=0.0 if rows else 0.9)
    if "fused" in how:
        optimizer = torch.optim.Adam(model.parameters(), lr=0.02, fused=True)
    loader: Any = DataLoader(data, 3)
    on_nan = "raise" if "raise" in how else "skip"
    model, optimizer, loader = hocket.distribute(model, optimizer, loader, strategy=strategy, on_nan=on_nan)
    factors = [1.0, 1.0]  # of the loss, and of the gradient that the first layer gets
    first[0].register_forward_hook(lambda _, __, out: out.register_hook(lambda grad: grad * factors[1]) and None)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 2, 0.8)
    scaler = torch.amp.GradScaler("cpu", init_scale=8.0, growth_interval=2, enabled="scaler" in how)
    is_sick = hocket.rank() == job.rank
    trace: list[Any] = []
    for _ in range(2):
        for number, (inputs, targets) in enumerate(loader, start=1):
            is_now = number == (len(loader) if job.last else 2)
            if "weightless" in how:
                hocket.weight(float(len(inputs)) * (not (is_now and is_sick)))
            factors[rows] = float("inf") if is_now and is_sick else 1.0
            loss = ((model(inputs) - targets) ** 2).mean() * factors[0]
            if "accumulate" in how and number == 1:
                with hocket.accumulate():
                    scaler.scale(loss).backward()
                continue
            scaler.scale(loss).backward()
            if "clip" in how and strategy == "mirrored":
                nn.utils.clip_grad_norm_(model.parameters(), 0.1)
            try:
                scaler.step(optimizer)
            except NonFiniteError as error:
                trace.append(str(error))
            if scaler.is_enabled():
                scaler.update()
            scheduler.step()
            optimizer.zero_grad()
            counts, (trained,) = current().training.counts, current().training.strategies
            seen = [counts.step, counts.batches, counts.samples, trained.steps, trained.skipped]
            trace.append([*seen, scaler.get_scale(), scheduler.get_last_lr()])
    parameters = [p.detach().clone() for p in model.state_dict().values()]
    return {"trace": trace, "parameters": parameters, "state": optimizer.state_dict()}


def check_infinite(pool: Pool, how: str, job: Job) -> None:
    strategy = "bsp(clip=0.1)" if "clip" in how else job.strategy
    mirrored = pool.run(job.workers, infinite, how, job, "mirrored")
    served = pool.run(job.workers, infinite, how, job, strategy, servers=job.servers)
    for one, other in zip(mirrored, served, strict=True):
        assert one["trace"] == other["trace"]
        for mine, theirs, first in zip(one["parameters"], other["parameters"], served[0]["parameters"], strict=True):
            assert torch.allclose(mine, theirs, rtol=1e-9, atol=1e-9)
            assert torch.equal(theirs, first)
        assert_same_state(one["state"], other["state"], 1e-9)


@pytest.mark.few(4)
@pytest.mark.parametrize("job", JOBS, ids=str)
@pytest.mark.parametrize("how", ["scaler", "skip"])
def test_an_infinity_on_one_rank_leaves_out_the_step_of_all(pool: Pool, how: str, job: Job) -> None:
    check_infinite(pool, how, job)


@pytest.mark.few(3)
@product(
    how=[
        "fused scaler", "scaler, accumulate", "scaler, weightless", "scaler, rows", "skip, rows", "skip, clip", "raise",
    ],
    job=JOBS[:3],
)  # fmt: skip
def test_an_infinity_in_other_scripts(pool: Pool, how: str, job: Job) -> None:
    check_infinite(pool, how, job)


def alone_with_nan(strategy: str) -> tuple[int, int]:
    """Steps that a worker has left out, and all: rank 1 has a NaN in the second one, in the rows of an embedding."""
    model: Any = nn.Sequential(nn.Embedding(5, 4, sparse=True), nn.Linear(4, 1))
    optimizer: Any = torch.optim.SGD(model.parameters(), lr=0.1)
    model, optimizer = hocket.distribute(model, optimizer, strategy=strategy, on_nan="skip")
    for step in range(4):
        hidden = model[0](torch.tensor([step, 4]))
        if step == 1 and hocket.rank() == 1:
            hidden.register_hook(lambda gradient: gradient * float("nan"))
        model[1](hidden).mean().backward()
        optimizer.step()
        optimizer.zero_grad()
    (trained,) = current().training.strategies
    assert bool(model.state_dict()["0.weight"].isfinite().all())
    return trained.skipped, current().training.counts.step


@pytest.mark.parametrize("strategy", ["asynchronous", "ssp", "softsync(2)"])
def test_where_each_gradient_is_applied_by_itself_a_step_is_left_out_alone(pool: Pool, strategy: str) -> None:
    assert pool.run(2, alone_with_nan, strategy, servers=1) == [(0, 4), (1, 4)]
    assert pool.served[0]["updates"] == 2 * (4 + 3)  # of the embedding, and of all other parameters
