"""Batches for rounds that last seconds: every worker takes as many as it can, and no server is needed to deal them out.

All workers know the same list of batches that are left, and which worker takes which: in turns, faster ones more often.
At the end of a round they tell each other how many batches they have taken; the others are left. What a worker has done
in a round counts when the round is over; if it is lost before, the others do that again.
"""

from __future__ import annotations

import functools
import math
from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import torch

from hocket.comm.communicator import Communicator
from hocket.comm.generation import Change
from hocket.errors import UsageError
from hocket.job.loader.dealt_batches import DealtBatches
from hocket.job.loader.passes import Counts, Plan
from hocket.job.training_loop import Loop
from hocket.job.worker import Worker
from hocket.strategies.base import BatchAtWork
from hocket.strategies.local_sgd import TimedLocalSGD


class RoundDeal:
    """The batches of an epoch, as all workers see them alike.

    Workers are named by their numbers in the job, which they keep when others are lost.

    Attributes:
        drawn: How many batches this worker has taken in this round.
        total: How many batches the epoch has.
    """

    def __init__(self, rank: int, members: Sequence[int]) -> None:
        self._me, self._members = members[rank], tuple(members)
        self._epoch, self.total = 0, 0
        self._next, self._again = 0, deque[int]()  # batches from ``_next`` on are left, and those in ``_again``
        self._held: dict[int, list[int]] = {each: [] for each in members}  # batches taken, and not done and averaged
        self._out: set[int] = set()  # workers that have left the loop, and get nothing more
        self._begin_round(dict.fromkeys(members, 1))

    def _begin_round(self, shares: Mapping[int, int]) -> None:
        """Deal from now on by ``shares``."""
        self._shares = {each: shares.get(each, 1) for each in self._members}
        self._known = dict.fromkeys(self._members, 0)  # how many of the batches drawn in this round are held for sure
        self.drawn = 0
        self._deal_anew()

    def _deal_anew(self) -> None:
        self._parts = {each: 0 if each in self._out else share for each, share in self._shares.items()}
        self._credit = dict.fromkeys(self._members, 0)
        self._order: dict[int, list[int]] = {each: [] for each in self._members}  # batches dealt to each so far
        self._ahead, self._left = self._next, deque(self._again)

    def take(self, epoch: int, total: int | None) -> int | None:
        """The next batch of ``epoch`` for this worker; None if there is none in this round."""
        if total is None:
            raise UsageError("local_sgd(time=…) needs to know how many batches there are: give the sampler a __len__")
        if epoch != self._epoch:
            self._begin_epoch(epoch, total)
        self.total = total
        mine, place = self._order[self._me], self.drawn - self._known[self._me]
        while len(mine) <= place:
            if not self._deal_one():
                return None
        self.drawn += 1
        return mine[place]

    def _begin_epoch(self, epoch: int, total: int) -> None:
        self._epoch, self.total, self._next = epoch, total, 0
        self._again.clear()
        self._out.clear()
        self._held = {each: [] for each in self._members}
        self._begin_round(self._shares)

    def end(self, total: int) -> None:
        """The epoch has only ``total`` batches."""
        self.total = min(self.total, total)

    def _deal_one(self) -> bool:
        """Deal the next batch that is left to the worker whose turn it is."""
        if self._left:
            number = self._left.popleft()
        elif self._ahead < self.total:
            number, self._ahead = self._ahead, self._ahead + 1
        else:
            return False
        for each, part in self._parts.items():
            self._credit[each] += part
        taker = max(self._members, key=lambda each: (self._credit[each], -each))
        self._credit[taker] -= sum(self._parts.values())
        self._order[taker].append(number)
        return True

    def _settle(self, drawn: Mapping[int, int]) -> None:
        """Workers hold what they have ``drawn`` in this round; all else that was dealt is left."""
        counts = {each: max(0, drawn.get(each, 0) - self._known[each]) for each in self._members}
        for each, count in counts.items():
            while len(self._order[each]) < count and self._deal_one():
                pass
        again = [*self._left]
        for each, count in counts.items():
            self._held[each] += self._order[each][:count]
            self._known[each] += count
            again += self._order[each][count:]
        self._next, self._again = self._ahead, deque(again)
        self._put_back([])

    def _put_back(self, numbers: Iterable[int]) -> None:
        """These batches are left, too."""
        self._again = deque(sorted([*self._again, *numbers]))
        while self._again and self._again[-1] == self._next - 1:  # how far anybody looked ahead makes no difference
            self._next = self._again.pop()
        self._deal_anew()

    def end_round(self, rows: Mapping[int, Sequence[int]]) -> bool:
        """Take what all workers say: batches taken, which of them are not done, and whether the worker left the loop.

        Returns:
            Whether the epoch is over.
        """
        self._settle({each: drawn for each, (drawn, _, _) in rows.items()})
        back, shares = list[int](), dict[int, int]()
        for each, (_, held, is_out) in rows.items():
            done = len(self._held[each]) - held
            shares[each], self._held[each] = max(1, done), self._held[each][done:]
            if is_out:
                back += self._held[each]
                self._held[each] = []
        self._out = {each for each, (_, _, is_out) in rows.items() if is_out}
        self._put_back(back)
        self._begin_round(shares)
        nothing_left = not self._again and self._next >= self.total
        return all(is_out or (nothing_left and not held) for _, held, is_out in rows.values())

    @property
    def told(self) -> list[int]:
        """What the others are to know when workers change in the middle of a round."""
        return [self._epoch, self.total, self.drawn]

    def regroup(self, rank: int, members: Sequence[int], told: Mapping[int, Sequence[int]]) -> None:
        """Go on with ``members``, who have ``told`` how far they are; what others had of this round is left."""
        epoch, total, _ = max(map(tuple, told.values()), default=(0, 0, 0))
        if epoch > self._epoch:
            self._begin_epoch(epoch, total)
        self._settle({each: drawn for each, (of, _, drawn) in told.items() if of == self._epoch})
        lost = [number for each in self._members if each not in members for number in self._held[each]]
        known = self._known
        self._me, self._members = members[rank], tuple(members)
        self._held = {each: self._held.get(each, []) for each in members}
        self._known = {each: known.get(each, 0) for each in members}
        self._shares = dict.fromkeys(members, 1)
        self._out &= set(members)
        self._put_back(lost)

    def state(self) -> dict[str, Any]:
        """Which batches are not done, at the end of a round."""
        held = [number for numbers in self._held.values() for number in numbers]
        return {"epoch": self._epoch, "next": self._next, "again": sorted([*self._again, *held])}

    def restore(self, state: dict[str, Any]) -> None:
        """Go on from what ``state`` gave; nobody holds anything."""
        self._epoch, self._next, self._again = state["epoch"], state["next"], deque(state["again"])
        self._out.clear()
        self._held = {each: [] for each in self._members}
        self._begin_round({})

    def place(self) -> dict[str, Any]:
        """All that a newcomer must know, at the end of a round."""
        held = [[each, numbers] for each, numbers in self._held.items()]
        free = {"epoch": self._epoch, "next": self._next, "again": [*self._again]}
        return {**free, "total": self.total, "held": held, "out": sorted(self._out)}

    def go_on(self, place: dict[str, Any]) -> None:
        """Begin as a newcomer, with what ``place`` gave; ``regroup`` follows."""
        held = {each: [*numbers] for each, numbers in place["held"]}
        self._members = tuple(held)
        self.restore(place)
        self.total, self._held, self._out = place["total"], held, set(place["out"])


