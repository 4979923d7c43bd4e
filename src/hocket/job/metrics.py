"""Numbers about the training: over all workers, and for the record."""

from __future__ import annotations

import math
import time
from typing import Any, TypeVar

import torch

from hocket.errors import UsageError
from hocket.events import Metrics
from hocket.job.runtime import current, meeting, together

Value = TypeVar("Value", float, torch.Tensor)


@together("hocket.mean()")
def mean(value: Value, weight: float | torch.Tensor = 1.0) -> Value:
    """The mean of ``value`` over all workers, each counted ``weight`` times; every rank must call it.

    Args:
        value: A number, or a tensor (all of its elements are averaged over the workers, none with another).
        weight: How much this worker's value counts: the number of samples that it is a mean over, for example. NaN is
            the result if nobody's counts.
    """
    count = _number(weight, "weight")
    if not count >= 0:
        raise UsageError(f"mean(…, weight={count}): a weight must be 0 or more")
    contribution = _tensor(value) * count if count else torch.zeros_like(_tensor(value))
    sums = torch.cat((contribution.view(-1), torch.tensor([count], dtype=torch.float64)))
    meeting().communicator.allreduce(sums, "sum")
    return _like(value, sums[:-1] / sums[-1])


@together("hocket.total()")
def total(value: Value) -> Value:
    """The sum of ``value`` over all workers; every rank must call it."""
    return _reduce(value, "sum")


@together("hocket.maximum()")
def maximum(value: Value) -> Value:
    """The largest ``value`` of all workers; every rank must call it."""
    return _reduce(value, "max")


@together("hocket.minimum()")
def minimum(value: Value) -> Value:
    """The smallest ``value`` of all workers; every rank must call it."""
    return _reduce(value, "min")


@together("hocket.weight()")
def weight(count: float | None) -> float:
    """Let the next backward passes count in proportion to ``count``; every rank must call it.

    For a loss that is a mean over ``count`` things of which each worker may have another number, such as tokens: the
    averaged gradient is then that of the mean over all of them. It holds until the next batch of a loader. A batch that
    a loader only repeats counts nothing, whatever is said here.

    Args:
        count: How many things this worker's loss is a mean over; None if its losses are weighted already, so that
            gradients are to be averaged as they are.

    Returns:
        What this worker's gradients are multiplied by before they are averaged.
    """
    if count is None:
        current().set_weight(1.0)
        return 1.0
    if any(strategy.collector.adds for strategy in current().strategies):
        raise UsageError(
            "hocket.weight() with distribute(…, reduction='sum'): where losses are sums, everything counts as often as "
            "it is there; leave out hocket.weight()"
        )
    number = 0.0 if current().repeats else _number(count, "count")
    if not 0 <= number < math.inf:
        raise UsageError(f"weight({number}): must be a number of things, 0 or more")
    runtime = current()
    if runtime.client is not None:
        runtime.client.turn.weight = number  # the servers divide by the sum
        return 1.0
    summed = torch.tensor([number], dtype=torch.float64)
    runtime.communicator.allreduce(summed, "sum")
    if not float(summed):
        raise UsageError("weight(0) on all ranks: at least one must have something to learn from")
    factor = number * runtime.config.size / float(summed)
    runtime.set_weight(factor)
    return factor


def report(**values: Any) -> None:
    """Record numbers about the training, such as ``loss=…, accuracy=…``, by step, sample and time.

    Rank 0's are recorded; other ranks may call it, too, and need not. It may be called from any thread.
    """
    runtime = current()
    numbers = {name: _number(value, name) for name, value in values.items()}
    runtime.metrics |= numbers
    if runtime.config.rank == 0:
        runtime.sink.put(Metrics(runtime.step, runtime.samples, time.time(), numbers, runtime.sent))


def _reduce(value: Value, operation: str) -> Value:
    tensor = _tensor(value).clone()
    meeting().communicator.allreduce(tensor, operation)
    return _like(value, tensor)


def _tensor(value: float | torch.Tensor) -> torch.Tensor:
    """In double precision, so that counts stay exact."""
    if isinstance(value, torch.Tensor):
        return value.detach().to("cpu", torch.float64).contiguous().view(-1)
    return torch.tensor([_number(value, "value")], dtype=torch.float64)


def _like(value: Value, result: torch.Tensor) -> Value:
    if not isinstance(value, torch.Tensor):
        return float(result)
    kind = value.dtype if value.is_floating_point() else torch.float64
    return result.view(value.shape).to(value.device, kind)


def _number(value: Any, name: str) -> float:
    if isinstance(value, torch.Tensor) and value.numel() != 1:
        raise UsageError(f"{name} is a tensor of shape {list(value.shape)}, not a number: pass its mean(), for example")
    try:
        if isinstance(value, (str, bytes)):
            raise TypeError
        if hasattr(value, "item") and getattr(value, "size", 0) == 1:
            value = value.item()  # an array
        return float(value.detach() if isinstance(value, torch.Tensor) else value)
    except (TypeError, ValueError, OverflowError, RuntimeError):
        shown = repr(value) if len(repr(value)) < 60 else "…"
        raise UsageError(f"{name}={shown} is a {type(value).__name__}, not a number of use here") from None
