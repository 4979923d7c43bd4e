"""Gradient noise and diversity: what workers add up is what their gradients say, and the estimate finds the truth."""

import contextlib
import math
from typing import Any

import pytest
import torch
from pool import Pool
from torch import nn
from torch.utils.data import DataLoader, RandomSampler, TensorDataset

import hocket
from hocket.capture import noise
from hocket.capture.noise import Gauge
from hocket.comm import communicator as comm_communicator
from hocket.comm.bucket_layout import Limits
from hocket.events import Gradients
from hocket.job.worker import current
from hocket.observe.gradients import GradientSummary
from hocket.strategies.base import Why

STRATEGIES = ["mirrored", "central", "central(fused=True)", "delayed"]
WIDTH, STEPS = 40, 9


@contextlib.contextmanager
def every_step() -> Any:
    """Within, there is a look in every step but the first."""
    original = Gauge._plan
    noise._FIRST = 2

    def plan(self: Gauge, step: int, begin: float) -> None:
        original(self, step, begin)
        self._next = step + 1

    Gauge._plan = plan  # type: ignore[method-assign]
    try:
        yield
    finally:
        Gauge._plan = original  # type: ignore[method-assign]
        noise._FIRST = 4


@contextlib.contextmanager
def small_buckets() -> Any:
    original = comm_communicator.bucket_limits
    comm_communicator.bucket_limits = lambda _: Limits(64, 512)
    try:
        yield
    finally:
        comm_communicator.bucket_limits = original


def sums(gauge: Gauge) -> list[float]:
    """Over all blocks."""
    return [sum(column) for column in zip(*gauge.blocks.sums.values(), strict=True)]


def known(
    strategy: str, dtype: str = "float64", scales: bool = False, device: str = "cpu"
) -> tuple[list[list[float]], list[float]]:
    """Steps with gradients that are known: by step |g|² and this rank's gradient; and what was added up."""
    layers = [nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(3)]
    model = nn.Sequential(*layers).to(device, getattr(torch, dtype))
    model[1].requires_grad_(False)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    random = torch.Generator().manual_seed(hocket.rank())
    told = []
    with every_step(), small_buckets():
        hocket.distribute(model, optimizer, strategy=strategy)
        for step in range(STEPS):
            trained = [p for p in model.parameters() if p.requires_grad]
            gradients = [torch.randn(p.shape, generator=random, dtype=torch.float64).to(p.dtype) for p in trained]
            scale = 2.0 ** (10 + step) if scales else 1.0
            loss = sum((p * g.to(device)).sum() for p, g in zip(trained, gradients, strict=True))
            (loss * scale).backward()
            optimizer.step()
            optimizer.zero_grad()
            told.append([float(x) * scale for g in gradients for x in g.flatten()])
        current().training.strategies[0].settle(Why.END)  # delayed fetches the last average
    gauge = current().training.strategies[0].gauges[0]
    if device != "cpu":
        torch.cuda.synchronize()
        gauge.settle()
    return told, sums(gauge)


def check_identity(results: list[Any], tolerance: float = 1e-9) -> None:
    workers = len(results)
    gradients = torch.tensor([told for told, _ in results], dtype=torch.float64)[:, 1:]  # rank, step, number
    seen = torch.tensor([sums for _, sums in results], dtype=torch.float64)
    assert seen[:, 0].tolist() == [STEPS - 1] * workers
    own, average = gradients.square().sum() / workers, gradients.mean(0).square().sum()
    mean = seen.mean(0)
    assert torch.allclose(mean[2], own, rtol=tolerance)
    assert torch.allclose(mean[3], average, rtol=tolerance)
    assert torch.equal(seen[:, 1], seen[:, 0])  # without a loader, shares are batches
    assert torch.equal(seen[:, 4], seen[:, 2])
    assert torch.equal(seen[:, 5], seen[:, 3])


@pytest.mark.few(4)
@pytest.mark.parametrize("strategy", STRATEGIES)
@pytest.mark.parametrize("workers", [2, 3, 4])
def test_sums_are_those_of_the_gradients(pool: Pool, workers: int, strategy: str) -> None:
    check_identity(pool.run(workers, known, strategy))


@pytest.mark.few(4)
@pytest.mark.parametrize("strategy", STRATEGIES)
@pytest.mark.parametrize("hosts", [(1, 1), (2, 1), (2, 2)])
def test_over_several_hosts(pool: Pool, hosts: tuple[int, ...], strategy: str) -> None:
    check_identity(pool.run(sum(hosts), known, strategy, hosts=hosts))


