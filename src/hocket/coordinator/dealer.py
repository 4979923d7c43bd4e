"""Deals out the batches of an epoch: a ready worker takes the next, and batches of a lost worker are dealt again.

Where workers are in step, each has numbers of its own instead: rank r of P has r, r + P, r + 2P … Batches of workers
that are lost, or have left the loop, go to workers that have done all of their own. A newcomer in the place of a lost
worker goes on where the others are; what that worker has left behind is for all, at the end. A newcomer beyond the
first workers gets its part from the end of the epoch.

A batch is done when its worker says so. A worker with parameter servers may die between its push and that word, so
whoever tells of a loss, or asks for the state, says which batches the servers have: those are not dealt again.
"""

from __future__ import annotations

import math
import time
from collections import Counter
from collections.abc import Callable, Collection
from dataclasses import dataclass, field
from typing import Any

from hocket.transport.waiting import Condition, Note, Wait


@dataclass
class _Epoch:
    number: int = 0
    next: int = 0
    total: int | None = None  # batches of the epoch; None until a worker finds the end
    held: dict[int, int] = field(default_factory=dict)  # the rank that has each batch
    kept: set[int] = field(default_factory=set)  # batches of lost workers that the servers have
    orphans: set[int] = field(default_factory=set)  # batches of lost workers that nobody has had since
    again: list[int] = field(default_factory=list)  # batches to be dealt again
    ranks: int = 0  # how many workers are in step; 0 if they are not in step
    ahead: dict[int, int] = field(default_factory=dict)  # the next of each rank's own numbers
    got: Counter[int] = field(default_factory=Counter)  # how many numbers each rank has had
    gone: set[int] = field(default_factory=set)  # ranks that are lost, or have left the loop
    lost: set[int] = field(default_factory=set)  # the ones among them that are lost
    helpers: set[int] = field(default_factory=set)  # ranks that have done all numbers of their own
    rest: list[int] = field(default_factory=list)  # numbers that were somebody's own, and are for all now
    limit: int | None = None  # where numbers of one's own end, if not at the end of the epoch
    promised: dict[int, int] = field(default_factory=dict)  # a batch that each newcomer holds and has not asked for yet
    suspects: set[int] = field(default_factory=set)  # batches that the worker had which has died last
    fatal: set[int] = field(default_factory=set)  # batches that two workers had which have died in a row
    waiting: set[int] = field(default_factory=set)  # ranks that wait for a batch, perhaps with some to train on yet
    behind: Counter[int] = field(default_factory=Counter)  # how many fewer numbers newcomers had when they came

    @property
    def missed(self) -> int:
        """How many batches of lost workers are left of an epoch that is over but for these."""
        left = {*self.again, *self.rest, *self.held}
        return len(self.orphans) if self.orphans and left <= self.orphans else 0

    def own(self, rank: int) -> int:
        """The next of a rank's own numbers; it may be beyond the last batch."""
        return self.ahead.get(rank, rank)

    def has(self, number: int) -> bool:
        return self.total is None or number < self.total

    def is_own(self, number: int) -> bool:
        """Whether a number that is some rank's own still is."""
        return self.has(number) and (self.limit is None or number < self.limit)

    def has_own(self, rank: int) -> bool:
        """Whether a rank has numbers left that are for it first."""
        return self.is_own(self.own(rank)) if rank < self.ranks else bool(self.rest)

    def catch_up(self, rank: int, others: Collection[int]) -> None:
        """Have a newcomer go on where the slowest of ``others`` is: what it would have had before is for all."""
        front = [self.own(each) // self.ranks for each in others if each < self.ranks and each not in self.gone]
        place = rank + self.ranks * min(front, default=0)
        if rank < self.ranks and place > self.own(rank):
            mine = [number for number in self.again if number % self.ranks == rank]
            self.again = [number for number in self.again if number % self.ranks != rank]
            passed = filter(self.is_own, range(self.own(rank), place, self.ranks))
            self.rest = sorted([*self.rest, *mine, *passed])
            self.ahead[rank] = place
        self.behind[rank] = max((self.got[each] + self.behind[each] for each in others), default=0) - self.got[rank]

    def share_with(self, more: int) -> None:
        """Leave the part of one more worker, beyond the first ``ranks``, of what is left: the last numbers."""
        end = self.total if self.limit is None else self.limit
        if end is None:
            return
        own = [number for rank in range(self.ranks) for number in range(self.own(rank), end, self.ranks)]
        part = sorted(own)[len(own) - len(own) // (self.ranks + more) :]
        if part:
            self.limit, self.rest = part[0], sorted([*self.rest, *part])


class Dealer:
    """Deals out the numbers of one loader's batches, in the order that all workers know.

    Args:
        condition: Guards everything here.
        live: The ranks that are in the job now.
        timeout: Seconds that a worker may wait for batches that others hold.
        clock: Tells the time.
        say: Prints a line.
    """

    def __init__(
        self,
        condition: Condition,
        live: Callable[[], Collection[int]],
        timeout: float = math.inf,
        clock: Callable[[], float] = time.monotonic,
        say: Callable[[str], None] = lambda _: None,
    ) -> None:
        self._condition, self._timeout, self._clock, self._say = condition, timeout, clock, say
        self._now, self._live = _Epoch(), live
        self._totals: dict[int, int | None] = {}  # batches of each epoch before this one

    def take(self, rank: int, epoch: int, total: int | None, wait: Note | None = None, ranks: int = 0) -> int | str:
        """The next batch of ``epoch`` for a worker.

        Args:
            rank: The rank of the worker.
            epoch: The epoch that the worker is in; the first worker to come begins it.
            total: How many batches the epoch has, if that is known.
            wait: Given to block while other workers hold batches that may come back; is told now and then who they are.
            ranks: How many workers there are, if they are in step.

        Returns:
            A number, ``"over"`` when all batches are done, or ``"held"`` when others still hold some.

        Raises:
            DeadlineExceeded: another worker is alive but has kept its batch too long.
        """
        with self._condition:
            if epoch > self._now.number:
                self.tell_missed()
                self._totals[self._now.number] = self._now.total
                self._now = _Epoch(epoch)
            if epoch == self._now.number:
                self._enter(rank, total, ranks, helps=wait is not None)
            try:
                return self._await(rank, epoch, wait)
            finally:
                self._now.waiting.discard(rank)

    def _await(self, rank: int, epoch: int, wait: Note | None) -> int | str:
        waiting: Wait | None = None
        while True:
            now = self._now
            if epoch < now.number:
                return "over"
            if rank in now.promised:
                return now.promised.pop(rank)
            if (number := self._pick(rank)) is not None:
                now.held[number] = rank
                now.orphans.discard(number)
                now.got[rank] += 1
                return number
            if not (others := self._others(rank)):
                return "over"
            if wait is None:
                return "held"
            if waiting is None:
                waiting = Wait(self._condition, self._timeout, self._clock, wait, "end a batch")
                now.waiting.add(rank)
                self._condition.notify_all()  # once: those who wait for each other would wake each other without end
            waiting.sleep(others)

    def _enter(self, rank: int, total: int | None, ranks: int, *, helps: bool) -> None:
        now = self._now
        if now.total is None:
            now.total = total
        if ranks and not now.ranks:
            now.ranks, now.lost = ranks, set(range(ranks)) - set(self._live())
            now.gone |= now.lost
            for more, _ in enumerate(each for each in self._live() if each >= ranks):
                now.share_with(more + 1)
        now.gone.discard(rank)
        if helps:
            now.helpers.add(rank)

    def admit(self, rank: int, epoch: int) -> bool:
        """A newcomer takes part in ``epoch``, as rank ``rank``, and goes on where the others are.

        It holds a batch from the beginning, so that it has one. If there is none, it cannot come in; returns whether it
        can.
        """
        with self._condition:
            now = self._now
            if epoch != now.number:
                return False
            if now.ranks:
                others = [each for each in self._live() if each != rank]
                now.catch_up(rank, others)
                if rank >= now.ranks:
                    now.share_with(1 + sum(each >= now.ranks for each in others))
            if (number := self._pick(rank)) is None:
                return False
            now.held[number], now.promised[rank] = rank, number
            now.orphans.discard(number)
            now.got[rank] += 1
            now.gone.discard(rank)
            now.helpers.discard(rank)
            return True

    def _pick(self, rank: int) -> int | None:
        """The number of a batch that a worker can have now."""
        now = self._now
        if not now.ranks:
            if now.again:
                return now.again.pop(0)
            if now.has(now.next):
                now.next += 1
                return now.next - 1
            return None
        is_more = rank >= now.ranks  # all that it can have is what is for all
        helps = rank in now.helpers or bool(now.lost)  # after a loss at once, so that those who are left stay in step
        helps |= is_more or now.limit is not None
        found = [number for number in now.again if number % now.ranks == rank]
        owners = [rank, *(sorted(now.gone - {rank}, key=now.own) if helps else ())]
        if not found and helps and (is_more or not now.has_own(rank)):
            found = now.again or now.rest
        if found:
            (now.again if found is not now.rest else now.rest).remove(number := found[0])
            return number
        for owner in owners:
            if owner < now.ranks and now.is_own(number := now.own(owner)):
                now.ahead[owner] = number + now.ranks
                return number
        return None

    def _others(self, rank: int) -> list[int]:
        """The ranks for whose batches a worker has to wait, because the batches may come back."""
        now = self._now
        found = {*now.held.values()} | {r for r in range(now.ranks) if r not in now.gone and now.has_own(r)}
        return sorted(found - {rank} - now.waiting)

    def pace(self, rank: int) -> tuple[int, float] | None:
        """Where workers are in step: batches that one worker has had, and the average over all workers.

        Workers that are in their own numbers are equally far. Those that take the batches of others may not be: only
        what they have done counts, so that no schedule gets ahead of the training.
        """
        with self._condition:
            now = self._now
            if not now.ranks:
                return None
            own, everyone = now.got[rank], 0
            holders = Counter(now.held.values())
            for each in {*range(now.ranks), *now.got}:
                there = own + now.behind[rank] - now.behind[each]  # if they are in step
                if each in now.gone - {rank}:
                    everyone += now.got[each]
                elif each == rank or not now.gone or now.has_own(each):
                    everyone += there
                else:
                    everyone += min(there, now.got[each] - holders[each])
            return own, min(everyone, everyone if now.total is None else now.total) / now.ranks

    def total(self, epoch: int) -> int | None:
        """How many batches an epoch has, or had: when it is over, all workers together have had as many."""
        with self._condition:
            return self._now.total if epoch == self._now.number else self._totals.get(epoch)

    def take_more(self, rank: int, epoch: int, count: int, workers: int) -> list[int]:
        """Up to ``count`` more batches for a worker that just took one; fewer towards the end, so that none is idle.

        Half of what would be its part of the rest, if all of the ``workers`` were equally fast (guided
        self-scheduling, Polychronopoulos and Kuck 1987).
        """
        with self._condition:
            now = self._now
            if epoch != now.number or now.total is None:
                return []
            left = len(now.again) + now.total - now.next
            taken = []
            for _ in range(min(count, left // (2 * max(workers, 1)))):
                if now.again:
                    number = now.again.pop(0)
                else:
                    number, now.next = now.next, now.next + 1
                now.held[number] = rank
                now.orphans.discard(number)
                taken.append(number)
            return sorted(taken)

    @property
    def is_dealt_out(self) -> bool:
        """Whether nobody can take a batch before another one is given back."""
        with self._condition:
            now = self._now
            return not now.again and now.total is not None and now.next >= now.total

    def end(self, epoch: int, total: int) -> None:
        """The epoch has only ``total`` batches."""
        with self._condition:
            if epoch == self._now.number:
                self._now.total = min(total, self._now.total if self._now.total is not None else total)
                self._now.held = {number: rank for number, rank in self._now.held.items() if number < total}
                self._now.again = [number for number in self._now.again if number < total]
                self._now.rest = [number for number in self._now.rest if number < total]
                self._condition.notify_all()

    def finish(self, rank: int, numbers: tuple[int, ...]) -> None:
        """Batches that a worker held are done, on all servers."""
        with self._condition:
            for number in numbers:
                if self._now.held.get(number) == rank:
                    del self._now.held[number]
            self._condition.notify_all()

    def give_back(self, rank: int, numbers: tuple[int, ...]) -> None:
        """Batches that a worker held did not count, and are dealt again."""
        with self._condition:
            for number in numbers:
                if self._now.held.get(number) == rank:
                    del self._now.held[number]
                    self._now.again = sorted([*self._now.again, number])
                    self._now.got[rank] -= 1
            self._condition.notify_all()

    def tell_missed(self) -> None:
        """The epoch is over: say whether batches of lost workers came back when nobody asked for any more."""
        if missed := self._now.missed:
            text = "batches of lost workers: the others had asked for their last ones before"
            self._say(f"hocket: in epoch {self._now.number} nobody has trained on {missed} {text}")
            self._now.orphans.clear()

    def leave(self, rank: int, epoch: int) -> None:
        """A worker has left the loop over ``epoch``: what it would have had is for others, unless it comes back."""
        with self._condition:
            if epoch == self._now.number:
                self._now.gone.add(rank)
                self._now.helpers.discard(rank)
                self._condition.notify_all()

    @property
    def epoch(self) -> int:
        """The epoch whose batches are dealt out now."""
        return self._now.number

    def held(self, rank: int | None = None) -> list[int]:
        """Batches that a worker has taken and not done; without a rank, of all workers, and those that servers kept."""
        with self._condition:
            kept = self._now.kept if rank is None else ()
            return sorted([*kept, *(number for number, holder in self._now.held.items() if rank in (None, holder))])

    @property
    def fatal(self) -> list[int]:
        """Batches of this epoch that two workers had which have died in a row: it may be the batch that kills them."""
        with self._condition:
            return sorted(self._now.fatal)

    def lose(self, rank: int, kept: Collection[int] = (), *, has_died: bool = True) -> list[int]:
        """A worker has died or finished; returns the batches that it held, which other workers get now.

        Args:
            rank: The rank of the worker.
            kept: Batches of this epoch that count although their worker has not said so: the servers have them.
            has_died: Whether the worker has died.
        """
        with self._condition:
            held = [number for number, holder in self._now.held.items() if holder == rank]
            lost = sorted(set(held) - set(kept))
            if has_died and (begun := set(lost) - {self._now.promised.get(rank)}):
                self._now.fatal |= begun & self._now.suspects
                self._now.suspects = begun
            for number in held:
                del self._now.held[number]
            self._now.kept |= set(held) - set(lost)
            self._now.again = sorted(self._now.again + lost)
            self._now.orphans |= set(lost) if has_died else set()
            self._now.got[rank] -= len(lost)
            self._now.promised.pop(rank, None)
            self._now.gone.add(rank)
            self._now.lost.add(rank)
            self._condition.notify_all()
            return lost

    def state(self, applied: Collection[int] = ()) -> dict[str, Any]:
        """Which batches of which epoch are not done, as plain data.

        Args:
            applied: Batches of this epoch that are in the servers' parameters, even if their workers have not said so.
        """
        with self._condition:
            now = self._now
            next_one, again = now.next, {*now.again, *now.rest, *now.held, *now.kept} - set(applied)
            reached = [now.own(rank) for rank in range(now.ranks)]
            if now.limit is not None:
                assert now.total is not None
                next_one = now.total
                again |= {n for n in range(min(reached), now.limit) if n >= reached[n % now.ranks]}
            elif now.ranks:
                next_one = max(max(reached) - now.ranks + 1, 0)
                again |= {n for n in range(min(reached), next_one) if n >= reached[n % now.ranks]}
            return {"epoch": now.number, "next": next_one, "again": sorted(filter(now.has, again))}

    def restore(self, state: dict[str, Any]) -> None:
        """Go on from what ``state`` gave; nobody holds anything."""
        with self._condition:
            again = [int(number) for number in state["again"]]
            self._now = _Epoch(int(state["epoch"]), int(state["next"]), again=again)
