"""A barrier in shared memory at which ranks also compare what they came for.

Each rank owns one cache line with a sequence number that only it writes. To meet, a rank writes its signature
and payload, then its next number, and waits until everyone else has that number: a few hundred looks, then a
futex. Signatures and payloads alternate between two tables, so that a fast rank at the next meeting does not
overwrite what a slow one still reads.

Waiting is woken by the loss of a peer and has a deadline; a peer that is alive but slow is named now and then.
"""

from __future__ import annotations

import contextlib
import os
import secrets
import select
import signal
import socket
import time
import zlib
from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple, Protocol

from hocket import spans
from hocket.errors import DeadlineExceeded, MismatchError, WorkerLost
from hocket.transport import futex
from hocket.transport.area import LINE, Area, aligned
from hocket.transport.waiting import Description, Patience, give_notice, ranks, say

_TEXT = 256  # bytes in which a rank says what it waits in
_SECRET = 32
_SLICE = 0.1  # seconds of sleep between two looks at whether the others live
_STATE, _PID, _TEXT_OF, _GAVE_UP, _PARTED = 1, 2, 3, 4, 5  # words of a rank's line; the first is its sequence number
_RUNNING, _FINISHED, _FAILED = 0, 1, 2

STACK_SIGNAL = signal.SIGRTMIN + 7 if hasattr(signal, "SIGRTMIN") else signal.SIGUSR2
"""Makes a worker print the stacks of all its threads (see ``hocket.job.worker``)."""

FINISHED = (
    "finished the script: every rank must take the same number of steps; iterate over the loader that distribute() "
    "returned, and call collectives on all ranks"
)
"""What is said of ranks that others wait for in vain."""


def signature(text: str) -> int:
    """A number that differs, almost surely, between two descriptions."""
    return zlib.crc32(text.encode())


class Waiting(NamedTuple):
    """A wait for other ranks: what it is for, how long it may take, and who has come."""

    what: Description
    patience: Patience
    arrived: Callable[[int], bool]


class Outlook(Protocol):
    """What ranks that wait at a gate know of ranks on other hosts, if there are any."""

    def look(self, what: Description, patience: Patience) -> None:
        """Called now and then during a wait; raises if the wait is in vain or past its deadline."""

    def rest(self) -> None:
        """The wait is over."""

    def explain(self, error: Exception, what: Description) -> Exception:
        """The cause of the loss of a rank at this gate, which may be another rank on another host."""