@pytest.mark.parametrize(("dtype", "tolerance"), [("float32", 1e-5), ("bfloat16", 0.02), ("float16", 0.01)])
def test_narrow_types_are_added_up_wide(pool: Pool, dtype: str, tolerance: float) -> None:
    for strategy in ("mirrored", "central(fused=True)"):
        check_identity(pool.run(3, known, strategy, dtype), tolerance)


def test_a_loss_scale_is_in_both_alike(pool: Pool) -> None:
    check_identity(pool.run(2, known, "mirrored", "float64", True))


class Linear(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.tensor([0.3, -0.2, 0.1, 0.0, 0.5], dtype=torch.float64))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x @ self.weight


def linear_data() -> tuple[torch.Tensor, torch.Tensor]:
    random = torch.Generator().manual_seed(5)
    x = torch.randn(400, 5, generator=random, dtype=torch.float64) + 0.3
    return x, x.sum(1) + torch.randn(400, generator=random, dtype=torch.float64)


def train_linear(strategy: str, epochs: int, batch: int, accumulate: int = 1) -> Gradients:
    """Steps that change nothing, so that the gradient's distribution stays what it is."""
    x, y = linear_data()
    model = Linear()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    sampler = RandomSampler(range(400), replacement=True, generator=torch.Generator().manual_seed(1))
    loader = DataLoader(TensorDataset(x, y), batch, sampler=sampler)
    with every_step():
        model, optimizer, loader = hocket.distribute(model, optimizer, loader, strategy=strategy)
        for _ in range(epochs):
            for step, (inputs, targets) in enumerate(loader, start=1):
                held = step % accumulate
                with hocket.accumulate() if held else contextlib.nullcontext():
                    ((model(inputs) - targets) ** 2).mean().backward()
                if not held:
                    optimizer.step()
                    optimizer.zero_grad()
    report = current().training.strategies[0].gauges[0].report(0)
    assert report is not None
    return report


@pytest.mark.few(1)
@pytest.mark.parametrize(
    ("strategy", "workers", "batch", "accumulate"),
    [("mirrored", 2, 4, 1), ("mirrored", 2, 2, 2), ("central(fused=True)", 4, 2, 1)],
)
def test_the_estimate_finds_the_noise_scale(
    pool: Pool, strategy: str, workers: int, batch: int, accumulate: int
) -> None:
    x, y = linear_data()
    gradients = 2 * (x @ Linear().weight.detach() - y)[:, None] * x
    mean = gradients.mean(0)
    true = float((gradients - mean).square().sum(1).mean() / mean.square().sum())
    summary = GradientSummary()
    for rank, report in enumerate(pool.run(workers, train_linear, strategy, 15, batch, accumulate)):
        assert report.knows_samples
        summary.take(rank, report)
    facts = summary.facts()
    assert facts["measured steps"] == facts["steps"] - 1
    assert facts["samples in a step"] == workers * batch * accumulate
    assert facts["noise scale"] == pytest.approx(true, rel=0.1)
    assert facts["noise scale, low"] < true < facts["noise scale, high"]


def uneven(strategy: str) -> tuple[float, bool]:
    """Epochs whose last batch is not the same on all ranks; the number of looks."""
    model = nn.Linear(6, 1)
    loader = DataLoader(TensorDataset(torch.randn(17, 6)), 4)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    with every_step():
        model, optimizer, loader = hocket.distribute(model, optimizer, loader, strategy=strategy)
        for _ in range(5):
            for (inputs,) in loader:  # 8, 8, and 1 of all ranks
                model(inputs).sum().backward()
                optimizer.step()
                optimizer.zero_grad()
    gauge = current().training.strategies[0].gauges[0]
    return sums(gauge)[0], gauge.knows_samples


def test_uneven_batches_are_left_out(pool: Pool) -> None:
    for strategy in ("mirrored", "central(fused=True)"):
        assert pool.run(2, uneven, strategy) == [(9, True)] * 2  # of 15 steps the last of each epoch, and the first


def infinite() -> tuple[int, int]:
    model = nn.Linear(3, 1, bias=False)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    with every_step():
        hocket.distribute(model, optimizer, on_nan="skip")
        for step in range(6):
            value = math.inf if step == 3 and hocket.rank() == 1 else 1.0
            (model.weight.sum() * value).backward()
            optimizer.step()
            optimizer.zero_grad()
    gauge = current().training.strategies[0].gauges[0]
    return gauge.steps, gauge.looks