class TimedRounds(DealtBatches):
    """A loader's part in rounds that last seconds.

    Attributes:
        deal: The batches; None if every rank has data of its own.
        after_round: Called at the end of each round, while a loop waits for it.
    """

    deal: RoundDeal | None

    def __init__(self, worker: Worker, number: int, deal: RoundDeal | None, after_round: Callable[[], None]) -> None:
        self._worker, self._number, self.deal, self.after_round = worker, number, deal, after_round
        self._communicator: Communicator = worker.communicator
        self._begun, self._over = 0.0, False
        self._rest = False  # whether all workers rest, or have left, since the last round
        self._plan = Plan(0)
        self._origin: dict[str, Any] = {}  # the batches that were left when the pass began
        self._factor = 1.0  # the average batches of a rank, divided by this rank's, in the last round
        self._batches = self._samples = 0  # batches and samples of this rank in this round
        self._inherited: dict[str, Any] | None = None  # for the next pass
        self._begin_counts({})

    @property
    def _strategies(self) -> list[TimedLocalSGD]:
        return timed(self._worker)

    def _begin_counts(self, before: dict[str, Any]) -> None:
        """Begin to count a pass; ``before`` is what others have had of it before this worker has come."""
        self._everyone: int = before.get("batches", 0)  # batches of all ranks in the rounds before
        self._pace: float = before.get("pace", 0.0)  # batches of a rank, on the average, in the rounds before

    def begin_pass(self, plan: Plan) -> None:
        """A training loop begins."""
        self._begun, self._over = self._communicator.now(), False
        self._plan, plan.deal = plan, self.deal
        self._origin = self.deal.state() if self.deal is not None else {}
        self._batches = self._samples = 0
        self._begin_counts(self._inherited or {})
        self._inherited = None
        self._worker.training.at_one_place = False

    def begin_step(self, counts: Counts, batches: int, samples: int) -> tuple[int, int]:
        """The loop gets a batch; returns how many batches and samples there have been, as far as this rank knows."""
        self._worker.training.at_one_place = False
        self._batches += 1
        self._samples += counts.here
        self._worker.training.begin_batch(BatchAtWork(counts.here))
        pace = self._pace + self._batches * self._factor
        self._worker.training.loops.pace.follow(min(pace, self._most))
        return self._everyone + self._batches, samples

    def end_step(self, loop: Loop) -> None:
        """A batch is done: end the round, if its time is over; collective then."""
        if not self._over and self._batches and self._communicator.now() - self._begun >= self._strategies[0].seconds:
            # A script that asks ahead of time trains on, also if no batches are left.
            self._end_round(is_out=False, is_done=self._worker.training.loops.is_between)

    def await_more(self, loop: Loop) -> bool:
        """Whether there is another batch for this worker; it takes part in rounds until then, or until all are done."""
        if loop.waits:
            return False
        while not self._over:
            self._wait(is_out=False, rests=True)
            if not self._over and self.deal is not None:
                return True  # if not, the loop asks again
        return False

    def finish(self, plan: Plan, *, is_late: bool) -> bool:
        self._take_part()  # a script that asks ahead of time has trained on its last batches only now
        self._worker.training.loops.pace.complete(self._pace)
        return False  # the rounds have told how many samples there were

    def leave(self, plan: Plan, loop: Loop, *, has_trained: bool) -> Callable[[], None] | None:
        if has_trained:
            return functools.partial(self._take_part, unused=len(loop.untrained))
        self.restore(self._origin)  # the loop was a glance at the data: its batches count as not taken
        return None

    def pause(self) -> None:
        is_done = self._worker.training.loops.is_between
        while not (self._over or self._rest):
            self._wait(is_out=False, is_done=is_done, rests=True)
        self._rest = False

    def place(self) -> Any:
        if self.deal is None:
            return None
        return {"deal": self.deal.place(), "batches": self._everyone, "pace": self._pace}

    def go_on(self, place: dict[str, Any]) -> None:
        assert self.deal is not None
        self.deal.go_on(place["deal"])
        self._inherited = place

    def restore(self, state: dict[str, Any]) -> None:
        if self.deal is not None:
            self.deal.restore(state)

    def look(self) -> None:
        self._worker.training.at_one_place = True
        self._worker.look()

    @property
    def told(self) -> list[int]:
        assert self.deal is not None
        return self.deal.told

    def regroup(self, change: Change) -> None:
        """Deal what is left among the workers that there are now."""
        assert self.deal is not None
        said = zip(change.now, (each["given"].get(str(self._number)) for each in change.said), strict=True)
        self.deal.regroup(change.rank, change.now, {member: told for member, told in said if told is not None})
        self._worker.training.counts.level()

    def _take_part(self, unused: int = 0) -> None:
        """Take part in rounds until all others are done, too; the last ``unused`` batches are for them."""
        while not self._over:
            self._wait(is_out=True, unused=unused)
            unused = 0

    def _wait(self, *, is_out: bool, is_done: bool = True, unused: int = 0, rests: bool = False) -> None:
        """End a round without a batch of this worker, and do what is due after it."""
        self._end_round(is_out=is_out, is_done=is_done, unused=unused, rests=rests)
        self.after_round()
        if not self._over:
            self._worker.look()

    @property
    def _most(self) -> float:
        """Batches of an epoch for each worker, on the average."""
        if self.deal is None:
            return math.inf
        left: int = self.deal.total - self._everyone
        return self._pace + left / self._communicator.size

    def _end_round(self, *, is_out: bool, is_done: bool = True, unused: int = 0, rests: bool = False) -> None:
        """Tell each other how far all are, and average; collective.

        If a worker is lost meanwhile, all that it has done in the round counts, or nothing.

        Args:
            is_out: Whether this worker takes no more batches of this pass.
            is_done: Whether this worker has trained on all batches that its script was given.
            unused: How many of these it has not trained on, and will not.
            rests: Whether this worker waits for others, and trains on later.
        """
        unused += len(self._plan.counts)
        if is_out:
            self._plan.counts.clear()
        drawn = self.deal.drawn if self.deal is not None else self._batches
        mine = [drawn, unused, int(is_out), self._batches, self._samples, self._number, int(is_done), int(rests)]
        told = self._communicator.allgather(torch.tensor(mine)).tolist()
        rows: dict[int, list[int]] = dict(zip(self._communicator.members, told, strict=True))
        if any(row[5] != self._number for row in told):
            raise UsageError(
                "local_sgd(time=…) cannot deal out the batches of several loaders at once, as in zip(): use one, or "
                "local_sgd(period=…)"
            )
        for number, strategy in enumerate(self._strategies):
            strategy.average()
            if number == 0:  # the workers that there are now have counted
                self._count({member: rows[member] for member in self._communicator.members})
        for strategy in self._strategies:
            strategy.end_round()
        self._begun = self._communicator.now()

    def _count(self, rows: dict[int, list[int]]) -> None:
        """The batches of a round have counted, as workers have told."""
        if self.deal is not None:
            self._over = self.deal.end_round({member: row[:3] for member, row in rows.items()})
        else:
            self._over = all(row[2] or not row[3] for row in rows.values())
        is_done = all(row[6] for row in rows.values())
        self._rest = all(row[2] or row[7] for row in rows.values())
        self._over &= is_done
        self._worker.training.at_one_place = is_done and not self._over
        batches, samples = sum(row[3] for row in rows.values()), sum(row[4] for row in rows.values())
        self._worker.training.counts.agree(batches / len(rows), samples - self._samples)
        self._everyone += batches
        self._pace += batches / len(rows)
        if self._batches:
            self._factor = batches / len(rows) / self._batches
        self._batches = self._samples = 0


def timed(worker: Worker) -> list[TimedLocalSGD]:
    """The strategies whose rounds last seconds."""
    return [strategy for strategy in worker.training.strategies if isinstance(strategy, TimedLocalSGD)]
