"""The law of distributed mini-batches: mirrored on batches 0, k+1, 2(k+1) … of a loop; the others leave no trace."""

import inspect
import itertools
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
from pool import Pool, RemoteError
from strategies.training import Case, Result, alone, assert_equal, make, together
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import hocket
from hocket import specs
from hocket.errors import StrategyError
from hocket.events import Facts, Record
from hocket.job.worker import current
from hocket.observe.summaries import PredictedSummary
from job.test_checkpoint import train

MOMENTUM = {"lr": 0.02, "momentum": 0.9, "nesterov": True, "weight_decay": 0.01}
ADAM: dict[str, Any] = {"optimizer": "Adam", "options": {"lr": 0.01, "weight_decay": 0.1}}


def sparing(case: Case, workers: int, extra: int) -> Result:
    """What one plain process does, with the batch of all workers, that leaves out most batches.

    A schedule goes on with every batch; a step is taken with the rate of the last batch of its cycle.
    """
    model, optimizer, loader = make(case, workers)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 3, 0.5) if case.schedule else None
    for _ in range(case.epochs):
        place = 0
        for number, (x, y) in enumerate(loader, start=1):
            loss = ((model(x) - y) ** 2).mean()
            if place == 0:
                loss.backward()
            if number % case.accumulate and number < len(loader):
                continue
            if place == extra or number == len(loader):
                optimizer.step()
                optimizer.zero_grad()
            place = (place + 1) % (extra + 1)
            if scheduler is not None:
                scheduler.step()
    return {
        "parameters": [p.detach().clone() for p in model.parameters()],
        "state": optimizer.state_dict(),
        "norms": [],
        "strides": [p.stride() for p in model.parameters()],
    }


@pytest.mark.few(3)
@pytest.mark.parametrize(
    ("workers", "hosts", "extra", "more"),
    [
        (1, None, 1, {"options": MOMENTUM}),
        (2, None, 1, {"options": MOMENTUM, "zero": True}),
        (3, None, 2, ADAM),
        (3, [1, 1, 1], 1, {**ADAM, "groups": True}),
        (3, [2, 1], 3, {"options": MOMENTUM}),  # 6 batches, the last one smaller: a cycle and a part of one
        (2, None, 1, {**ADAM, "accumulate": 3, "samples": 50}),
        (3, None, 2, {"model": "sometimes", "options": MOMENTUM}),  # gradients on some ranks only
        (2, None, 1, {"model": "channels_last", **ADAM, "samples": 3}),  # one batch, and a repeated one
        (2, None, 1, {"options": MOMENTUM, "schedule": True, "samples": 48}),
    ],
)
def test_is_mirrored_on_the_first_batch_of_each_cycle(
    pool: Pool, workers: int, hosts: list[int] | None, extra: int, more: dict[str, Any]
) -> None:
    case, strategy = Case(**more), f"dmb(extra={extra})"
    assert_equal(
        sparing(case, workers, extra), pool.run(workers, together, case, strategy, hosts=hosts, check_replicas=1)
    )


def test_without_extra_batches_it_is_mirrored_clipping_included(pool: Pool) -> None:
    case = Case(options=MOMENTUM, clip=0.1)
    assert_equal(alone(case, 2), pool.run(2, together, case, "dmb(extra=0)"))


def test_in_phases(pool: Pool) -> None:
    case = Case(options=MOMENTUM, samples=48)
    assert_equal(sparing(case, 2, 2), pool.run(2, together, case, "dmb(extra=2) -> mirrored @ epoch 3"))


@pytest.mark.parametrize("text", ["dmb", "dmb()", "dmb(extra=None)", "mirrored -> dmb @ epoch 2"])
def test_the_number_must_be_given(text: str) -> None:
    with pytest.raises(StrategyError, match=r"dmb\(extra=1\); or use 'delayed'"):
        specs.parse(text)


