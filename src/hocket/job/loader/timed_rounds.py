"""Batches for rounds that last seconds: every worker takes as many as it can, and no server is needed to deal them out.

All ranks know the same list of batches that are left, and which rank takes which: in turns, faster ranks more often. At
the end of a round they tell each other how many batches they have taken; the others are left.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable, Collection
from typing import Any

import torch

from hocket.comm.communicator import Communicator
from hocket.errors import UsageError
from hocket.job.loader.dealt_batches import DealtBatches
from hocket.job.loader.passes import Counts, Plan
from hocket.job.worker import Worker
from hocket.strategies.base import BatchAtWork
from hocket.strategies.local_sgd import TimedLocalSGD


class RoundDeal:
    """The batches of an epoch, as all ranks see them alike.

    Attributes:
        drawn: How many batches this rank has taken in this round.
        total: How many batches the epoch has.
    """

    def __init__(self, rank: int, size: int) -> None:
        self._rank, self._size = rank, size
        self._epoch, self.total = 0, 0
        self._next, self._again = 0, deque[int]()  # batches from ``_next`` on are left, and those in ``_again``
        self._held: list[list[int]] = [[] for _ in range(size)]  # batches taken and not done yet, by rank
        self._begin_round([1] * size)

    def _begin_round(self, shares: list[int], out: Collection[int] = ()) -> None:
        """Deal from now on by ``shares``, and nothing to ranks that are ``out`` of the loop."""
        self._shares, self._credit = shares, [0] * self._size
        self._parts = [0 if rank in out else share for rank, share in enumerate(shares)]
        self._order: list[list[int]] = [[] for _ in range(self._size)]  # batches dealt to each rank so far
        self._ahead, self._left = self._next, deque(self._again)
        self.drawn = 0

    def take(self, epoch: int, total: int | None) -> int | None:
        """The next batch of ``epoch`` for this rank; None if there is none in this round."""
        if total is None:
            raise UsageError("local_sgd(time=…) needs to know how many batches there are: give the sampler a __len__")
        if epoch != self._epoch:
            self._epoch, self.total, self._next = epoch, total, 0
            self._again.clear()
            self._held = [[] for _ in range(self._size)]
            self._begin_round(self._shares)
        self.total = total
        mine = self._order[self._rank]
        while len(mine) <= self.drawn:
            if not self._deal_one():
                return None
        self.drawn += 1
        return mine[self.drawn - 1]

    def end(self, total: int) -> None:
        """The epoch has only ``total`` batches."""
        self.total = min(self.total, total)

    def _deal_one(self) -> bool:
        """Deal the next batch that is left to the rank whose turn it is."""
        if self._left:
            number = self._left.popleft()
        elif self._ahead < self.total:
            number, self._ahead = self._ahead, self._ahead + 1
        else:
            return False
        self._credit = [credit + part for credit, part in zip(self._credit, self._parts, strict=True)]
        taker = max(range(self._size), key=lambda rank: (self._credit[rank], -rank))
        self._credit[taker] -= sum(self._parts)
        self._order[taker].append(number)
        return True

    def end_round(self, rows: list[list[int]]) -> bool:
        """Take what all ranks say: batches taken, which of them are not done, and whether the rank has left the loop.

        Returns:
            Whether the epoch is over.
        """
        for order, (drawn, _, _) in zip(self._order, rows, strict=True):
            while len(order) < drawn and self._deal_one():
                pass
        again, shares = [*self._left], []
        for rank, (drawn, held, is_out) in enumerate(rows):
            mine = self._order[rank]
            taken = self._held[rank] + mine[:drawn]
            shares.append(max(1, len(taken) - held))
            self._held[rank] = taken[len(taken) - held :] if held and not is_out else []
            again += mine[drawn:] + (taken[len(taken) - held :] if held and is_out else [])
        self._next, self._again = self._ahead, deque(sorted(again))
        while self._again and self._again[-1] == self._next - 1:  # how far anybody looked ahead makes no difference
            self._next = self._again.pop()
        self._begin_round(shares, [rank for rank, (_, _, is_out) in enumerate(rows) if is_out])
        nothing_left = not self._again and self._next >= self.total
        return all(is_out or (nothing_left and not held) for _, held, is_out in rows)

    def state(self) -> dict[str, Any]:
        """Which batches are not done, at the end of a round."""
        held = [number for numbers in self._held for number in numbers]
        return {"epoch": self._epoch, "next": self._next, "again": sorted([*self._again, *held])}

    def restore(self, state: dict[str, Any]) -> None:
        """Go on from what ``state`` gave; nobody holds anything."""
        self._epoch, self._next, self._again = state["epoch"], state["next"], deque(state["again"])
        self._held = [[] for _ in range(self._size)]
        self._begin_round([1] * self._size)


class TimedRounds(DealtBatches):
    """A loader's part in rounds that last seconds.

    Attributes:
        deal: The batches; None if every rank has data of its own.
        after_round: Called at the end of each round, while a loop waits for it.
    """

    deal: RoundDeal | None

    def __init__(self, worker: Worker, deal: RoundDeal | None, after_round: Callable[[], None]) -> None:
        self._worker, self.deal, self.after_round = worker, deal, after_round
        self._communicator: Communicator = worker.communicator
        self._begun, self._over = 0.0, False
        self._number = worker.training.loaders
        self._plan = Plan(0)
        self._origin: dict[str, Any] = {}  # the batches that were left when the pass began
        self._factor = 1.0  # the average batches of a rank, divided by this rank's, in the last round
        self._batches = self._samples = 0  # batches and samples of this rank in this round
        self._everyone = 0  # batches of all ranks in the rounds before

    @property
    def _strategies(self) -> list[TimedLocalSGD]:
        return timed(self._worker)

    def begin_pass(self, plan: Plan) -> None:
        """A training loop begins."""
        self._begun, self._over = self._communicator.now(), False
        self._plan, plan.deal = plan, self.deal
        self._origin = self.deal.state() if self.deal is not None else {}
        self._batches = self._samples = self._everyone = 0

    def begin_step(self, counts: Counts, batches: int, samples: int) -> tuple[int, int]:
        """The loop gets a batch; returns how many batches and samples there have been, as far as this rank knows."""
        self._batches += 1
        self._samples += counts.here
        self._worker.training.begin_batch(BatchAtWork(counts.here))
        pace = self._everyone / self._communicator.size + self._batches * self._factor
        self._worker.training.loops.pace.follow(min(pace, self._most))
        return self._everyone + self._batches, samples

    def end_step(self) -> None:
        """A batch is done: end the round, if its time is over; collective then."""
        if not self._over and self._batches and self._communicator.now() - self._begun >= self._strategies[0].seconds:
            # A script that asks ahead of time trains on, also if no batches are left.
            self._end_round(is_out=False, is_done=self._worker.training.loops.is_between)

    def await_more(self) -> bool:
        """Whether there is another batch for this worker; it takes part in rounds until then, or until all are done."""
        while not self._over:
            self._end_round(is_out=False)
            self.after_round()
            if not self._over and self.deal is not None:
                return True  # if not, the loop asks again
        return False

    def finish(self, plan: Plan) -> bool:
        self._take_part()  # a script that asks ahead of time has trained on its last batches only now
        self._worker.training.loops.pace.complete(self._everyone / self._communicator.size)
        return False  # the rounds have told how many samples there were

    def leave(self, plan: Plan, *, has_trained: bool) -> Callable[[], None] | None:
        if has_trained:
            return self._take_part
        self.restore(self._origin)  # the loop was a glance at the data: its batches count as not taken
        return None

    def restore(self, state: dict[str, Any]) -> None:
        if self.deal is not None:
            self.deal.restore(state)

    def _take_part(self) -> None:
        """Take part in rounds until all others are done, too."""
        while not self._over:
            self._end_round(is_out=True)
            self.after_round()

    @property
    def _most(self) -> float:
        """Batches of an epoch for each worker, on the average."""
        return self.deal.total / self._communicator.size if self.deal is not None else math.inf

    def _end_round(self, *, is_out: bool, is_done: bool = True) -> None:
        """Average, and tell each other how far all are; collective.

        Args:
            is_out: Whether this worker takes no more batches of this pass.
            is_done: Whether this worker has trained on all batches that its script was given.
        """
        for strategy in self._strategies:
            strategy.end_round()
        unused = len(self._plan.counts)
        if is_out:
            self._plan.counts.clear()
        drawn = self.deal.drawn if self.deal is not None else self._batches
        mine = [drawn, unused, int(is_out), self._batches, self._samples, self._number, int(is_done)]
        rows = self._communicator.allgather(torch.tensor(mine)).tolist()
        if any(row[5] != self._number for row in rows):
            raise UsageError(
                "local_sgd(time=…) cannot deal out the batches of several loaders at once, as in zip(): use one, or "
                "local_sgd(period=…)"
            )
        if self.deal is not None:
            self._over = self.deal.end_round([row[:3] for row in rows])
        else:
            self._over = all(row[2] or not row[3] for row in rows)
        self._over &= all(row[6] for row in rows)
        batches, samples = sum(row[3] for row in rows), sum(row[4] for row in rows)
        self._worker.training.counts.agree(batches, samples - self._samples)
        self._everyone += batches
        if self._batches:
            self._factor = batches / self._communicator.size / self._batches
        self._batches = self._samples = 0
        self._begun = self._communicator.now()


def timed(worker: Worker) -> list[TimedLocalSGD]:
    """The strategies whose rounds last seconds."""
    return [strategy for strategy in worker.training.strategies if isinstance(strategy, TimedLocalSGD)]
