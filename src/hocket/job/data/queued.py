"""Batches from the queue that all workers share: a slow worker takes fewer, and what a lost one held is dealt again.

Only numbers travel: every worker knows the order of the samples. Where workers are in step, a number stands for one
rank's share of a global batch, as ``sharding`` divides it; else for a batch of one worker.
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import islice
from typing import Any

from torch.utils.data import DataLoader

from hocket.job.data.rest import Rest
from hocket.job.data.sharding import Plan, ShardedIndices, batches, least, share


class QueuedIndices(ShardedIndices):
    """The batches that this worker takes from the queue; a plan without a queue is divided as ever."""

    def _iterate(self, plan: Plan) -> Iterator[Any]:
        if plan.deal is None:
            yield from super()._iterate(plan)
            return
        each, whole = self._units(plan)
        order, at, batch = self._in_order(plan, whole), 0, list[Any]()
        left = self._left(plan)
        total = None if left is None else batches(left, whole, self._drop_last) * each
        while (number := plan.deal.take(plan.epoch, total)) is not None:
            which, rank = divmod(number, each)
            if which < at - 1:  # somebody else had it, who is lost
                order, at = self._in_order(plan, whole), 0
            if which >= at:
                batch, at = next(islice(order, which - at, None), []), which + 1
            if not batch or (self._drop_last and len(batch) < whole):
                plan.deal.end(which * each)
                continue
            yield self._give(plan, batch, which * whole, rank, each, number + 1)
        for _ in order:  # generators of the script's own must be where those of other ranks are
            pass

    def rest(self, plan: Plan, state: dict[str, Any]) -> Rest:
        """What is left of a pass, from the state of its queue: numbers from ``next`` on, and some before."""
        if state["epoch"] != plan.epoch:
            return plan.rest  # nobody has taken any yet
        each, whole = self._units(plan)
        left = self._left(plan)

        def span(number: int) -> tuple[int, int]:
            which, rank = divmod(number, each)
            start = which * whole
            end = start + whole if left is None else min(start + whole, left)
            mine = share(range(start, end), rank, each, least(self._batch_size))
            return (mine[0], mine[-1] + 1) if mine else (start, start)

        next_one = state["next"]
        begun = next_one // each * each
        taken = max([begun // each * whole, *(span(number)[1] for number in range(begun, next_one))])
        return plan.rest.only([*(span(number) for number in state["again"]), (taken, None)])

    def _units(self, plan: Plan) -> tuple[int, int]:
        """How many numbers stand for the samples that are divided at once, and how many samples these are."""
        each = self._size if plan.in_step else 1
        return each, each * (self._batch_size or 1)

    def _left(self, plan: Plan) -> int | None:
        try:
            return plan.rest.count(len(self._source))  # type: ignore[arg-type]
        except TypeError:
            return None


def total(original: DataLoader[Any]) -> int | None:
    """How many batches all workers together take of a loader, if that is known."""
    ready_made = original.batch_size is None and original.batch_sampler is not None
    source = original.batch_sampler if ready_made else original.sampler
    try:
        return batches(len(source), original.batch_size or 1, original.drop_last)  # type: ignore[arg-type]
    except TypeError:
        return None