class Gate:
    """The meeting point of ``size`` ranks, in the first bytes of ``area``.

    Attributes:
        numbers: The number of each rank in messages: its rank in the job, where the group is one host of several.
        outlook: The outlook on other hosts, if there are any; it is told of waits, and minds the deadline.
    """

    @staticmethod
    def nbytes(size: int) -> int:
        """How large an area the gate of ``size`` ranks needs."""
        return aligned(size * LINE) + aligned(size) + 4 * aligned(size * 8) + size * _TEXT + _SECRET

    def __init__(self, area: Area, rank: int, size: int, timeout: float) -> None:
        self.rank, self.size, self.timeout = rank, size, timeout
        self.numbers = list(range(size))
        self.outlook: Outlook | None = None
        self.waited = 0.0  # seconds slept at meetings so far
        self._peers = [r for r in range(size) if r != rank]
        self._area, self._address = area, area.address()
        lines, flags, table = aligned(size * LINE), aligned(size), aligned(size * 8)
        self._words = area.words[:lines].cast("I")
        self._asleep = area.words[lines : lines + size]
        self._nobody = bytes(size)
        tables = [
            area.words[start : start + 8 * size].cast("q")
            for start in range(lines + flags, lines + flags + 4 * table, table)
        ]
        self._signatures, self._payloads = tables[:2], tables[2:]
        self._texts = area.words[lines + flags + 4 * table :]
        if rank == 0:
            self._texts[size * _TEXT :][:_SECRET] = secrets.token_bytes(_SECRET)
        self._sequence = 0
        self._spins = 2000 if size <= len(os.sched_getaffinity(0)) else 30
        self._pidfds: dict[int, int] = {}
        self._words[rank * 16 + _PID] = os.getpid()

    def watch_peers(self, processes: Sequence[int] | None = None) -> None:
        """Start to notice the end of peers.

        Args:
            processes: The process of each rank; if not given, all ranks have met, and have written it down.
        """
        for peer in self._peers:
            try:
                self._pidfds[peer] = os.pidfd_open(
                    self._words[peer * 16 + _PID] if processes is None else processes[peer]
                )
            except ProcessLookupError:
                self._pidfds[peer] = -1

    def meet(self, number: int, payload: int, what: Description) -> list[int]:
        """Wait until every rank is here with the same ``number``; return the payloads by rank.

        Raises:
            MismatchError: another rank came with another number.
            WorkerLost: a rank ended before it came.
            DeadlineExceeded: a rank did not come within the timeout.
        """
        begin = time.perf_counter() if spans.are_kept() else 0.0
        self._sequence = sequence = (self._sequence + 1) & 0xFFFFFFFF
        words, rank, table = self._words, self.rank, sequence & 1
        signatures, payloads = self._signatures[table], self._payloads[table]
        signatures[rank] = number
        payloads[rank] = payload
        words[rank * 16] = sequence
        futex.fence()
        if self._asleep.tobytes() != self._nobody:
            futex.wake(self._address + rank * LINE)
        # A peer is here when its number is ours, or one further: it may already have met us and gone on.
        here = (sequence, (sequence + 1) & 0xFFFFFFFF)
        spins, waiting = self._spins, None
        for peer in self._peers:
            word = peer * 16
            while words[word] not in here:
                spins -= 1
                if spins < 0:
                    waiting = waiting or Waiting(what, Patience(self.timeout), lambda r: words[r * 16] in here)
                    self.sleep(peer, waiting, words, self._address, self._asleep)
        if begin:
            spans.add(spans.WAIT, spans.MEETING, begin, time.perf_counter(), number=sequence)
        found = signatures.tolist()
        if found.count(number) != self.size:
            self._disagree(what)
        return payloads.tolist()

    @property
    def secret(self) -> bytes:
        """What only the ranks that have met here know."""
        return bytes(self._texts[self.size * _TEXT :][:_SECRET])

    def process_of(self, rank: int) -> int:
        """The process of a rank."""
        return int(self._words[rank * 16 + _PID])

    def has_ended(self, rank: int) -> bool:
        """Whether the process of a peer has ended."""
        return rank in self._pidfds and _has_ended(self._pidfds[rank])

    def has_left(self, rank: int) -> bool:
        """Whether a peer has said that its script has ended, or has ended without a word."""
        return bool(self._words[rank * 16 + _STATE] != _RUNNING) or self.has_ended(rank)

    def has_finished(self, rank: int) -> bool:
        """Whether a peer has said that its script has ended well."""
        return bool(self._words[rank * 16 + _STATE] == _FINISHED)

    def has_died(self, rank: int) -> bool:
        """Whether the process of a peer has ended without a word."""
        return self.has_ended(rank) and self._words[rank * 16 + _STATE] == _RUNNING

    def part(self) -> None:
        """Tell ranks that wait for this rank that it has noticed a loss, and comes no more.

        They do not notice it themselves if the rank that has died arrived where they wait.
        """
        self._words[self.rank * 16 + _PARTED] = 1

    def has_parted(self, rank: int) -> bool:
        """Whether a peer has noticed a loss, and comes no more."""
        return bool(self._words[rank * 16 + _PARTED])

    def leave(self, failed: bool) -> None:
        """Tell ranks that may wait for this rank that its script has ended."""
        self._words[self.rank * 16 + _STATE] = _FAILED if failed else _FINISHED
        while self._pidfds:
            _, pidfd = self._pidfds.popitem()
            if pidfd >= 0:
                os.close(pidfd)

    def sleep(self, peer: int, waiting: Waiting, words: memoryview, address: int, asleep: memoryview) -> None:
        """Sleep until ``peer`` has arrived.

        Args:
            peer: The rank to wait for.
            waiting: What this rank waits for, and how long.
            words: One line per rank, which begins with the number that the rank changes when it arrives.
            address: Where the lines are.
            asleep: One byte per rank: whether it sleeps, so that a rank that changes its number knows to wake others.
        """
        word, arrived = peer * 16, waiting.arrived
        start = time.monotonic()
        asleep[self.rank] = 1
        futex.fence()
        try:
            while True:
                seen = words[word]
                if arrived(peer):
                    break
                futex.wait(address + peer * LINE, seen, _SLICE)
                if time.monotonic() - start >= _SLICE and not arrived(peer):
                    self._check_lost(waiting)
                    if self.outlook is not None:
                        self.outlook.look(waiting.what, waiting.patience)
                        continue
                    if waiting.patience.is_notice_due():
                        self._give_notice(waiting)
                    if waiting.patience.is_over:
                        self._give_up(waiting)
        finally:
            asleep[self.rank] = 0
            if self.outlook is not None:
                self.outlook.rest()
            self.waited += time.monotonic() - start

    def _missing(self, waiting: Waiting) -> tuple[list[int], list[int]]:
        missing = [r for r in self._peers if not waiting.arrived(r)]
        return missing, [r for r in range(self.size) if r not in missing]

    def _say_ranks(self, local: Sequence[int]) -> str:
        return ranks([self.numbers[r] for r in local])

    def _check_lost(self, waiting: Waiting) -> None:
        missing = [rank for rank in self._pidfds if not waiting.arrived(rank)]
        words = self._words
        lost = [r for r in missing if words[r * 16 + _STATE] == _FAILED or _has_ended(self._pidfds[r])]
        parted = [r for r in missing if self.has_parted(r)]
        if not lost and not parted:
            return
        _, here = self._missing(waiting)
        text = f"{self._say_ranks(here)} wait{'' if len(here) > 1 else 's'} in {say(waiting.what)}"
        finished = [r for r in lost if words[r * 16 + _STATE] == _FINISHED]
        if finished:
            error = WorkerLost(f"{text}, but {self._say_ranks(finished)} {FINISHED}")
        elif not lost:
            error = WorkerLost(f"{text}, but {self._say_ranks(parted)} noticed a loss before arriving there")
            error.died = True
        else:
            where = socket.gethostname()
            error = WorkerLost(f"{text}, but {self._say_ranks(lost)} on {where} ended before arriving there")
            error.died = all(words[rank * 16 + _STATE] == _RUNNING for rank in lost)
        raise error if self.outlook is None else self.outlook.explain(error, waiting.what)

    def _give_notice(self, waiting: Waiting) -> None:
        missing, here = self._missing(waiting)
        if missing and here[0] == self.rank:
            waiters, others = ([self.numbers[rank] for rank in each] for each in (here, missing))
            give_notice(waiters, others, waiting.patience.seconds, waiting.what, self.timeout)

    def _give_up(self, waiting: Waiting) -> None:
        missing, here = self._missing(waiting)
        if all(self._words[rank * 16 + _GAVE_UP] != self._sequence for rank in range(self.size)):
            self._words[self.rank * 16 + _GAVE_UP] = self._sequence
            for rank in range(self.size):
                with contextlib.suppress(ProcessLookupError):
                    os.kill(self._words[rank * 16 + _PID], STACK_SIGNAL)
        time.sleep(1.0)  # let everyone's stack reach the screen before the job ends
        raise DeadlineExceeded(
            f"{self._say_ranks(here)} waited {self.timeout:g} s in {say(waiting.what)} for "
            f"{self._say_ranks(missing)} on {socket.gethostname()}: the stacks above say what each rank does; "
            "if that is honest work, raise --timeout"
        )

    def _disagree(self, what: Description) -> None:
        line = self.rank * 16
        text = say(what).encode()[:_TEXT]
        self._texts[self.rank * _TEXT : (self.rank + 1) * _TEXT] = text.ljust(_TEXT, b"\0")
        self._words[line + _TEXT_OF] = self._sequence
        deadline = time.monotonic() + 2.0
        said: dict[str, list[int]] = {}
        for rank in range(self.size):
            while self._words[rank * 16 + _TEXT_OF] != self._sequence and time.monotonic() < deadline:
                time.sleep(0.001)
            raw = bytes(self._texts[rank * _TEXT : (rank + 1) * _TEXT])
            said.setdefault(raw.rstrip(b"\0").decode(errors="replace"), []).append(rank)
        raise disagreement({text: [self.numbers[rank] for rank in who] for text, who in said.items()})


def disagreement(said: Mapping[str, Sequence[int]]) -> MismatchError:
    """The error of ranks that came to one meeting for different things: ``said`` maps each to its ranks."""
    return MismatchError(
        "the ranks do not do the same: "
        + "; ".join(f"{ranks(who)}: {text}" for text, who in said.items())
        + ". All ranks must make the same calls in the same order, with the same shapes and types"
    )


def _has_ended(pidfd: int) -> bool:
    if pidfd < 0:
        return True
    poller = select.poll()
    poller.register(pidfd, select.POLLIN)
    return bool(poller.poll(0))
