"""The one place that knows who is in the job: who is expected, here, finished or lost."""

from __future__ import annotations

import threading
from dataclasses import dataclass, field
from typing import Any

FAILED = "failed"
"""The reason of a worker that has said that its script raised an exception."""


@dataclass(frozen=True)
class Member:
    """One worker.

    Attributes:
        rank: The worker's number in the job.
        said: What the worker has said of itself when it joined: its host, and where others reach it.
    """

    rank: int
    said: dict[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class Membership:
    """Who is in the job now.

    Attributes:
        generation: Rises whenever a worker is lost, has finished or comes back.
        members: The workers that are expected or here, by rank.
    """

    generation: int
    members: tuple[Member, ...]

    @property
    def ranks(self) -> list[int]:
        """The ranks of all members."""
        return [member.rank for member in self.members]


class Ledger:
    """Who of ``workers`` is in the job; every method may be called by any thread.

    A worker that has not joined yet is expected, and counts as a member: others wait for it.
    """

    def __init__(self, workers: int) -> None:
        self.workers = workers
        self._numbers = set(range(workers))
        self._lock = threading.Lock()
        self._generation = 0
        self._said: dict[int, dict[str, Any]] = {}
        self._gone: dict[int, str] = {}  # how each rank was lost; empty if it has finished
        self._history: list[dict[str, Any]] = []

    def membership(self) -> Membership:
        """Who is in the job now."""
        with self._lock:
            ranks = (rank for rank in sorted(self._numbers) if rank not in self._gone)
            return Membership(self._generation, tuple(Member(rank, self._said.get(rank, {})) for rank in ranks))

    @property
    def live(self) -> list[int]:
        """The ranks that are neither lost nor have finished."""
        with self._lock:
            return [rank for rank in sorted(self._numbers) if rank not in self._gone]

    @property
    def gone(self) -> dict[int, str]:
        """The ranks that have gone, in that order, and how; the reason is empty for a rank that has finished."""
        with self._lock:
            return dict(self._gone)

    @property
    def history(self) -> list[dict[str, Any]]:
        """Who was lost, and who has joined, in this order, and in which generation."""
        with self._lock:
            return [*self._history]

    def welcome(self, rank: int, said: dict[str, Any]) -> bool:
        """A worker is here; returns whether it had been taken for dead."""
        with self._lock:
            self._said[rank] = said
            was_gone = self._gone.pop(rank, None) is not None
            self._generation += was_gone
            return was_gone

    def admit(self, rank: int) -> None:
        """A newcomer is a member from now on: for a worker that has gone, or with a number of its own."""
        with self._lock:
            self._numbers.add(rank)
            self._gone.pop(rank, None)
            self._generation += 1
            self._history.append({"generation": self._generation, "joined": [rank]})

    def knows(self, rank: int) -> bool:
        """Whether a number is that of a worker: one of the first, or of a newcomer that was let in."""
        with self._lock:
            return rank in self._numbers

    def lose(self, rank: int, why: str) -> bool:
        """A worker has died or, if ``why`` is empty, finished; returns whether that is news: the first word counts."""
        with self._lock:
            if rank in self._gone or rank not in self._numbers:
                return False
            self._gone[rank] = why
            self._generation += 1
            if why:
                self._history.append({"generation": self._generation, "lost": [rank]})
            return True
