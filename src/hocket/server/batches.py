"""The shared queue of an epoch's batches: who is ready takes the next, and what a lost worker held is dealt again."""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from hocket.server.waiting import Condition, Note, Wait


@dataclass
class _Epoch:
    number: int = 0
    next: int = 0
    total: int | None = None  # None: until somebody finds the end
    held: dict[int, int] = field(default_factory=dict)  # batch, and the rank that has it
    again: list[int] = field(default_factory=list)  # to be dealt again
    applied: set[int] = field(default_factory=set)  # held, but their gradients are in server 0's parameters


class Batches:
    """Numbers of batches, in the order that all workers know.

    Args:
        condition: Guards everything here.
        timeout: Seconds that one may wait for batches that others hold.
        clock: Tells the time.
    """

    def __init__(
        self, condition: Condition, timeout: float = math.inf, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._condition, self._timeout, self._clock = condition, timeout, clock
        self._now = _Epoch()

    def take(self, rank: int, epoch: int, total: int | None, wait: Note | None = None) -> int | str:
        """The next batch of ``epoch`` for a worker.

        Args:
            rank: Of the worker.
            epoch: That it is in; the first to come begins it.
            total: How many batches the epoch has, if that is known.
            wait: To block while others still hold batches that may come back: is told now and then who they are.

        Returns:
            A number, ``"over"`` when all batches are done, or ``"held"`` when others still hold some.

        Raises:
            DeadlineExceeded: another worker is alive but has kept its batch too long.
        """
        with self._condition:
            if epoch > self._now.number:
                self._now = _Epoch(epoch)
            if epoch == self._now.number and self._now.total is None:
                self._now.total = total
            waiting: Wait | None = None
            while True:
                now = self._now
                if epoch < now.number:
                    return "over"
                if now.again:
                    number = now.again.pop(0)
                elif now.total is None or now.next < now.total:
                    number, now.next = now.next, now.next + 1
                elif others := {holder for holder in now.held.values() if holder != rank}:
                    if wait is None:
                        return "held"
                    waiting = waiting or Wait(self._condition, self._timeout, self._clock, wait, "end a batch")
                    waiting.sleep(sorted(others))
                    continue
                else:
                    return "over"
                now.held[number] = rank
                return number

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
                taken.append(number)
            return sorted(taken)

    @property
    def is_dealt_out(self) -> bool:
        """Whether nobody can take a batch before another one is given back."""
        with self._condition:
            now = self._now
            return not now.again and now.total is not None and now.next >= now.total

    def end(self, epoch: int, total: int) -> None:
        """There are only so many batches."""
        with self._condition:
            if epoch == self._now.number:
                self._now.total = min(total, self._now.total if self._now.total is not None else total)
                self._now.held = {number: rank for number, rank in self._now.held.items() if number < total}
                self._now.again = [number for number in self._now.again if number < total]
                self._condition.notify_all()

    def apply(self, rank: int, numbers: tuple[int, ...]) -> None:
        """The gradients of batches that a worker holds are in the parameters here; other servers may not be so far."""
        with self._condition:
            self._now.applied |= {number for number in numbers if self._now.held.get(number) == rank}

    def finish(self, rank: int, numbers: tuple[int, ...]) -> None:
        """Batches that a worker held are done, on all servers."""
        with self._condition:
            for number in numbers:
                if self._now.held.get(number) == rank:
                    del self._now.held[number]
                    self._now.applied.discard(number)
            self._condition.notify_all()

    def give_back(self, rank: int, numbers: tuple[int, ...]) -> None:
        """Batches that a worker held did not count, and are dealt again."""
        with self._condition:
            for number in numbers:
                if self._now.held.get(number) == rank:
                    del self._now.held[number]
                    self._now.applied.discard(number)
                    self._now.again.append(number)
            self._condition.notify_all()

    def lose(self, rank: int) -> list[int]:
        """A worker has died; the batches that it held, which others get now."""
        with self._condition:
            held = [number for number, holder in self._now.held.items() if holder == rank]
            lost = sorted(set(held) - self._now.applied)
            for number in held:
                del self._now.held[number]
            self._now.applied -= set(held)
            self._now.again = sorted(self._now.again + lost)
            self._condition.notify_all()
            return lost

    def state(self) -> dict[str, Any]:
        """Which batches of which epoch are not done, as plain data."""
        with self._condition:
            now = self._now
            return {"epoch": now.number, "next": now.next, "again": sorted({*now.again, *now.held} - now.applied)}

    def restore(self, state: dict[str, Any]) -> None:
        """Go on from what ``state`` gave; nobody holds anything."""
        with self._condition:
            self._now = _Epoch(int(state["epoch"]), int(state["next"]), None, {}, [int(n) for n in state["again"]])
