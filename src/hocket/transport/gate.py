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
import select
import signal
import socket
import sys
import time
import zlib
from collections.abc import Callable, Sequence

from hocket.errors import DeadlineExceeded, MismatchError, WorkerLost
from hocket.transport import futex
from hocket.transport.area import LINE, Area, aligned

_TEXT = 256  # bytes in which a rank says what it waits in
_SLICE = 0.1  # seconds of sleep between two looks at whether the others live
_NOTICE = 30.0  # seconds between two lines about a slow rank
_STATE, _PID, _TEXT_OF, _GAVE_UP = 1, 2, 3, 4  # words of a rank's line; the first is its sequence number
_RUNNING, _FINISHED, _FAILED = 0, 1, 2

STACK_SIGNAL = signal.SIGRTMIN + 7 if hasattr(signal, "SIGRTMIN") else signal.SIGUSR2
"""Makes a worker print the stacks of all its threads (see ``hocket.job.runtime``)."""

Description = str | Callable[[], str]


def signature(text: str) -> int:
    """A number that differs, almost surely, between two descriptions."""
    return zlib.crc32(text.encode())


def ranks(numbers: Sequence[int]) -> str:
    """``rank 3`` or ``ranks 0, 2, 3``, for messages."""
    return f"rank{'s' if len(numbers) > 1 else ''} {', '.join(map(str, numbers))}"


