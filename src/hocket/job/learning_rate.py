"""Learning rates for a batch that is as many times larger as there are workers (Goyal et al. 2017)."""

from __future__ import annotations

import math
from typing import Any

from torch.optim import Optimizer

from hocket.errors import UsageError
from hocket.job.runtime import current

_RULES = {"linear": float, "sqrt": math.sqrt}


def scale_lr(optimizer: Optimizer, rule: str = "linear", *, warmup: int = 0) -> None:
    """Multiply the learning rates of ``optimizer`` by the number of workers, or by its square root.

    Call it before a scheduler is built on the optimizer, so that the scheduler starts from the scaled rate. During the
    first ``warmup`` steps the rate that is used grows evenly from the unscaled one to the scaled one; this multiplies
    whatever a scheduler says.
    """
    if rule not in _RULES:
        raise UsageError(f"scale_lr rule {rule!r}: the choices are {', '.join(_RULES)}")
    if warmup < 0:
        raise UsageError(f"scale_lr warmup={warmup}: must be a number of steps, 0 or more")
    factor = _RULES[rule](current().config.size)
    if any("initial_lr" in group for group in optimizer.param_groups):
        raise UsageError("scale_lr after a scheduler was built on the optimizer: scale first, then build the scheduler")
    for group in optimizer.param_groups:
        group["lr"] = group["lr"] * factor
    if warmup and factor > 1:
        current().warmups.append(_Warmup(optimizer, factor, warmup))


class _Warmup:
    """Lowers the rate for the time of a step, and puts it back."""

    def __init__(self, optimizer: Optimizer, factor: float, steps: int) -> None:
        self._start, self._steps, self.taken = 1 / factor, steps, 0
        self._rates: list[Any] = []
        optimizer.register_step_pre_hook(self._before)
        optimizer.register_step_post_hook(self._after)

    def _before(self, optimizer: Optimizer, *_: object) -> None:
        self._rates = [group["lr"] for group in optimizer.param_groups]
        share = self._start + (1 - self._start) * min(self.taken / self._steps, 1)
        if share < 1:
            for group in optimizer.param_groups:
                group["lr"] = group["lr"] * share

    def _after(self, optimizer: Optimizer, *_: object) -> None:
        for group, rate in zip(optimizer.param_groups, self._rates, strict=True):
            group["lr"] = rate
        self.taken += 1
