"""Who waits to join a job that goes on, who wants to leave it, and what newcomers are told of the calls before them."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Collection, Sequence
from typing import Any, TypeVar

from hocket.errors import WorkerLost
from hocket.transport.waiting import Condition, Note, Wait

T = TypeVar("T")
Told = tuple[dict[str, Any], bytes]
"""What a newcomer is told, and what it is given: at first the answers to the calls before training; when it is let in,
all that it needs, where workers are not in step."""


class Changes:
    """The changes of a job's workers that are wanted; the workers decide when they come. Any thread may call.

    Args:
        condition: Guards everything here.
        live: The workers that are in the job now: newcomers wait for them as long as there are some.
        timeout: Seconds that a newcomer waits when there is nobody.
        clock: Tells the time.
    """

    def __init__(
        self,
        condition: Condition,
        live: Callable[[], Collection[int]],
        timeout: float,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._condition, self._live, self._timeout, self._clock = condition, live, timeout, clock
        self._joining: dict[int, Told | None] = {}  # what each newcomer is told when it is let in
        self._leaving: set[int] = set()
        self._kept: bytes | None = None  # the answers to the calls that workers made before they trained
        self._failure = ""

    def keep(self, answers: bytes, failure: str) -> None:
        """Newcomers get these answers to their calls before they train; or cannot join, for a reason in words.

        All workers say so, as any of them may die before that. They give the same answers; a failure may be known to
        some of them alone.
        """
        with self._condition:
            if self._kept is None:
                self._kept = answers
            self._failure = self._failure or failure
            self._condition.notify_all()

    def kept(self, number: int, note: Note) -> Told:
        """What was given to ``keep``; waits, as a newcomer, until the workers have begun to train.

        Raises:
            WorkerLost: nobody is left who could.
        """
        with self._condition:
            kept = self._await(number, note, lambda: self._kept)
            return {"failure": self._failure}, kept

    def join(self, number: int, note: Note) -> Told:
        """A newcomer is ready: wait until the workers let it in; returns what they tell and give it.

        They may be in the middle of an epoch, or in an evaluation, for as long as they like.

        Raises:
            WorkerLost: nobody is left who could let it in.
        """
        with self._condition:
            self._joining[number] = None
            return self._await(number, note, lambda: self._joining.get(number))

    def leave(self, number: int) -> set[int]:
        """A worker wants to leave; returns all that want to."""
        with self._condition:
            self._leaving.add(number)
            return set(self._leaving)

    def wanted(self) -> dict[str, list[int]]:
        """Who waits to join, and who wants to leave."""
        with self._condition:
            joining = [number for number, told in self._joining.items() if told is None]
            return {"joining": sorted(joining), "leaving": sorted(self._leaving)}

    def admit(self, numbers: Sequence[int], told: dict[str, Any], given: bytes = b"") -> list[int]:
        """Let newcomers in, and tell and give them something; returns those who are still here."""
        with self._condition:
            here = [number for number in numbers if number in self._joining]
            self._joining |= dict.fromkeys(here, (told, given))
            self._condition.notify_all()
            return here

    def lose(self, number: int) -> None:
        """A worker or newcomer is gone."""
        with self._condition:
            self._joining.pop(number, None)
            self._leaving.discard(number)
            self._condition.notify_all()

    def _await(self, number: int, note: Note, find: Callable[[], T | None]) -> T:
        """What ``find`` finds, as soon as there is something."""
        if number in self._live():
            raise ValueError(f"rank {number} is one of the workers already")
        wait = Wait(self._condition, math.inf, self._clock, note, "let a new worker in")
        missing, most = list[int](), self._timeout  # whom it waits for, and until when
        while (found := find()) is None:
            if live := sorted(self._live()):  # else the launcher is about to end the newcomer, too
                missing, most = live, wait.seconds + self._timeout
            elif wait.seconds >= most:
                raise WorkerLost("all workers have ended before a new one could join them")
            wait.sleep(missing, most)
        return found