class Gate:
    """The meeting point of ``size`` ranks, in the first bytes of ``area``."""

    @staticmethod
    def nbytes(size: int) -> int:
        """How large an area the gate of ``size`` ranks needs."""
        return aligned(size * LINE) + aligned(size) + 4 * aligned(size * 8) + size * _TEXT

    def __init__(self, area: Area, rank: int, size: int, timeout: float) -> None:
        self.rank, self.size, self.timeout = rank, size, timeout
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
        self._sequence = 0
        self._spins = 2000 if size <= len(os.sched_getaffinity(0)) else 30
        self._pidfds: dict[int, int] = {}
        self._words[rank * 16 + _PID] = os.getpid()

    def watch_peers(self) -> None:
        """Start to notice the end of peers; after the first meeting, when all have written their pids."""
        for peer in self._peers:
            try:
                self._pidfds[peer] = os.pidfd_open(self._words[peer * 16 + _PID])
            except ProcessLookupError:
                self._pidfds[peer] = -1

    def meet(self, number: int, payload: int, what: Description) -> list[int]:
        """Wait until every rank is here with the same ``number``; return the payloads by rank.

        Raises:
            MismatchError: another rank came with another number.
            WorkerLost: a rank ended before it came.
            DeadlineExceeded: a rank did not come within the timeout.
        """
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
        spins, since = self._spins, 0.0
        for peer in self._peers:
            word = peer * 16
            while words[word] not in here:
                spins -= 1
                if spins < 0:
                    since = since or time.monotonic()
                    self._sleep(peer, here, since, what)
        found = signatures.tolist()
        if found.count(number) != self.size:
            self._disagree(what)
        return payloads.tolist()

    def leave(self, failed: bool) -> None:
        """Tell those who may wait for this rank that its script has ended."""
        self._words[self.rank * 16 + _STATE] = _FAILED if failed else _FINISHED
        while self._pidfds:
            _, pidfd = self._pidfds.popitem()
            if pidfd >= 0:
                os.close(pidfd)

    def _sleep(self, peer: int, here: tuple[int, int], since: float, what: Description) -> None:
        """Until ``peer`` is here; ``since`` is when this rank began to wait for anyone."""
        words, word = self._words, peer * 16
        start = time.monotonic()
        notice = since + _NOTICE * (1 + (start - since) // _NOTICE)
        self._asleep[self.rank] = 1
        try:
            while (seen := words[word]) not in here:
                futex.wait(self._address + peer * LINE, seen, _SLICE)
                now = time.monotonic()
                if now - start >= _SLICE and words[word] not in here:
                    self._check_lost(here, what)
                    if now > notice:
                        notice += _NOTICE
                        self._give_notice(now - since, here, what)
                    if now - since > self.timeout:
                        self._give_up(here, what)
        finally:
            self._asleep[self.rank] = 0
            self.waited += time.monotonic() - start

    def _missing(self, here: tuple[int, int]) -> tuple[list[int], list[int]]:
        missing = [r for r in self._peers if self._words[r * 16] not in here]
        return missing, [r for r in range(self.size) if r not in missing]

    def _check_lost(self, here: tuple[int, int], what: Description) -> None:
        lost = [
            rank
            for rank, pidfd in self._pidfds.items()
            if (self._words[rank * 16 + _STATE] == _FAILED or _has_ended(pidfd)) and self._words[rank * 16] not in here
        ]
        if not lost:
            return
        _, waiting = self._missing(here)
        text = f"{ranks(waiting)} wait{'' if len(waiting) > 1 else 's'} in {_say(what)}"
        finished = [r for r in lost if self._words[r * 16 + _STATE] == _FINISHED]
        if finished:
            raise WorkerLost(
                f"{text}, but {ranks(finished)} finished the script: every rank must take the same number of "
                "steps; iterate over the loader that distribute() returned, and call collectives on all ranks"
            )
        raise WorkerLost(f"{text}, but {ranks(lost)} on {socket.gethostname()} ended before arriving there")

    def _give_notice(self, seconds: float, here: tuple[int, int], what: Description) -> None:
        missing, waiting = self._missing(here)
        if missing and waiting[0] == self.rank:
            print(
                f"hocket: {ranks(waiting)} waited {seconds:.0f} s for {ranks(missing)} (alive) in {_say(what)}; "
                f"giving up after {self.timeout:g} s (--timeout)",
                file=sys.stderr,
                flush=True,
            )

    def _give_up(self, here: tuple[int, int], what: Description) -> None:
        missing, waiting = self._missing(here)
        if all(self._words[rank * 16 + _GAVE_UP] != self._sequence for rank in range(self.size)):
            self._words[self.rank * 16 + _GAVE_UP] = self._sequence
            for rank in range(self.size):
                with contextlib.suppress(ProcessLookupError):
                    os.kill(self._words[rank * 16 + _PID], STACK_SIGNAL)
        time.sleep(1.0)  # let everyone's stack reach the screen before the job ends
        raise DeadlineExceeded(
            f"{ranks(waiting)} waited {self.timeout:g} s in {_say(what)} for {ranks(missing)} on "
            f"{socket.gethostname()}: the stacks above say what each rank does; "
            "if that is honest work, raise --timeout"
        )

    def _disagree(self, what: Description) -> None:
        line = self.rank * 16
        text = _say(what).encode()[:_TEXT]
        self._texts[self.rank * _TEXT : (self.rank + 1) * _TEXT] = text.ljust(_TEXT, b"\0")
        self._words[line + _TEXT_OF] = self._sequence
        deadline = time.monotonic() + 2.0
        said: dict[str, list[int]] = {}
        for rank in range(self.size):
            while self._words[rank * 16 + _TEXT_OF] != self._sequence and time.monotonic() < deadline:
                time.sleep(0.001)
            raw = bytes(self._texts[rank * _TEXT : (rank + 1) * _TEXT])
            said.setdefault(raw.rstrip(b"\0").decode(errors="replace"), []).append(rank)
        raise MismatchError(
            "the ranks do not do the same: "
            + "; ".join(f"{ranks(who)}: {text}" for text, who in said.items())
            + ". All ranks must make the same calls in the same order, with the same shapes and types"
        )


def _say(what: Description) -> str:
    return what if isinstance(what, str) else what()


def _has_ended(pidfd: int) -> bool:
    if pidfd < 0:
        return True
    poller = select.poll()
    poller.register(pidfd, select.POLLIN)
    return bool(poller.poll(0))
