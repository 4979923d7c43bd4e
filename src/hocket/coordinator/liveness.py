"""Who of the workers is alive and who waits where: workers on several hosts ask the coordinator, and tell it.

A worker's question says where the worker waits, if it does, and which news the worker knows. The coordinator answers
when there is other news, or when the worker asks again, which it does twice a second. A connection that ends is the
loss of a worker at once. A host whose kernel does not answer is named soon and given up after a while, so that a cable
may be plugged in again; a process that is busy is never taken for a lost one.
"""

from __future__ import annotations

import dataclasses
import math
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from hocket.coordinator.ledger import FAILED, Ledger
from hocket.errors import JobError
from hocket.transport.waiting import Standing, ranks, say_all
from hocket.transport.wire import Bell, Wire

SILENT_AFTER = 1.5  # seconds without an answer of a host until a line says so
LOST_AFTER = 10.0  # seconds without an answer until a host is given up
ENDED = "ended"
_LOOK = 0.2  # seconds between two looks at all hosts
UNANSWERED = f"did not answer for {LOST_AFTER:.0f} s (the host is down, or the link to it is cut)"


@dataclass(frozen=True)
class News:
    """What all ranks know of each other.

    Attributes:
        number: Rises with every change.
        gone: Ranks that have ended and how, as in the ledger.
        waits: Ranks that wait, and what for.
        mismatch: What the ranks do that wait for each other in vain.
        stacks: How often ranks have asked for everybody's stack.
    """

    number: int = 0
    gone: Sequence[tuple[int, str]] = ()
    waits: Sequence[tuple[int, str]] = ()
    mismatch: str = ""
    stacks: int = 0

    @property
    def lost(self) -> dict[int, str]:
        """Ranks that have died or do not answer, and how."""
        return {rank: how for rank, how in self.gone if how not in ("", FAILED)}

    @property
    def failed(self) -> list[int]:
        """Ranks whose script has raised something, the first one first."""
        return [rank for rank, how in self.gone if how == FAILED]

    @property
    def finished(self) -> list[int]:
        """Ranks whose script has ended well."""
        return sorted(rank for rank, how in self.gone if not how)


class Silence:
    """How long one host has not answered; says when that begins and when it ends."""

    def __init__(self) -> None:
        self._who = ""
        self._say: Callable[[str], None] = lambda _: None
        self._since: float | None = None

    def follow(self, host: str, members: Sequence[int], say: Callable[[str], None]) -> None:
        """The host has this name and these ranks from now on; ``say`` is told a line."""
        self._who, self._say = f"hocket: {host}" + (f" ({ranks(members)})" if members else ""), say

    def is_final(self, seconds: float) -> bool:
        """Take note of how long the host has not answered; returns whether it is given up."""
        if seconds > SILENT_AFTER and self._since is None:
            self._since = time.monotonic() - seconds
            self._say(f"{self._who} does not answer: it is down or its link is cut; giving up after {LOST_AFTER:g} s")
        elif seconds < SILENT_AFTER and self._since is not None:
            self._say(f"{self._who} answers again after {time.monotonic() - self._since:.1f} s")
            self._since = None
        return seconds > LOST_AFTER

    @property
    def is_long(self) -> bool:
        """Whether the kernel may be the first to give the host up, and close the connection."""
        return self._since is not None and time.monotonic() - self._since > LOST_AFTER - 1


