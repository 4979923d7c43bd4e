"""``share``: this rank's part of a batch that the script makes by itself, without a loader."""

from __future__ import annotations

import operator

import torch

from hocket.errors import UsageError
from hocket.job import buffers
from hocket.job.data import sharding
from hocket.job.runtime import current


def share(n: int) -> slice:
    """This rank's part of a batch of ``n`` samples, for scripts that make their batches without a DataLoader.

    All ranks say the same ``n`` and get parts that together are the batch, each sample in one of them. Where autograd
    is on, the backward passes that follow are for it, until the next call: they count by the samples that the part has,
    so that for losses which are means the averaged gradient is that of the whole batch, also if parts are not equally
    large. A rank for which nothing is left gets the first sample again, and its gradient does not count.

    Not collective. Call it just before the forward pass; with the same ``n`` in every step, it may be called earlier.

    Args:
        n: Samples of the batch of all workers together, 1 or more.

    Returns:
        ``slice(begin, end)``, with which tensors, arrays and lists can be indexed; ``end - begin`` is its size.
    """
    runtime = current()
    try:
        count = operator.index(n)
    except TypeError:
        raise UsageError(f"share({n!r}): must be a number of samples, such as len(batch)") from None
    if count < 1:
        raise UsageError(f"share({count}): a batch must have at least one sample")
    size = runtime.config.size
    part = sharding.share(range(count), runtime.config.rank, size, sharding.least(-(-count // size)))
    here = slice(part[0], part[-1] + 1) if part else slice(0, 1)
    if torch.is_grad_enabled():
        runtime.leave_no_trace()
        if runtime.client is not None:
            runtime.client.turn.weight = float(len(part))  # the servers divide by the sum
        else:
            runtime.set_weight(len(part) * size / count)
        runtime.count_batch(count)
        if not part:
            runtime.undo = buffers.remember(runtime.models)
    return here