def test_numbers(pool: Pool) -> None:
    assert specs.parse("dmb(2)") == hocket.DMB(extra=2)
    assert specs.write(hocket.DMB(extra=2)) == "dmb(extra=2)"
    with pytest.raises(StrategyError, match="extra=-1 must be 0"):
        specs.parse("dmb(extra=-1)")
    with pytest.raises(StrategyError, match=r"delayed, dmb\(extra=1\), full_batch"):
        specs.parse("sgd")
    with pytest.raises(RemoteError, match=r"strategy 'dmb': say how many .* or use 'delayed'"):
        pool.run(1, bare)


def bare() -> None:
    model = nn.Linear(1, 1)
    hocket.distribute(model, torch.optim.SGD(model.parameters(), lr=0.1), strategy=hocket.DMB())


class Kept:
    """What a launcher would have heard."""

    def __init__(self) -> None:
        self.taken: list[Record] = []

    def put(self, record: Record) -> None:
        self.taken.append(record)


def watched(batches: int) -> dict[str, Any]:
    """What a script sees that leaves its loop after some batches; batch j has gradient j + 1 everywhere."""
    model = nn.Linear(1, 1, bias=False).double()
    nn.init.zeros_(model.weight)
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    scheduler = torch.optim.lr_scheduler.ConstantLR(optimizer, 1.0)
    data = DataLoader(TensorDataset(torch.arange(1.0, 11.0).double().repeat_interleave(4).view(-1, 1)), 2)
    model, optimizer, loader = hocket.distribute(model, optimizer, data, strategy=hocket.DMB(extra=2))
    (strategy,) = current().training.strategies
    kept = current().sink = Kept()  # type: ignore[assignment]
    seen: dict[str, Any] = {"weights": [], "gradients": [], "exchanges": []}
    for number, (x,) in enumerate(loader, start=1):
        model(x).mean().backward()
        optimizer.step()
        seen["gradients"].append(float(model.weight.grad))
        optimizer.zero_grad()
        with warnings.catch_warnings():
            warnings.simplefilter("error")  # as if the script had not called optimizer.step() before
            scheduler.step()
        seen["weights"].append(float(model.weight.detach()))
        seen["exchanges"].append(strategy.steps)
        if number == batches:
            break
    hocket.barrier()
    seen["end"] = float(model.weight.detach())
    current().teller.tell_again()
    seen["facts"] = [record.values for record in kept.taken if isinstance(record, Facts)][-1]
    seen["holds"], seen["step"] = strategy.holds, current().training.counts.step
    return seen


def test_what_a_script_sees(pool: Pool) -> None:
    for seen in pool.run(2, watched, 100):  # until the end
        assert seen["weights"] == [0, 0, -1, -1, -1, -5, -5, -5, -12, -12]
        assert seen["gradients"] == list(range(1, 11))  # this worker's own
        assert seen["exchanges"] == [1, 1, 1, 2, 2, 2, 3, 3, 3, 4]
        assert (seen["end"], seen["holds"], seen["step"]) == (-22, False, 4)
        assert seen["facts"] == {
            "batches only predicted": 6, "samples only predicted": 24, "samples trained on": 16,
        }  # fmt: skip
    for seen in pool.run(2, watched, 5):
        assert seen["weights"] == [0, 0, -1, -1, -1]
        assert (seen["end"], seen["holds"], seen["step"]) == (-5, False, 2)
        summary = PredictedSummary()
        summary.take(Facts(seen["facts"]))
        assert summary.lines() == [
            "hocket: 12 of 20 samples (3 batches of each worker) were only predicted, and not trained on"
        ]