class Liveness:
    """The coordinator's part of the watch. Every method may be called by any thread.

    Args:
        ledger: Keeps who has gone.
        timeout: Seconds in which all workers have to come.
        say: Is told a line for the user.

    Attributes:
        wire_of: Finds the connection over which a rank is watched.
        give_up: Told of a rank whose process has ended, in a job that goes on: its other connection ends, too.
    """

    def __init__(self, ledger: Ledger, timeout: float, say: Callable[[str], None]) -> None:
        self._ledger, self._timeout, self._say = ledger, timeout, say
        self.wire_of: Callable[[int], Wire]
        self.give_up: Callable[[int], None] = lambda _: None
        self._changed = threading.Condition()
        self._hosts: dict[int, str] = {}
        self._wires: dict[int, Wire] = {}
        self._bells: dict[int, Bell] = {}
        self._knows: dict[int, int] = {}  # which news each rank has
        self._waits: dict[int, Standing] = {}
        self._stacks: dict[int, int] = {}
        self._silences: dict[str, Silence] = {}
        self._number, self._mismatch, self._looked = 0, "", 0.0
        self._decides = True  # who is lost: else a connection may end, and the job finds out by itself

    def welcome(self, rank: int, host: str, *, goes_on: bool = False) -> None:
        """A worker has come, from ``host``; blocks until all have, since all may wait for each other from then on.

        Where the job ``goes_on`` with other workers, nobody waits here: who is there is found out elsewhere.

        Raises:
            JobError: not all came in time.
        """
        with self._changed:
            self._hosts[rank], self._decides = host, not goes_on
            self._changed.notify_all()
            have_come = goes_on or self._changed.wait_for(
                lambda: len(self._hosts) == self._ledger.workers, self._timeout
            )
            if not have_come:
                absent = [each for each in range(self._ledger.workers) if each not in self._hosts]
                raise JobError(
                    f"{ranks(absent)} did not reach hocket.init() within {self._timeout:g} s: see their output"
                )

    def answer(self, rank: int, head: dict[str, Any]) -> dict[str, Any]:
        """Hear a worker, and tell it the news; nothing if there is none until the worker says something else."""
        known = int(head["known"])
        with self._changed:
            wire = self._wires[rank] = self.wire_of(rank)
            self._hear(rank, known, head)
            self._look_for_silence()
            waits = self._number == known and not head["left"]
            bell = self._bells[rank] = Bell()
        try:
            if waits:
                wire.wait(bell, LOST_AFTER)
        finally:
            with self._changed:
                del self._bells[rank]
                bell.close()
        with self._changed:
            return {} if self._number == known else dataclasses.asdict(self._news())

    def lose(self, rank: int) -> None:
        """The connection of a worker has ended: unless the worker has told its end, it is lost."""
        if not self._decides:
            self.give_up(rank)
        with self._changed:
            self._wires.pop(rank, None)
            self._looked = 0.0
            self._look_for_silence()
            silence = self._silences.get(self._hosts[rank])
            self._end([rank], UNANSWERED if silence is not None and silence.is_long else ENDED)
            self._changed.notify_all()

    def let_know(self, seconds: float) -> None:
        """Wait until all ranks that are still here know the news, or until the timeout."""
        with self._changed:
            self._changed.wait_for(
                lambda: all(self._knows.get(rank) == self._number for rank in self._hosts.keys() - self._ledger.gone),
                seconds,
            )

    # The methods below are called with the lock held.

    def _news(self) -> News:
        waits = [(rank, wait.text) for rank, wait in self._waits.items()]
        gone = list(self._ledger.gone.items())
        return News(self._number, gone, waits, self._mismatch, sum(self._stacks.values()))

    def _hear(self, rank: int, known: int, head: dict[str, Any]) -> None:
        self._knows[rank] = known
        self._changed.notify_all()
        if head["left"]:
            self._end([rank], FAILED if head["left"] == FAILED else "")
        if rank in self._ledger.gone or not self._ledger.knows(rank):  # a newcomer is nobody yet
            return
        wait, stacks = head["wait"], int(head["stacks"])
        standing = None
        if wait is not None:
            lane, counts, text, generation = wait
            begun = {str(name): int(count) for name, count in counts.items()}
            standing = Standing(str(lane), begun, str(text), int(generation))
        if (standing, stacks) == (self._waits.get(rank), self._stacks.get(rank, 0)):
            return
        self._stacks[rank] = stacks
        if standing is None:
            self._waits.pop(rank, None)
        else:
            self._waits[rank] = standing
            self._look_for_mismatch(standing)
        self._ring()

    def _end(self, members: Sequence[int], how: str) -> None:
        news = [rank for rank in members if (self._ledger.lose(rank, how) if self._decides else rank in self._waits)]
        for rank in news:
            self._waits.pop(rank, None)
        if news:
            self._ring()

    def _ring(self) -> None:
        """Wake all who wait: there is other news."""
        self._number += 1
        for bell in self._bells.values():
            bell.ring()

    def _look_for_silence(self) -> None:
        """Look, now and then, whether hosts have fallen silent; any worker's question leads to it."""
        if time.monotonic() < self._looked + _LOOK:
            return
        self._looked = time.monotonic()
        found: dict[str, float] = {}
        live = self._ledger.live
        for rank, wire in self._wires.items():
            if rank in live:
                found[self._hosts[rank]] = min(wire.silence(), found.get(self._hosts[rank], math.inf))
        for host, seconds in found.items():
            members = [rank for rank in live if self._hosts.get(rank) == host]
            silence = self._silences.setdefault(host, Silence())
            silence.follow(host, members, self._say)
            if silence.is_final(seconds):
                self._end(members, UNANSWERED)

    def _look_for_mismatch(self, new: Standing) -> None:
        """Find out whether two ranks wait for each other in different collectives: neither will ever arrive."""
        if not self._mismatch and any(new.waits_in_vain(other) for other in self._waits.values()):
            self._mismatch = say_all(self._waits)
