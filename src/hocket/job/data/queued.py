"""Batches from the queue that all workers share: a slow worker takes fewer, and what a lost one held is dealt again.

Only numbers of batches travel: every worker knows the order of the samples, which follows from the seed and the epoch.
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import islice
from typing import Any

from torch.utils.data import DataLoader

from hocket.job.data.sharding import AHEAD, Counts, Plan, SeededIndices, ShardedIndices, batches, is_of_torch, samples
from hocket.job.randomness import RandomState, SharedRandom, mix


class QueuedIndices(ShardedIndices):
    """The batches that this worker takes from the queue; a plan without a queue is divided as ever."""

    def _iterate(self, plan: Plan) -> Iterator[Any]:
        if plan.deal is None:
            yield from super()._iterate(plan)
            return
        size = self._batch_size or 1
        order, position = self._in_order(plan, size), 0
        count = _count(self._source, size, self._drop_last)
        while (number := plan.deal.take(plan.epoch, count)) is not None:
            if number < position:  # somebody else had it, who is lost
                order, position = self._in_order(plan, size), 0
            batch = next(islice(order, number - position, None), [])
            position = number + 1
            if not batch or (self._drop_last and len(batch) < size):
                plan.deal.end(number)
                continue
            ready = self._batch_size is None
            here = samples(batch[0]) if ready else len(batch)
            plan.counts.append(Counts(here, here, number + 1))
            indices = batch[0] if ready else batch
            yield indices if self.seed is None else SeededIndices(indices, mix(self.seed, plan.epoch, number))
        for _ in order:  # generators of the script's own must be where those of other ranks are
            pass

    def _in_order(self, plan: Plan, size: int) -> Iterator[list[Any]]:
        """All batches of the epoch, from its beginning."""
        if plan.start is None:
            plan.start = self.begin()
        else:
            self.restore(plan.start)
        random = SharedRandom(RandomState.from_seed(plan.seed))
        ahead = AHEAD if is_of_torch(self._source) else 1
        with random:
            indices = iter(self._source)
        while True:
            with random:
                block = list(islice(indices, ahead * size))
            if not block:
                return
            for start in range(0, len(block), size):
                yield block[start : start + size]


def total(original: DataLoader[Any]) -> int | None:
    """How many batches all workers together take of a loader, if that is known."""
    ready_made = original.batch_size is None and original.batch_sampler is not None
    source = original.batch_sampler if ready_made else original.sampler
    return _count(source, original.batch_size or 1, original.drop_last)


def _count(source: Any, size: int, drop_last: bool) -> int | None:
    try:
        return batches(len(source), size, drop_last)
    except TypeError:
        return None