def scaled(inf_at: int | None, fused: bool) -> list[list[float]]:
    """With a GradScaler that finds an infinite gradient on one rank."""
    torch.manual_seed(0)
    model = nn.Linear(2, 1)
    optimizer = torch.optim.Adam(model.parameters(), lr=0.1, fused=fused)
    loader = DataLoader(TensorDataset(torch.arange(32.0).view(16, 2)), 1)
    model, optimizer, loader = hocket.distribute(model, optimizer, loader, strategy="dmb(extra=1)")
    assert list(inspect.signature(optimizer.step).parameters) == ["closure"]  # GradScaler looks at it
    scaler = torch.amp.GradScaler("cpu", init_scale=16.0)
    seen = []
    for step, (x,) in enumerate(loader):
        optimizer.zero_grad()
        loss = scaler.scale(model(x).sum())
        (loss * float("inf") if step == inf_at and hocket.rank() == 1 else loss).backward()
        if step == 4:
            scaler.unscale_(optimizer)
            nn.utils.clip_grad_norm_(model.parameters(), 1e6)
        scaler.step(optimizer)
        scaler.update()
        seen.append([float(value) for value in model.weight.detach()[0]])
    assert scaler.get_scale() == (8.0 if inf_at is not None and hocket.rank() == 1 else 16.0)
    return seen


@pytest.mark.parametrize("fused", [False, True])
def test_grad_scaler(pool: Pool, fused: bool) -> None:
    fine, used, unused = (pool.run(2, scaled, where, fused) for where in (None, 2, 3))
    assert fine[0] == fine[1] == unused[0] == unused[1]  # what is only predicted may be infinite
    weights = [first for first, _ in fine[0]]
    assert [a != b for a, b in itertools.pairwise(weights)] == [True, False] * 3 + [True]
    assert used[0] == used[1] and used[0][:3] == fine[0][:3]
    assert used[0][2] == used[0][3] == used[0][4] != used[0][5]  # what was infinite was not applied, by nobody


