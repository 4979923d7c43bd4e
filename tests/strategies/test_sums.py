"""Losses that are sums: P workers with batch B are one process with batch P·B, and every sample counts once."""

from collections.abc import Iterable
from pathlib import Path
from typing import Any

import pytest
import torch
from pool import Pool, needs
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import hocket
from hocket.job.simulated_job import SimulatedJob

WORKERS, RATE = 3, 0.004


def parts(workers: int, norm: bool = False) -> tuple[nn.Module, torch.optim.Optimizer, Any]:
    torch.manual_seed(0)
    body = [nn.BatchNorm1d(20)] if norm else []
    model = nn.Sequential(nn.Linear(6, 20), *body, nn.Tanh(), nn.Linear(20, 1)).double()
    model[0].bias.requires_grad_(False)
    random = torch.Generator().manual_seed(1)
    x = torch.randn(38, 6, generator=random, dtype=torch.float64)
    loader = DataLoader(TensorDataset(x, torch.sin(x.sum(1, keepdim=True))), 4 * workers)  # 38 = 3 · 12 + 2
    return model, torch.optim.SGD(model.parameters(), lr=RATE, momentum=0.5), loader


def train(
    model: nn.Module, optimizer: torch.optim.Optimizer, loader: Any, epochs: Iterable[int] = range(2)
) -> list[torch.Tensor]:
    for epoch in epochs:
        model[0].bias.requires_grad_(epoch > 0)  # type: ignore[operator, union-attr]
        for x, y in loader:
            optimizer.zero_grad()
            ((model(x) - y) ** 2).sum().backward()
            optimizer.step()
    return [p.detach().clone() for p in model.parameters()]


def together(strategy: str, norm: bool) -> list[torch.Tensor]:
    model, optimizer, loader = parts(1, norm)
    if norm:
        hocket.sync_batchnorm(model)
    return train(*hocket.distribute(model, optimizer, loader, strategy=strategy, reduction="sum"))


@pytest.mark.few(3)
@pytest.mark.parametrize(
    ("strategy", "servers"),
    [
        ("mirrored", 0), ("central", 0), ("central(fused=True)", 0), ("local_sgd(period=1)", 0), ("bsp", 1),
        ("diloco(period=1, outer_lr=1.0, outer_momentum=0.0)", 0), ("mirrored -> local_sgd(period=1) @ step 3", 0),
    ],
)  # fmt: skip
def test_many_workers_are_one(pool: Pool, strategy: str, servers: int) -> None:
    one = train(*parts(WORKERS))
    for found in pool.run(WORKERS, together, strategy, False, servers=servers):
        for mine, theirs in zip(one, found, strict=True):
            torch.testing.assert_close(theirs, mine, rtol=1e-9, atol=1e-12)


def resumed(strategy: str, epochs: int) -> list[torch.Tensor]:
    model, optimizer, loader = parts(1)
    hocket.distribute(model, optimizer, strategy=strategy, reduction="sum")
    loader = hocket.distribute(loader=loader)
    place = hocket.resume(model=model, optimizer=optimizer, loader=loader)
    return train(model, optimizer, loader, range(place.epoch, epochs))


def test_losses_are_sums_in_a_training_that_is_resumed_after_a_switch(pool: Pool, tmp_path: Path) -> None:
    one, strategy = train(*parts(WORKERS)), "mirrored -> local_sgd(period=1) @ step 3"
    settings: dict[str, Any] = {"checkpoint": str(tmp_path), "checkpoint_every": 4}
    for epochs in (1, 2):
        found = pool.run(WORKERS, resumed, strategy, epochs, **settings)
    for mine, theirs in zip(one, found[0], strict=True):
        torch.testing.assert_close(theirs, mine, rtol=1e-9, atol=1e-12)


def test_batch_norm_over_all_workers(pool: Pool) -> None:
    one = train(*parts(WORKERS, True))
    for found in pool.run(WORKERS, together, "mirrored", True):
        for mine, theirs in zip(one, found, strict=True):
            torch.testing.assert_close(theirs, mine, rtol=1e-9, atol=1e-12)


