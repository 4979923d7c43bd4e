"""Batches from the queue that all workers share: a slow worker takes fewer, and what a lost one held is dealt again.

Only numbers of batches travel: every worker knows the order of the samples, which follows from the seed and the epoch.
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import islice
from typing import Any

from hocket.job.data.sharding import AHEAD, Counts, Plan, SeededIndices, ShardedIndices, batches, is_of_torch, samples
from hocket.job.randomness import RandomState, SharedRandom, mix
from hocket.server.deal import Deal


class QueuedIndices(ShardedIndices):
    """The batches that this worker takes from the queue; a plan without a queue is divided as ever."""

    def _iterate(self, plan: Plan) -> Iterator[Any]:
        if plan.deal is None:
            yield from super()._iterate(plan)
            return
        size = self._batch_size or 1
        order, position = self._in_order(plan, size), 0
        while (number := self._take(plan, plan.deal)) is not None:
            if number < position:  # somebody else had it, who is lost
                order, position = self._in_order(plan, size), 0
            batch = next(islice(order, number - position, None), [])
            position = number + 1
            if not batch or (self._drop_last and len(batch) < size):
                plan.deal.end(number)
                continue
            ready = self._batch_size is None
            count = samples(batch[0]) if ready else len(batch)
            plan.counts.append(Counts(count, count, number + 1))
            indices = batch[0] if ready else batch
            yield indices if self.seed is None else SeededIndices(indices, mix(self.seed, plan.epoch, number))
        for _ in order:  # read to the end, so that the generators of the source are the same on all ranks afterwards
            pass

    def takes_again(self, plan: Plan) -> bool:
        """Whether there is another batch when all are done that were taken ahead; blocks while others hold some."""
        if plan.deal is not None and (number := self._take(plan, plan.deal)) is not None:
            plan.taken_again.append(number)
        return bool(plan.taken_again)

    def _take(self, plan: Plan, deal: Deal) -> int | None:
        if plan.taken_again:
            return plan.taken_again.pop()
        try:
            total: int | None = batches(len(self._source), self._batch_size or 1, self._drop_last)  # type: ignore[arg-type]
        except TypeError:
            total = None
        # Data-loader processes are given batches ahead. While this worker has such ones, others may wait for them.
        return deal.take(plan.epoch, total, wait=not plan.counts)

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
