"""Numbers about the training: means, sums and extremes over all workers, and ``report`` for the record."""

from __future__ import annotations

import time
from typing import Any, TypeVar

import torch

from hocket.errors import UsageError
from hocket.events import Metrics
from hocket.job.worker import current, meeting, together

Value = TypeVar("Value", float, torch.Tensor)


@together("hocket.mean()")
def mean(value: Value, weight: float | torch.Tensor = 1.0) -> Value:
    """The mean of ``value`` over all workers, each counted ``weight`` times; every rank must call it.

    Args:
        value: A number, or a tensor (all of its elements are averaged over the workers, none with another).
        weight: How much this worker's value counts: the number of samples that it is a mean over, for example. NaN is
            the result if nobody's counts.
    """
    count = read_number(weight, "weight")
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


def report(**values: Any) -> None:
    """Record numbers about the training, such as ``loss=…, accuracy=…``, by step, sample and time.

    Rank 0's numbers are recorded; other ranks may call this, too, and need not. Any thread may call it.
    """
    worker = current()
    numbers = {name: read_number(value, name) for name, value in values.items()}
    worker.training.metrics |= numbers
    counts = worker.training.counts
    if worker.config.rank == 0:
        worker.sink.put(Metrics(counts.step, counts.samples, time.time(), numbers, worker.teller.sent))


def _reduce(value: Value, operation: str) -> Value:
    tensor = _tensor(value).clone()
    meeting().communicator.allreduce(tensor, operation)
    return _like(value, tensor)


def _tensor(value: float | torch.Tensor) -> torch.Tensor:
    """``value`` as a tensor in double precision, so that counts stay exact."""
    if isinstance(value, torch.Tensor):
        return value.detach().to("cpu", torch.float64).contiguous().view(-1)
    return torch.tensor([read_number(value, "value")], dtype=torch.float64)


def _like(value: Value, result: torch.Tensor) -> Value:
    if not isinstance(value, torch.Tensor):
        return float(result)
    kind = value.dtype if value.is_floating_point() else torch.float64
    return result.view(value.shape).to(value.device, kind)


def read_number(value: Any, name: str) -> float:
    """``value``, which the script calls ``name``, as a number."""
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
