"""Gradient noise and diversity: what workers add up is what their gradients say, and the estimate finds the truth."""

import contextlib
from typing import Any

import pytest
import torch
from pool import Pool
from torch import nn

import hocket
from hocket.comm import gpu
from hocket.comm import hosts as comm_hosts
from hocket.comm.layout import Limits
from hocket.job.runtime import current
from hocket.strategies.noise import Gauge

STRATEGIES = ["mirrored", "central", "central(fused=True)", "dmb"]
WIDTH, STEPS = 40, 9


@contextlib.contextmanager
def every_step() -> Any:
    """Within, there is a look in every step but the first."""
    original = Gauge._plan

    def plan(self: Gauge, step: int, begin: float) -> None:
        original(self, step, begin)
        self._next = step + 1

    Gauge._plan = plan  # type: ignore[method-assign]
    try:
        yield
    finally:
        Gauge._plan = original  # type: ignore[method-assign]


@contextlib.contextmanager
def small_buckets() -> Any:
    original = comm_hosts.bucket_limits
    comm_hosts.bucket_limits = gpu.bucket_limits = lambda _: Limits(64, 512)
    try:
        yield
    finally:
        comm_hosts.bucket_limits = gpu.bucket_limits = original


def sums(gauge: Gauge) -> list[float]:
    """Over all blocks."""
    return [sum(column) for column in zip(*gauge.blocks.sums.values(), strict=True)]


def known(strategy: str, dtype: str = "float64", scales: bool = False) -> tuple[list[list[float]], list[float]]:
    """Steps with gradients that are known: by step |g|² and this rank's gradient; and what was added up."""
    layers = [nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(3)]
    model = nn.Sequential(*layers).to(getattr(torch, dtype))
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
            loss = sum((p * g).sum() for p, g in zip(trained, gradients, strict=True))
            (loss * scale).backward()
            optimizer.step()
            optimizer.zero_grad()
            told.append([float(x) * scale for g in gradients for x in g.flatten()])
        current().strategies[0].settle()  # dmb fetches the last average
    return told, sums(current().strategies[0].gauges[0])


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


@pytest.mark.parametrize("strategy", STRATEGIES)
@pytest.mark.parametrize("workers", [2, 3, 4])
def test_sums_are_those_of_the_gradients(pool: Pool, workers: int, strategy: str) -> None:
    check_identity(pool.run(workers, known, strategy))


@pytest.mark.parametrize("strategy", STRATEGIES)
@pytest.mark.parametrize("hosts", [(1, 1), (2, 1), (2, 2)])
def test_over_several_hosts(pool: Pool, hosts: tuple[int, ...], strategy: str) -> None:
    check_identity(pool.run(sum(hosts), known, strategy, hosts=hosts))
