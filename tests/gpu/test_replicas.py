"""Strategies with replicas of their own for models on a GPU, through the CPU's memory; test_nccl.py has gossip."""

from typing import Any

import pytest
import torch
from pool import Pool
from strategies.training import Case, alone, assert_equal, make, together, with_mean_state

import hocket

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="there is no GPU here")

CASE = Case(options={"lr": 0.05}, samples=48, device="cuda")
SHARED = {"transport": "shared-memory"}  # of one GPU, through the memory of the host


@pytest.mark.parametrize(
    "strategy",
    [
        "local_sgd(period=1, optimizer_state=True)",
        "local_sgd(time=1e-9)",
        "diloco(period=1, outer_lr=1.0, outer_momentum=0.0)",
        "mirrored -> local_sgd(period=1) @ step 3",
    ],
)
def test_averages_after_every_batch_are_one_process(pool: Pool, strategy: str) -> None:
    assert_equal(alone(CASE, 2), with_mean_state(pool.run(2, together, CASE, strategy, **SHARED)))


def train(strategy: str) -> tuple[float, float]:
    """The loss at the beginning, and after some passes."""
    model, optimizer, loader = hocket.distribute(*make(CASE, 1), strategy=strategy)
    losses = []
    for _ in range(6):
        total = 0.0
        for x, y in loader:
            loss = ((model(x.cuda()) - y.cuda()) ** 2).mean()
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            total += float(loss)
        losses.append(hocket.mean(total / max(len(loader), 1)))
    return losses[0], losses[-1]


@pytest.mark.parametrize(
    ("strategy", "more"),
    [
        ("delayed", SHARED),
        ("dmb(extra=1)", SHARED),
        ("diloco(period=4, fragments=2, outer_lr=1.0, outer_momentum=0.5)", SHARED),
        ("easgd(period=2, alpha=0.3)", SHARED),
        ("easgd(period=2, alpha=0.3)", {"servers": 1}),
    ],
)
def test_it_learns(pool: Pool, strategy: str, more: dict[str, Any]) -> None:
    for first, last in pool.run(2, train, strategy, **more):
        assert last < first
