"""Numbers over all workers, weights by hand, and reports."""

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from pool import Pool
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import hocket
from hocket.comm.alone import AloneCommunicator
from hocket.config import Config
from hocket.events import Metrics, Progress
from hocket.job.worker import Worker, acting_as, current


class Kept:
    def __init__(self) -> None:
        self.records: list[Any] = []

    def put(self, record: Any) -> None:
        self.records.append(record)


def numbers() -> None:
    me, size = hocket.rank(), hocket.size()
    assert hocket.mean(float(me)) == pytest.approx(sum(range(size)) / size)
    assert hocket.mean(me, weight=me) == pytest.approx(sum(r * r for r in range(size)) / sum(range(size)))
    assert hocket.mean(float("nan") if me == 0 else 2.0, weight=me) == 2.0, "weight 0 does not count at all"
    assert hocket.total(me) == sum(range(size)) and isinstance(hocket.total(me), float)
    assert hocket.maximum(me) == size - 1 and hocket.minimum(torch.tensor(me)) == 0
    large = 2**53 - 1
    assert hocket.total(large if me == 0 else 0) == large
    value = torch.full((2, 3), float(me), dtype=torch.bfloat16, requires_grad=True)
    several = hocket.mean(value, weight=torch.tensor(2))
    assert several.shape == (2, 3) and several.dtype == torch.bfloat16 and not several.requires_grad
    assert hocket.total(torch.tensor([me, 1])).tolist() == [sum(range(size)), size]


def test_means_sums_and_extremes(pool: Pool) -> None:
    pool.run(3, numbers)


def wrong(what: str) -> None:
    if what == "text":
        hocket.report(loss="0.3")
    elif what == "tensor":
        hocket.report(loss=torch.ones(3))
    elif what == "none":
        hocket.mean(None)
    elif what == "negative":
        hocket.mean(1.0, weight=-1)
    elif what == "all zero":
        hocket.weight(0)
    elif what == "nan":
        hocket.weight(float("nan"))


@pytest.mark.parametrize(
    ("what", "message"),
    [
        ("text", "loss='0.3' is a str, not a number"),
        ("tensor", "loss is a tensor of shape [3], not a number: pass its mean()"),
        ("none", "value=None is a NoneType, not a number"),
        ("negative", "a weight must be 0 or more"),
        ("all zero", "weight(0) on all ranks"),
        ("nan", "weight(nan): must be a number of things"),
    ],
)
def test_what_is_no_number_is_named(pool: Pool, what: str, message: str) -> None:
    for outcome in pool.outcomes(2, wrong, what):
        assert outcome.kind == "UsageError" and message in outcome.message


def reports() -> list[Any]:
    kept = current().sink = Kept()  # type: ignore[assignment]
    model, loader = nn.Linear(1, 1), DataLoader(TensorDataset(torch.ones(12, 1)), 2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    model, optimizer, loader = hocket.distribute(model, optimizer, loader)
    for (x,) in loader:
        model(x).mean().backward()
        optimizer.step()
        hocket.report(loss=torch.tensor(0.5), accuracy=1)
    assert current().training.metrics == {"loss": 0.5, "accuracy": 1.0}
    reported = [r for r in kept.records if isinstance(r, Metrics)]
    each = current().teller.sent // 3
    assert each > 0 and [r.sent for r in reported] == [each * r.step for r in reported], "bytes by then"
    return [(r.step, r.samples, r.values) for r in reported]


def test_reports_come_from_rank_0_by_step_and_sample(pool: Pool) -> None:
    values = {"loss": 0.5, "accuracy": 1.0}
    assert pool.run(2, reports) == [[(step, 4 * step, values) for step in (1, 2, 3)], []]


TOKENS = [[3, 1, 4, 1], [5, 9, 2, 6], [5, 3, 5, 8], [9, 7, 9, 3]]  # in each sequence of a batch


def tokens(strategy: str, alone: bool) -> list[float]:
    """A loss that is a mean over tokens, of which sequences have different numbers."""
    torch.manual_seed(0)
    model = nn.Linear(2, 1, dtype=torch.float64)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.001)
    if not alone:
        hocket.distribute(model, optimizer, strategy=strategy)
    for counts in TOKENS:
        sequences = [torch.stack((torch.arange(n), torch.full((n,), i)), 1).double() for i, n in enumerate(counts)]
        x = torch.cat(sequences if alone else sequences[hocket.rank() * 2 : hocket.rank() * 2 + 2])
        if not alone:
            factor = hocket.weight(len(x))
            assert factor == pytest.approx(len(x) * 2 / sum(counts))
        optimizer.zero_grad()
        (model(x) ** 2).mean().backward()
        optimizer.step()
    return [float(v) for p in model.parameters() for v in p.detach().flatten()]


@pytest.mark.parametrize("strategy", ["mirrored", "central", "central(fused=True)"])
def test_a_mean_over_tokens(pool: Pool, strategy: str) -> None:
    many = pool.run(2, tokens, strategy, False)
    expected = tokens(strategy, True)
    for result in many:
        assert result == pytest.approx(expected, rel=1e-9)


def test_the_length_of_an_endless_sampler_is_no_total() -> None:
    told: list[Any] = []
    sink: Any = SimpleNamespace(put=told.append)
    worker = Worker(Config(), AloneCommunicator(), sink)
    worker.teller.tell(1, 1, 2_500_000_000, 8)
    worker.teller.tell(1, 2, 250, 16)
    assert [record.steps for record in told if isinstance(record, Progress)] == [None, 250]


class Scripts:
    """Scripts with two models; each step is reported, and so is the optimizer that takes it."""

    def __init__(self) -> None:
        self.models = [nn.Linear(2, 1) for _ in range(2)]
        self.optimizers = [torch.optim.SGD(model.parameters(), lr=0.1) for model in self.models]

    def step(self, which: int) -> None:
        self.models[which](torch.ones(1, 2)).sum().backward()
        self.optimizers[which].step()
        hocket.report(which=which)

    def folds(self) -> None:
        for which in range(2):
            hocket.distribute(self.models[which], self.optimizers[which])
            for _ in range(3):
                self.step(which)

    def phases(self) -> None:
        data = hocket.distribute(loader=DataLoader(TensorDataset(torch.arange(3.0))))
        for which in range(2):
            hocket.distribute(self.models[which], self.optimizers[which])
        for which in range(2):
            for _ in data:
                self.step(which)

    def in_turn(self) -> None:
        for which in range(2):
            hocket.distribute(self.models[which], self.optimizers[which])
        for _ in range(3):
            for which in (0, 0, 1):
                self.step(which)


@pytest.mark.parametrize(
    ("script", "steps"),
    [("folds", [1, 2, 3, 4, 5, 6]), ("phases", [1, 2, 3, 4, 5, 6]), ("in_turn", [1, 2, 2, 3, 4, 4, 5, 6, 6])],
)
def test_reported_steps_go_on_rising_with_the_model_that_is_trained(script: str, steps: list[int]) -> None:
    told: list[Any] = []
    sink: Any = SimpleNamespace(put=told.append)
    with acting_as(Worker(Config(), AloneCommunicator(), sink)):
        getattr(Scripts(), script)()
    assert [record.step for record in told if isinstance(record, Metrics)] == steps