def test_gradients_that_are_not_finite_are_left_out(pool: Pool) -> None:
    assert pool.run(2, infinite) == [(6, 4)] * 2


def switching() -> list[tuple[int, int]]:
    model = nn.Linear(3, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with every_step():
        hocket.distribute(model, optimizer, strategy="mirrored -> local_sgd(period=2) @ step 5 -> delayed @ step 7")
        for _ in range(9):
            model(torch.randn(2, 3)).sum().backward()
            optimizer.step()
            optimizer.zero_grad()
    return [(gauge.steps, gauge.looks) for gauge in current().training.strategies[0].gauges]


def test_a_switch_has_a_gauge_for_each(pool: Pool) -> None:
    assert pool.run(2, switching) == [[(5, 4), (1, 0)]] * 2  # the last average is still under way


def alone() -> int:
    model = nn.Linear(3, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    hocket.distribute(model, optimizer, on_nan="raise")
    for _ in range(9):
        model(torch.randn(2, 3)).sum().backward()
        optimizer.step()
    return current().training.strategies[0].gauges[0].looks


def test_one_worker_has_nothing_to_compare(pool: Pool) -> None:
    assert pool.run(1, alone) == [0]


class Still:
    """What a gauge needs of a collector."""

    weight, samples, collected = 1.0, 8, 1


@pytest.mark.parametrize(("cost", "apart"), [(0.001, 1), (0.05, 16), (0.3, 128)])
def test_looks_follow_their_cost(monkeypatch: pytest.MonkeyPatch, cost: float, apart: int) -> None:
    """A step takes 1 s; a look takes ``cost``, and all of them 0.4 % of the time at most."""
    clock, looks, flat = [0.0, 0.0], [], [torch.ones(4)]

    def square(_: torch.Tensor) -> float:
        clock[0] += cost / 2
        return 1.0

    monkeypatch.setattr(noise, "_square", square)
    monkeypatch.setattr(noise.time, "perf_counter", lambda: clock[0])
    gauge = Gauge(2, [torch.ones(4)])
    for step in range(1, 2000):
        clock[0] += 1.0
        if gauge.is_due:
            looks.append(step)
        gauge.see_rest(flat)
        gauge.end_step(flat, Still())  # type: ignore[arg-type]
    assert looks[:3] == [4, 8, 16]
    assert looks[3:] == list(range(looks[3], 2000, apart))
    assert looks[3] % apart == 0
    assert gauge.seconds == pytest.approx(cost * len(looks))
    assert gauge.seconds < 0.005 * 2000


def test_looks_that_others_held_up_cost_no_more_than_another(monkeypatch: pytest.MonkeyPatch) -> None:
    """Two of the first three looks take 5 s more, because somebody else had the core."""
    clock, looks, flat = [0.0], list[int](), [torch.ones(4)]

    def square(_: torch.Tensor) -> float:
        clock[0] += 0.0005 + 2.5 * (len(looks) < 3)
        return 1.0

    monkeypatch.setattr(noise, "_square", square)
    monkeypatch.setattr(noise.time, "perf_counter", lambda: clock[0])
    gauge = Gauge(2, [torch.ones(4)])
    for step in range(1, 100):
        clock[0] += 1.0
        if gauge.is_due:
            looks.append(step)
        gauge.see_rest(flat)
        gauge.end_step(flat, Still())  # type: ignore[arg-type]
    assert looks == [4, 8, *range(16, 100)]


def test_blocks_become_longer_and_keep_their_sums() -> None:
    blocks = noise.Blocks()
    for step in range(1, 1001):
        blocks.add(step, 2.0, float(step), 1.0)
    assert len(blocks.sums) <= 32
    assert blocks.length == 32
    total = [sum(column) for column in zip(*blocks.sums.values(), strict=True)]
    assert total == [1000, 2000, 500500, 1000, 1001000, 2000]
    assert blocks.sums[1].own == sum(range(33, 65))


def test_large_sums_are_right() -> None:
    flat = torch.randn(3_000_001, generator=torch.Generator().manual_seed(0))
    exact = float(flat.double().square().sum())
    assert noise._square(flat) == pytest.approx(exact, rel=1e-6)
    assert noise._square(flat.half()) == pytest.approx(exact, rel=1e-3)
