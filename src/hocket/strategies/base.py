"""The contract of a strategy at work: one model and its optimizer, training with those of the other ranks."""

from __future__ import annotations

import functools
import types
from abc import ABC
from collections.abc import Callable
from typing import Any, ClassVar

from torch.optim import Optimizer

from hocket.strategies.collector import Collector

Step = Callable[..., Any]


class Strategy(ABC):
    """A strategy at work on one model. It has changed model and optimizer in place when its constructor returns."""

    survives_loss: ClassVar[bool] = False
    """Whether the others go on when a worker is lost; if not, the job ends."""

    collector: Collector
    """Where gradients arrive."""

    steps: int
    """How many exchanges there have been."""


def wrap_step(optimizer: Optimizer, around: Callable[..., Any]) -> None:
    """Have ``optimizer.step(…)`` call ``around(original_step, …)``; LR schedulers find what they look for."""
    original: Step = optimizer.step

    @functools.wraps(original)
    def step(_: Optimizer, *args: Any, **kwargs: Any) -> Any:
        return around(original, *args, **kwargs)

    optimizer.step = types.MethodType(step, optimizer)  # type: ignore[method-assign]