def with_nan(step_with_nan: int) -> int:
    model = nn.Linear(2, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    hocket.distribute(model, optimizer, strategy="dmb(extra=1)")
    (strategy,) = current().training.strategies
    for step in range(4):
        optimizer.zero_grad()
        x = torch.full((1, 2), float("nan") if step == step_with_nan and hocket.rank() == 1 else 1.0)
        model(x).sum().backward()
        optimizer.step()
        assert bool(torch.isfinite(model.weight).all())
    assert strategy.take_facts() == {"batches only predicted": 2}
    return strategy.skipped


def test_gradients_that_are_not_finite(pool: Pool) -> None:
    assert pool.run(2, with_nan, 0, on_nan="skip") == [1, 1]
    assert pool.run(2, with_nan, 1, on_nan="raise") == [0, 0]  # not used
    for outcome in pool.outcomes(2, with_nan, 2, on_nan="raise"):
        assert outcome.kind == "NonFiniteError" and "rank 1: 'weight'" in outcome.message


def with_closure() -> tuple[list[float], list[float], int]:
    model = nn.Linear(1, 1, bias=False)
    nn.init.ones_(model.weight)
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    hocket.distribute(model, optimizer, strategy="dmb(extra=1)")
    weights, losses = [], []
    for step in range(4):

        def closure(step: int = step) -> torch.Tensor:
            optimizer.zero_grad()
            loss = model(torch.full((1, 1), 10.0**step * (1 + hocket.rank()))).sum()
            loss.backward()
            return loss

        losses.append(float(optimizer.step(closure)))
        weights.append(float(model.weight.detach()))
    return weights, losses, current().training.counts.step


def test_closures(pool: Pool) -> None:
    assert pool.run(2, with_closure) == [([1.0, -0.5, -0.5, -150.5], [1.5, 15.0, -75.0, -750.0], 2)] * 2


@pytest.mark.parametrize(("size", "hosts", "stop"), [(2, None, 8), (3, [2, 1], 6)])
def test_a_checkpoint_keeps_the_place_in_the_cycle(
    pool: Pool, tmp_path: Path, size: int, hosts: list[int] | None, stop: int
) -> None:
    strategy = "dmb(extra=2)"
    whole = pool.run(size, train, "shuffled", 0, strategy, hosts=hosts)
    settings: dict[str, Any] = {"checkpoint": str(tmp_path), "checkpoint_every": 1, "hosts": hosts}
    pool.run(size, train, "shuffled", 0, strategy, stop, **settings)
    rest = pool.run(size, train, "shuffled", 0, strategy, **settings)
    assert rest[0][2] > 0
    assert [result[1] for result in rest] == [result[1] for result in whole]


def saved_by_another(folder: str, first: str, second: str) -> float:
    """A gradient that one strategy has left in a checkpoint is applied by the other with its first step."""
    results = []
    for strategy in (first, second):
        model = nn.Linear(1, 1, bias=False)
        nn.init.zeros_(model.weight)
        optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
        hocket.distribute(model, optimizer, strategy=strategy)
        current().training.strategies[:] = current().training.strategies[-1:]
        if results:
            hocket.load(folder, model=model, optimizer=optimizer)
        model(torch.ones(1, 1)).sum().backward()
        optimizer.step()
        results.append(float(model.weight.detach()))
        if len(results) == 1:
            hocket.save(folder, model=model, optimizer=optimizer).wait()
            hocket.barrier()
    return results[-1]


@pytest.mark.parametrize("pair", [("delayed", "dmb(extra=3)"), ("dmb(extra=3)", "delayed")])
def test_a_gradient_that_was_left_is_applied_by_its_relative(pool: Pool, tmp_path: Path, pair: tuple[str, str]) -> None:
    assert pool.run(2, saved_by_another, str(tmp_path), *pair) == [-1.0, -1.0]


def without_a_loader(strategy: str) -> list[float]:
    """Five steps, and what the script sees before and after it asks for the model."""
    model = nn.Linear(1, 1, bias=False)
    nn.init.zeros_(model.weight)
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    hocket.distribute(model, optimizer, strategy=strategy)
    for number in range(1, 6):
        optimizer.zero_grad()
        model(torch.full((1, 1), float(number))).sum().backward()
        optimizer.step()
    before = float(model.weight.detach())
    hocket.settle()
    return [before, float(model.weight.detach())]


@pytest.mark.parametrize(("strategy", "seen"), [("dmb(extra=1)", [-4.0, -9.0]), ("delayed", [-10.0, -15.0])])
def test_a_script_without_a_loader_asks_for_its_model(pool: Pool, strategy: str, seen: list[float]) -> None:
    assert pool.run(2, without_a_loader, strategy) == [seen, seen]


def skip_alone(strategy: str) -> None:
    """One rank leaves out a step, here in a batch that is only predicted."""
    model = nn.Linear(1, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    loader = DataLoader(TensorDataset(torch.ones(16, 1)), 1)
    model, optimizer, loader = hocket.distribute(model, optimizer, loader, strategy=strategy)
    for number, (x,) in enumerate(loader):
        optimizer.zero_grad()
        model(x).sum().backward()
        if number != 1 or hocket.rank() == 0:
            optimizer.step()
        assert number < 6, "found too late"


@pytest.mark.parametrize("strategy", ["dmb(extra=1)", "delayed"])
def test_ranks_that_are_at_different_batches_are_found(pool: Pool, strategy: str) -> None:
    kinds = {outcome.kind for outcome in pool.outcomes(2, skip_alone, strategy)}
    assert "MismatchError" in kinds and kinds <= {"MismatchError", "WorkerLost"}


def with_lbfgs() -> None:
    model = nn.Linear(3, 1)
    hocket.distribute(model, torch.optim.LBFGS(model.parameters()), strategy="dmb(extra=1)")


def test_lbfgs_is_refused(pool: Pool) -> None:
    with pytest.raises(RemoteError, match=r"'dmb' .* LBFGS needs those of where it is: use full_batch"):
        pool.run(2, with_lbfgs)
