"""The workers of a job, wherever they run: what the supervisor sees of them."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal, NamedTuple


@dataclass(eq=False)
class Worker:
    """A process of the job.

    Attributes:
        rank: Its number in the job.
        host: Where it runs, by the name that a report should have.
        returncode: How it ended, as subprocess has it; None while it runs, or if nobody will ever know.
        is_lost: Whether its host was lost.
        stage: The last that it has told (see hocket.events.Stage).
        status: With which it says that it will end.
    """

    rank: int
    host: str
    returncode: int | None = None
    is_lost: bool = False
    stage: str = ""
    status: int = 0
    events_rest: bytes = b""

    @property
    def is_running(self) -> bool:
        return self.returncode is None and not self.is_lost


Pipe = Literal["stdout", "stderr", "events"]


class Chunk(NamedTuple):
    """Some bytes that a worker has written."""

    worker: Worker
    pipe: Pipe
    data: bytes


class Loss(NamedTuple):
    """A host that was lost, and why, in words for the report."""

    host: str
    ranks: list[int]
    reason: str


class Crew(ABC):
    """All workers of a job.

    Attributes:
        workers: Every one of them, by rank.
        losses: Hosts that were lost, in the order in which that was noticed.
    """

    workers: list[Worker]
    losses: list[Loss]

    @abstractmethod
    def read(self, seconds: float) -> Iterator[Chunk]:
        """What workers write; waits at most ``seconds`` if there is nothing, and for the signals of the job.

        Once the ``returncode`` of a worker is set, its last words have been given out.
        """

    @abstractmethod
    def signal(self, worker: Worker, number: int) -> None:
        """Send a signal to a worker, if it runs."""

    @abstractmethod
    def end(self) -> Iterator[Chunk]:
        """Kill whatever is left of the job, everywhere; give out what was still to be read."""

    @abstractmethod
    def close(self) -> None:
        """Let go of everything; nothing of the job is left then. May be called at any time, and twice."""
