"""A second optimizer for a distributed model: it takes over, is exact as it is, or is refused at its first step."""

from typing import Any

import pytest
import torch
from pool import Pool, needs
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import hocket


def parts(workers: int) -> tuple[nn.Module, torch.optim.Optimizer, Any]:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(6, 20), nn.Tanh(), nn.Linear(20, 1)).double()
    random = torch.Generator().manual_seed(1)
    x = torch.randn(46, 6, generator=random, dtype=torch.float64)
    loader = DataLoader(TensorDataset(x, torch.sin(x.sum(1, keepdim=True))), 4 * workers)
    return model, torch.optim.SGD(model.parameters(), lr=0.1), loader


def epoch(model: nn.Module, optimizer: torch.optim.Optimizer, loader: Any) -> None:
    for x, y in loader:
        optimizer.zero_grad()
        ((model(x) - y) ** 2).mean().backward()
        optimizer.step()


def second(model: nn.Module, kind: str) -> torch.optim.Optimizer:
    if kind == "Adam":
        return torch.optim.Adam(model.parameters(), lr=0.01)
    return torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.5)


def alone(kind: str, workers: int) -> list[torch.Tensor]:
    model, optimizer, loader = parts(workers)
    epoch(model, optimizer, loader)
    epoch(model, second(model, kind), loader)
    return [p.detach() for p in model.parameters()]


def two_phases(strategy: str, kind: str, again: bool) -> tuple[list[torch.Tensor], int]:
    model, optimizer, loader = hocket.distribute(*parts(1), strategy=strategy)
    epoch(model, optimizer, loader)
    later = second(model, kind)
    if again:
        hocket.distribute(model, later, strategy=strategy)
    epoch(model, later, loader)
    hocket.barrier()
    if again:
        with pytest.raises(hocket.errors.UsageError, match="was replaced"):
            optimizer.step()
    return [p.detach().clone() for p in model.parameters()], hocket.job.worker.current().training.counts.step


@pytest.mark.parametrize(
    ("strategy", "kind"),
    [
        ("mirrored", "Adam"), ("central", "Adam"), ("central(fused=True)", "SGD"), ("local_sgd(period=1)", "SGD"),
        ("diloco(period=1, outer_lr=1.0, outer_momentum=0.0)", "SGD"),
    ],
)  # fmt: skip
def test_a_second_optimizer_takes_over(pool: Pool, strategy: str, kind: str) -> None:
    for found, step in pool.run(2, two_phases, strategy, kind, True):
        assert step == 12
        for mine, theirs in zip(alone(kind, 2), found, strict=True):
            torch.testing.assert_close(theirs, mine, rtol=1e-9, atol=1e-12)


def test_mirrored_is_exact_with_any_optimizer(pool: Pool) -> None:
    for found, _ in pool.run(2, two_phases, "mirrored", "Adam", False):
        for mine, theirs in zip(alone("Adam", 2), found, strict=True):
            torch.testing.assert_close(theirs, mine, rtol=1e-9, atol=1e-12)


@pytest.mark.few(4)
@pytest.mark.parametrize(
    "strategy",
    [
        "central", "central(fused=True)", "local_sgd(period=2)", "diloco(period=2)", "easgd", "delayed", "full_batch",
        "bsp", "asynchronous", "downpour", "gossip", "hogwild",
    ],
)  # fmt: skip
def test_elsewhere_it_is_refused_at_its_first_step(pool: Pool, strategy: str) -> None:
    for outcome in pool.outcomes(2, two_phases, strategy, "SGD", False, **needs(strategy)):
        assert outcome.kind == "StrategyError"
        assert "was not given to hocket.distribute()" in outcome.message and "before its first step" in outcome.message


@pytest.mark.parametrize("strategy", ["bsp", "hogwild"])
def test_some_strategies_keep_their_optimizer(pool: Pool, strategy: str) -> None:
    for outcome in pool.outcomes(2, two_phases, strategy, "SGD", True, **needs(strategy)):
        assert outcome.kind == "StrategyError" and f"strategy {strategy!r} keeps the optimizer" in outcome.message
        assert "param_groups" in outcome.message
