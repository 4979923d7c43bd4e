"""Learning rates for a batch that is as many times larger as there are workers (Goyal et al. 2017)."""

from __future__ import annotations

import copy
import functools
import math
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch.optim import Optimizer, lr_scheduler
from torch.optim.lr_scheduler import LRScheduler

from hocket.errors import UsageError
from hocket.job.worker import current

_RULES = {"linear": float, "sqrt": math.sqrt}


def scale_lr(optimizer: Optimizer, rule: str = "linear", *, warmup: int = 0) -> None:
    """Multiply the learning rates of ``optimizer`` by the number of workers, or by its square root.

    Call it before a scheduler is built on the optimizer, so that the scheduler starts from the scaled rate. During the
    first ``warmup`` steps the rate grows evenly from the unscaled one to the scaled one, multiplied by whatever a
    scheduler says. ``param_groups`` and ``get_last_lr()`` have what the next step uses; a rate that the script sets by
    hand is used as it is.
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
        current().training.warmups.append(_Warmup(optimizer, factor, warmup))


class _Warmup:
    """Lowers the rates of a schedule, a little less after every step; schedulers themselves do not see that."""

    def __init__(self, optimizer: Optimizer, factor: float, steps: int) -> None:
        self._start, self._steps, self._taken = 1 / factor, steps, 0
        self._optimizer = weakref.ref(optimizer)
        self._depth = 0  # how many schedulers are at work, one inside the other
        self._said = _rates(optimizer)  # the rates of the schedule
        self._shown = self._said  # the lowered rates that the groups were given
        _watch_schedulers()
        _warm[optimizer] = self
        self._lower()
        optimizer.register_step_post_hook(self._after)

    def state(self) -> list[Any]:
        """The state of the warmup, for a checkpoint."""
        return [self._taken, self._said, self._shown]

    def load_state(self, state: list[Any]) -> None:
        """Go on from what ``state`` gave; the optimizer has been loaded before."""
        self._taken, said, shown = state
        now = _rates(self._groups)
        self._said = said if now == shown else [rate / self._share for rate in now]
        self._lower()

    @contextmanager
    def lifted(self, *, makes: bool) -> Iterator[None]:
        """Inside this context, the rates are those of the schedule, with which a scheduler computes.

        Args:
            makes: Whether the scheduler is being made: a rate that was set by hand before is the one to begin with.
        """
        self._depth += 1
        try:
            if self._depth == 1:
                self._listen(by_hand=1.0 if makes else self._share)
                self._write(self._said)
            yield
        finally:
            self._depth -= 1
            if self._depth == 0:
                self._said = _rates(self._groups)
                self._lower()

    def rates(self) -> list[Any]:
        """Copies of the rates that the next step uses."""
        return [copy.copy(group["lr"]) for group in self._groups]

    def _after(self, *_: object) -> None:
        """A step was taken."""
        if self._taken >= self._steps:
            return
        self._listen(by_hand=self._share)
        self._taken += 1
        self._lower()

    def _listen(self, *, by_hand: float) -> None:
        """Find the schedule's rate where the script has set a rate by hand: the rate divided by ``by_hand``."""
        known = zip(_rates(self._groups), self._shown, self._said, strict=True)
        self._said = [said if rate == shown else rate / by_hand for rate, shown, said in known]

    def _lower(self) -> None:
        self._shown = self._write([rate * self._share for rate in self._said])

    def _write(self, rates: list[float]) -> list[float]:
        for group, rate in zip(self._groups, rates, strict=True):
            if isinstance(group["lr"], torch.Tensor):
                group["lr"].fill_(rate)
            else:
                group["lr"] = rate
        return _rates(self._groups)

    @property
    def _groups(self) -> list[dict[str, Any]]:
        optimizer = self._optimizer()
        assert optimizer is not None
        return optimizer.param_groups

    @property
    def _share(self) -> float:
        return self._start + (1 - self._start) * self._taken / self._steps if self._taken < self._steps else 1.0


_warm: weakref.WeakKeyDictionary[Optimizer, _Warmup] = weakref.WeakKeyDictionary()


def _rates(of: Optimizer | list[dict[str, Any]]) -> list[float]:
    return [float(group["lr"]) for group in (of.param_groups if isinstance(of, Optimizer) else of)]


@functools.cache
def _watch_schedulers() -> None:
    """Have PyTorch's schedulers, which have no hooks, compute with the rates of their schedule."""
    for kind in vars(lr_scheduler).values():
        if isinstance(kind, type) and issubclass(kind, LRScheduler):
            for name in {"__init__", "step"} & vars(kind).keys():
                setattr(kind, name, _lifting(vars(kind)[name], makes=name == "__init__"))
    last = LRScheduler.get_last_lr

    @functools.wraps(last)
    def get_last_lr(scheduler: LRScheduler) -> list[Any]:
        warmup = _find(getattr(scheduler, "optimizer", None))
        return last(scheduler) if warmup is None else warmup.rates()

    setattr(LRScheduler, "get_last_lr", get_last_lr)  # noqa: B010


def _lifting(method: Callable[..., Any], *, makes: bool) -> Callable[..., Any]:
    @functools.wraps(method)
    def lifting(scheduler: LRScheduler, *args: Any, **kwargs: Any) -> Any:
        given = kwargs.get("optimizer", args[0] if args else None) if makes else None
        warmup = _find(given if given is not None else getattr(scheduler, "optimizer", None))
        if warmup is None:
            return method(scheduler, *args, **kwargs)
        with warmup.lifted(makes=makes):
            return method(scheduler, *args, **kwargs)

    return lifting


def _find(optimizer: object) -> _Warmup | None:
    return _warm.get(optimizer) if isinstance(optimizer, Optimizer) else None
