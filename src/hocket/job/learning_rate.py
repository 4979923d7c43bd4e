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
from hocket.job.loader.global_batch import GlobalBatch
from hocket.job.worker import current
from hocket.strategies.base import read_rates

_RULES = {"linear": float, "sqrt": math.sqrt}


def scale_lr(optimizer: Optimizer, rule: str = "linear", *, warmup: int = 0) -> None:
    """Multiply the learning rates of ``optimizer`` by the number of workers, or by its square root.

    It is the number of batches of the script's size that the batch of all workers has: with ``--batch 512`` and a
    loader of 32 samples it is 16. Where the global batch changes (``--batch per-worker``, or a resumption), so do the
    rates.

    Call it before a scheduler is built on the optimizer, so that the scheduler starts from the scaled rate. During the
    first ``warmup`` steps the rate grows evenly from the unscaled one to the scaled one, multiplied by whatever a
    scheduler says. ``param_groups`` and ``get_last_lr()`` have what the next step uses; a rate that the script sets by
    hand is used as it is.
    """
    scale(optimizer, rule, warmup, None)


def scale(optimizer: Optimizer, rule: str, warmup: int, batch: GlobalBatch | None) -> None:
    """As ``scale_lr``, for the global batch of a loader that is known, or of those that have been distributed."""
    if rule not in _RULES:
        raise UsageError(f"scale_lr rule {rule!r}: the choices are {', '.join(_RULES)}")
    if warmup < 0:
        raise UsageError(f"scale_lr warmup={warmup}: must be a number of steps, 0 or more")
    if any("initial_lr" in group for group in optimizer.param_groups):
        raise UsageError("scale_lr after a scheduler was built on the optimizer: scale first, then build the scheduler")
    worker = current()
    batches = [batch] if batch is not None else worker.training.global_batches
    known = sorted({each.times for each in batches})
    if len(known) > 1:
        raise UsageError(
            f"scale_lr cannot tell which loader's batch is meant: they are {', '.join(f'{n:g}' for n in known)} times "
            "those of the script; give the one that trains to the same hocket.distribute(…, scale_lr=…)"
        )
    if not known:
        if isinstance(worker.config.batch, int):
            raise UsageError(
                f"scale_lr with --batch {worker.config.batch} has to know how large the batches of the script's loader "
                "are: give the loader to the same hocket.distribute(…, scale_lr=…), or call hocket.scale_lr after it"
            )
        known = [worker.config.size]
    worker.training.scalings.append(_Scaling(optimizer, _RULES[rule], known[0], batches, warmup))


def scheduled_rates(optimizer: Optimizer) -> list[float]:
    """The learning rates that the schedule of ``optimizer`` has, without what the global batch makes of them."""
    scaling = _find(optimizer)
    return read_rates(optimizer) if scaling is None else scaling.scheduled()


class _Scaling:
    """Scales the rates of an optimizer: those of its schedule are for the batch with which the training began.

    They are lowered while the rate grows at the beginning, a little less after every step, and changed where the global
    batch has changed since; schedulers themselves do not see that.

    Args:
        optimizer: The optimizer.
        rule: Gives the factor of the rates from that of the batch.
        times: How many batches of the script's size the global batch has.
        batches: The global batches that tell the same at another time; of loaders yet to come, too.
        steps: Steps in which the rate grows.
    """

    def __init__(
        self,
        optimizer: Optimizer,
        rule: Callable[[float], float],
        times: float,
        batches: list[GlobalBatch],
        steps: int,
    ) -> None:
        self._rule, self._batches, self._steps, self._taken = rule, batches, steps, 0
        self._begun = self._factor = rule(times)  # of the schedule, and now
        for group in optimizer.param_groups:
            group["lr"] = group["lr"] * self._begun
        self._optimizer = weakref.ref(optimizer)
        self._depth = 0  # how many schedulers are at work, one inside the other
        self._said = _rates(optimizer)  # the rates of the schedule
        self._shown = self._said  # the rates that the groups were given
        _scaled[optimizer] = self
        if steps:
            self._lower()
            optimizer.register_step_post_hook(self._after)

    def state(self) -> list[Any]:
        """The state of the scaling, for a checkpoint."""
        return [self._taken, self._said, self._shown, self._begun, self._factor]

    def load_state(self, state: list[Any]) -> None:
        """Go on from what ``state`` gave; the optimizer has been loaded before."""
        self._taken, said, shown, self._begun, self._factor = state
        now = _rates(self._groups)
        self._said = said if now == shown else [rate / self._share for rate in now]
        self._lower()

    def follow(self) -> None:
        """The global batch may have changed, and the rates change with it."""
        known = [batch.times for batch in sorted(self._batches, key=lambda batch: not batch.trains)]
        if known and self._rule(known[0]) != self._factor:
            self._listen(by_hand=self._share)
            self._factor = self._rule(known[0])
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

    def scheduled(self) -> list[float]:
        """The rates of the schedule, as they are now."""
        return self._find_said(by_hand=self._share)

    def _listen(self, *, by_hand: float) -> None:
        self._said = self._find_said(by_hand=by_hand)

    def _find_said(self, *, by_hand: float) -> list[float]:
        """Find the schedule's rate where the script has set a rate by hand: the rate divided by ``by_hand``."""
        known = zip(_rates(self._groups), self._shown, self._said, strict=True)
        return [said if rate == shown else rate / by_hand for rate, shown, said in known]

    def _lower(self) -> None:
        if self._share != 1.0:
            _watch_schedulers()
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
        """How much of the schedule's rates is used."""
        if self._taken >= self._steps or self._factor <= 1:
            return self._factor / self._begun
        return (1 + (self._factor - 1) * self._taken / self._steps) / self._begun


_scaled: weakref.WeakKeyDictionary[Optimizer, _Scaling] = weakref.WeakKeyDictionary()


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
        scaling = _find(getattr(scheduler, "optimizer", None))
        return last(scheduler) if scaling is None else scaling.rates()

    setattr(LRScheduler, "get_last_lr", get_last_lr)  # noqa: B010


def _lifting(method: Callable[..., Any], *, makes: bool) -> Callable[..., Any]:
    @functools.wraps(method)
    def lifting(scheduler: LRScheduler, *args: Any, **kwargs: Any) -> Any:
        given = kwargs.get("optimizer", args[0] if args else None) if makes else None
        scaling = _find(given if given is not None else getattr(scheduler, "optimizer", None))
        if scaling is None:
            return method(scheduler, *args, **kwargs)
        with scaling.lifted(makes=makes):
            return method(scheduler, *args, **kwargs)

    return lifting


def _find(optimizer: object) -> _Scaling | None:
    return _scaled.get(optimizer) if isinstance(optimizer, Optimizer) else None
