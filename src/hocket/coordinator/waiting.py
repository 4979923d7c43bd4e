"""Waiting for others: with a line now and then that names them, and not for ever."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from hocket.errors import DeadlineExceeded
from hocket.transport.replies import Note
from hocket.transport.simulated import Condition

_NOTE = 30.0  # seconds between two lines


class Wait:
    """One worker waits, from now on.

    Args:
        condition: Is held, and slept in.
        timeout: Seconds that it may take.
        clock: Tells the time.
        note: Is told when it takes long.
        what: What the others are to do, for the error.
        whom: What the others are.
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
        """How long it has been."""
        return self._clock() - self._begin

    def sleep(self, ranks: Sequence[int], most: float | None = None) -> None:
        """Until something has changed, which the caller has to look at.

        Args:
            ranks: For whom it waits.
            most: To be woken when it has been so many seconds in all.

        Raises:
            DeadlineExceeded: it has been too long.
        """
        waited = self.seconds
        if waited >= self._timeout:
            who = f"{self._whom}{'s' if len(ranks) > 1 else ''} {', '.join(map(str, ranks))}"
            raise DeadlineExceeded(
                f"{who} did not {self._what} within {self._timeout:g} s: see their output, or give them more time with "
                "--timeout"
            )
        if waited - self._told >= _NOTE:
            self._told = waited
            self._note(list(ranks), waited)
        until = min(self._timeout, self._told + _NOTE, self._timeout if most is None else most)
        self._condition.wait(max(until - waited, 0.001))
