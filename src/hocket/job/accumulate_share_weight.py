"""``accumulate``, ``share`` and ``weight``, with which a script says how much its backward passes count."""

from __future__ import annotations

import math
import operator
from collections.abc import Iterator
from contextlib import contextmanager

import torch

from hocket.errors import UsageError
from hocket.job.batch_weights import weigh_share
from hocket.job.loader import division
from hocket.job.metrics import read_number
from hocket.job.worker import current, together
from hocket.strategies.base import BatchAtWork


def share(n: int) -> slice:
    """This rank's part of a batch of ``n`` samples, for scripts that make their batches without a DataLoader.

    All ranks say the same ``n`` and get parts that together are the batch, each sample in one of them. Where autograd
    is on, the backward passes until the next call are for this part: they count by the samples that the part has,
    so that for losses which are means the averaged gradient is that of the whole batch, also if parts are not equally
    large. A rank for which nothing is left gets the first sample again, and its gradient does not count.

    Not collective. Call it just before the forward pass; with the same ``n`` in every step, it may be called earlier.

    Args:
        n: Samples of the batch of all workers together, 1 or more.

    Returns:
        ``slice(begin, end)``, with which tensors, arrays and lists can be indexed; ``end - begin`` is its size.
    """
    worker = current()
    try:
        count = operator.index(n)
    except TypeError:
        raise UsageError(f"share({n!r}): must be a number of samples, such as len(batch)") from None
    if count < 1:
        raise UsageError(f"share({count}): a batch must have at least one sample")
    size = worker.config.size
    part = division.share(range(count), worker.config.rank, size, division.least(-(-count // size)))
    here = slice(part[0], part[-1] + 1) if part else slice(0, 1)
    if torch.is_grad_enabled():
        training = worker.training
        training.weights.leave_no_trace()
        if worker.client is None:
            training.weights.set(weigh_share(len(part), count, size))
        weight = float(len(part))  # the servers divide by the sum
        training.begin_batch(BatchAtWork(count, epoch=training.passes, weight=weight, in_step=True))
        if not part:
            training.weights.repeat(training.models)
    return here


@contextmanager
def accumulate(*, mean: bool = False) -> Iterator[None]:
    """Within this context, ``backward()`` adds to ``p.grad`` without any exchange.

    The next ``backward()`` outside exchanges the sum, as if all batches had been one; it must come before
    ``optimizer.step()``.

    Args:
        mean: Divide the sum by the number of backward passes, that last one included.
    """
    worker = current()
    strategies = worker.training.wake() if mean else worker.training.strategies
    for strategy in strategies:
        strategy.collector.begin()
        strategy.collector.held += 1
        strategy.collector.mean |= mean
    try:
        yield
    finally:
        for strategy in strategies:
            strategy.collector.held -= 1


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
        The factor of this worker's gradients before they are averaged.
    """
    worker, weights = current(), current().training.weights
    if count is None:
        weights.set(1.0)
        return 1.0
    if any(strategy.collector.adds for strategy in worker.training.strategies):
        raise UsageError(
            "hocket.weight() with distribute(…, reduction='sum'): where losses are sums, everything counts as often as "
            "it is there; leave out hocket.weight()"
        )
    number = 0.0 if weights.repeats else read_number(count, "count")
    if not 0 <= number < math.inf:
        raise UsageError(f"weight({number}): must be a number of things, 0 or more")
    if worker.client is not None:
        weights.set(1.0)  # else the share of a smaller last batch would count, too
        worker.training.batch.weight = number  # the servers divide by the sum
        return 1.0
    summed = torch.tensor([number], dtype=torch.float64)
    worker.communicator.allreduce(summed, "sum")
    if not float(summed):
        raise UsageError("weight(0) on all ranks: at least one must have something to learn from")
    factor = number * worker.config.size / float(summed)
    weights.set(factor)
    return factor
