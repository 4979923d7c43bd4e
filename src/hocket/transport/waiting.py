"""Waiting for others: with a line now and then that names them, and not for ever."""

from __future__ import annotations

import math
import os
import signal
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol, runtime_checkable

from hocket.errors import DeadlineExceeded

NOTICE = 30.0
"""Seconds between two lines about those that others wait for, everywhere."""

LOOK = 0.2
"""Seconds between two looks whether whoever has made a request still waits for the answer."""

Description = str | Callable[[], str]
"""What somebody waits in; it is put into words only if it has to be said."""


class Note(Protocol):
    """Told, while a request waits for other workers, which of them it waits for, and for how long."""

    def __call__(self, ranks: list[int], seconds: float, /) -> None: ...


@runtime_checkable
class Asker(Note, Protocol):
    """Whoever has made a request, and may be killed before it is answered: nobody may wait in its name then."""

    def look(self) -> None:
        """Raise an error if the one who waits for the answer is gone for good."""
        ...


class Condition(Protocol):
    """The methods that ``threading.Condition`` and ``SimulatedCondition`` share, for code that serves both."""

    def __enter__(self) -> bool: ...
    def __exit__(self, kind: Any, error: Any, trace: Any, /) -> None: ...
    def wait(self, timeout: float | None = None) -> bool: ...
    def wait_for(self, predicate: Callable[[], bool], timeout: float | None = None) -> bool: ...
    def notify_all(self) -> None: ...


class Patience:
    """How long somebody has waited, when to say so, and when to give up; the wait begins now.

    Args:
        timeout: Seconds that the wait may take.
        clock: Tells the time.
    """

    def __init__(self, timeout: float, clock: Callable[[], float] = time.monotonic) -> None:
        self._timeout, self._clock = timeout, clock
        self._begin, self._told = clock(), 0.0

    @property
    def seconds(self) -> float:
        """How long the wait has taken so far."""
        return self._clock() - self._begin

    @property
    def is_over(self) -> bool:
        """Whether the wait has taken too long."""
        return self.seconds >= self._timeout

    @property
    def left(self) -> float:
        """Seconds until there is something to say, or to give up."""
        return min(self._timeout, self._told + NOTICE) - self.seconds

    def is_notice_due(self) -> bool:
        """Whether to say now who is waited for; once for each time."""
        waited = self.seconds
        if waited - self._told < NOTICE:
            return False
        self._told = waited
        return True


class Wait:
    """The wait of one worker for others, which begins now.

    Args:
        condition: The condition that the worker holds, and sleeps in.
        timeout: Seconds that the wait may take.
        clock: Tells the time.
        note: Is told when the wait takes long; of an ``Asker`` the wait is over when it is gone.
        what: What the others are to do, for the error.
        whom: What the others are called.
    """

    def __init__(
        self,
        condition: Condition,
        timeout: float,
        clock: Callable[[], float],
        note: Note,
        what: str,
        whom: str = "rank",
    ) -> None:
        self._condition, self._timeout, self._patience = condition, timeout, Patience(timeout, clock)
        self._note, self._what, self._whom = note, what, whom

    @property
    def seconds(self) -> float:
        """How long the wait has taken so far."""
        return self._patience.seconds

    def sleep(self, missing: Sequence[int], most: float | None = None) -> None:
        """Sleep until something has changed, which the caller has to look at.

        Args:
            missing: The ranks that the worker waits for.
            most: Seconds of the whole wait after which to wake up at the latest.

        Raises:
            DeadlineExceeded: the wait has taken too long.
            Closed: whoever has made the request is gone.
        """
        if self._patience.is_over:
            raise DeadlineExceeded(
                f"{ranks(missing, self._whom)} did not {self._what} within {self._timeout:g} s: see their output, or "
                "give them more time with --timeout"
            )
        if self._patience.is_notice_due():
            self._note(list(missing), self.seconds)
        left = self._patience.left
        doze(self._condition, self._note, max(left if most is None else min(left, most - self.seconds), 0.001))


def doze(condition: Condition, note: Note, seconds: float) -> None:
    """Sleep in ``condition``, which the caller holds, for a part of the wait for an answer that ``note`` is told of.

    Args:
        condition: Wakes the caller when something has changed.
        note: Whoever has made the request.
        seconds: The longest time that the caller sleeps.

    Raises:
        Closed: whoever has made the request is gone.
    """
    if isinstance(note, Asker):
        note.look()
        seconds = min(seconds, LOOK)
    condition.wait(seconds)


@dataclass(frozen=True)
class Standing:
    """Where a rank waits.

    Attributes:
        lane: The sequence of collectives that the rank waits in; it is the same on every rank.
        counts: How many collectives the rank has begun in each lane.
        text: What the rank waits for, in words.
        generation: The generation of the job's workers in which it waits, where there are several.
    """

    lane: str
    counts: dict[str, int]
    text: str
    generation: int = 0

    def waits_in_vain(self, other: Standing) -> bool:
        """Whether each of two ranks is in a collective that the other one has not begun."""

        def is_ahead(a: Standing, b: Standing) -> bool:
            return b.counts.get(a.lane, 0) < a.counts.get(a.lane, 0)

        return self.generation == other.generation and is_ahead(self, other) and is_ahead(other, self)


def say_all(standings: Mapping[int, Standing]) -> str:
    """Where each rank waits, for messages."""
    groups: dict[str, list[int]] = {}
    for rank, standing in sorted(standings.items()):
        groups.setdefault(standing.text, []).append(rank)
    return "; ".join(f"{ranks(who)}: {text}" for text, who in groups.items())


def say(what: Description) -> str:
    """The description in words."""
    return what if isinstance(what, str) else what()


def ranks(numbers: Sequence[int], noun: str = "rank") -> str:
    """``rank 3`` or ``ranks 0, 2, 3``, for messages."""
    return f"{noun}{'s' if len(numbers) > 1 else ''} {', '.join(map(str, numbers))}"


def give_notice(here: Sequence[int], missing: Sequence[int], seconds: float, what: Description, timeout: float) -> None:
    """Print who waits for whom in what."""
    print(
        f"hocket: {ranks(here)} waited {seconds:.0f} s for {ranks(missing)} (alive) in {say(what)}; giving up after "
        f"{timeout:g} s (--timeout)",
        file=sys.stderr,
        flush=True,
    )


def hold_sigterm() -> None:
    """Keep SIGTERM for ``await_end``, in this thread and in those that it starts from now on."""
    signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGTERM])


def await_end(seconds: float = math.inf) -> bool:
    """Wait until the process that has started this one sends SIGTERM, at most ``seconds``; returns whether it has.

    A SIGTERM from elsewhere is for workers: a scheduler sends it to all processes of a job, and the workers still need
    the others when they finish their batch.
    """
    parent, deadline = os.getppid(), time.monotonic() + seconds
    while (left := deadline - time.monotonic()) > 0:
        told = signal.sigtimedwait([signal.SIGTERM], min(left, NOTICE))
        if told is not None and (told.si_pid == parent or os.getppid() != parent):
            return True
    return False
