"""Waiting for others: with a line now and then that names them, and not for ever."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Protocol

from hocket.errors import DeadlineExceeded
from hocket.transport.gate import NOTICE
from hocket.transport.replies import Note


class Condition(Protocol):
    """The methods that ``threading.Condition`` and ``SimulatedCondition`` share, for code that serves both."""

    def __enter__(self) -> bool: ...
    def __exit__(self, kind: Any, error: Any, trace: Any, /) -> None: ...
    def wait(self, timeout: float | None = None) -> bool: ...
    def wait_for(self, predicate: Callable[[], bool], timeout: float | None = None) -> bool: ...
    def notify_all(self) -> None: ...


class Wait:
    """The wait of one worker for others, which begins now.

    Args:
        condition: The condition that the worker holds, and sleeps in.
        timeout: Seconds that the wait may take.
        clock: Tells the time.
        note: Is told when the wait takes long.
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
        self._condition, self._timeout, self._clock = condition, timeout, clock
        self._note, self._what, self._whom = note, what, whom
        self._begin, self._told = clock(), 0.0

    @property
    def seconds(self) -> float:
        """How long the wait has taken so far."""
        return self._clock() - self._begin

    def sleep(self, ranks: Sequence[int], most: float | None = None) -> None:
        """Sleep until something has changed, which the caller has to look at.

        Args:
            ranks: The ranks that the worker waits for.
            most: Seconds of the whole wait after which to wake up at the latest.

        Raises:
            DeadlineExceeded: the wait has taken too long.
        """
        waited = self.seconds
        if waited >= self._timeout:
            who = f"{self._whom}{'s' if len(ranks) > 1 else ''} {', '.join(map(str, ranks))}"
            raise DeadlineExceeded(
                f"{who} did not {self._what} within {self._timeout:g} s: see their output, or give them more time with "
                "--timeout"
            )
        if waited - self._told >= NOTICE:
            self._told = waited
            self._note(list(ranks), waited)
        until = min(self._timeout, self._told + NOTICE, self._timeout if most is None else most)
        self._condition.wait(max(until - waited, 0.001))