def scaled(strategy: str, reduction: str) -> list[torch.Tensor]:
    """A sum over the 4 samples of a batch, or a mean at the rate that makes the same step of a mean over all."""
    model, optimizer, _ = parts(1)
    model[0].bias.requires_grad_(True)
    optimizer.param_groups[0]["lr"] *= 1 if reduction == "sum" else 4 * hocket.size()
    hocket.distribute(model, optimizer, strategy=strategy, reduction=reduction)
    x = torch.randn(4, 6, generator=torch.Generator().manual_seed(hocket.rank()), dtype=torch.float64)
    for _ in range(3):
        optimizer.zero_grad()
        loss = (model(x) - 1) ** 2
        (loss.sum() if reduction == "sum" else loss.mean()).backward()
        optimizer.step()
        hocket.barrier()
    return [p.detach().clone() for p in model.parameters()]


@pytest.mark.parametrize("strategy", ["easgd", "delayed", "gossip"])
def test_elsewhere_a_sum_is_a_mean_at_a_higher_rate(pool: Pool, strategy: str) -> None:
    sums, means = (pool.run(2, scaled, strategy, kind, **needs(strategy)) for kind in ("sum", "mean"))
    for one, other in zip(sums, means, strict=True):
        for mine, theirs in zip(one, other, strict=True):
            torch.testing.assert_close(theirs, mine, rtol=1e-9, atol=1e-12)


@pytest.mark.parametrize(
    ("strategy", "servers"),
    [
        ("mirrored", 0), ("central", 0), ("local_sgd(period=2)", 0), ("delayed", 0), ("bsp", 1), ("ssp", 1),
        ("diloco(period=2, outer_lr=1.0, outer_momentum=0.0)", 0), ("asynchronous", 2), ("asynchronous(scale=1.0)", 1),
        ("softsync(n=2)", 1), ("softsync(n=4)", 2), ("downpour(adagrad=False)", 1),
        ("downpour(adagrad=False, push=2, fetch=2)", 1), ("hogwild", 0), ("gossip", 0), ("gossip(push_sum=True)", 0),
        ("gossip(asynchronous=True)", 0),
    ],
)  # fmt: skip
def test_every_sample_counts_once(strategy: str, servers: int) -> None:
    """A gradient that is the same everywhere, so that the sum over all samples is exact in whatever order they come."""
    x = torch.randn(38, 4, generator=torch.Generator().manual_seed(0), dtype=torch.float64)

    def script() -> torch.Tensor:
        model = nn.Linear(4, 1, bias=False).double()
        nn.init.zeros_(model.weight)
        optimizer = torch.optim.SGD(model.parameters(), lr=RATE)
        loader = DataLoader(TensorDataset(x), 4, shuffle=True)
        model, optimizer, loader = hocket.distribute(model, optimizer, loader, strategy=strategy, reduction="sum")
        for _ in range(2):
            for (part,) in loader:
                optimizer.zero_grad()
                model(part).sum().backward()
                optimizer.step()
        hocket.settle()
        return model.weight.detach().clone()

    found = SimulatedJob(4, strategy, servers=servers).run(script)
    torch.testing.assert_close(sum(found) / 4, -2 * RATE * x.sum(0, keepdim=True), rtol=1e-9, atol=1e-12)


def wrong(what: str) -> None:
    if what == "reduction":
        hocket.distribute(nn.Linear(1, 1), reduction="max")
    hocket.distribute(nn.Linear(1, 1), reduction="sum")
    hocket.weight(3)


@pytest.mark.parametrize(
    ("what", "message"), [("reduction", "the choices are 'mean' and 'sum'"), ("weight", "leave out hocket.weight()")]
)
def test_what_makes_no_sense_is_told(pool: Pool, what: str, message: str) -> None:
    for outcome in pool.outcomes(2, wrong, what):
        assert outcome.kind == "UsageError" and message in outcome.message
