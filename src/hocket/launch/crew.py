"""The workers and servers of a job, wherever they run: what the supervisor sees of them."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Literal, NamedTuple

from hocket.observe.clock import Clock


@dataclass(eq=False)
class Member:
    """A process of the job: a worker or a server.

    Attributes:
        number: Its number among those of its role: the rank of a worker.
        host: Where it runs, by the name that a report should have.
        role: What it is.
        returncode: How it ended, as subprocess has it; None while it runs, or if nobody will ever know.
        is_lost: Whether its host was lost, or the job goes on without it.
        stage: The last that it has told (see hocket.events.Stage).
        status: With which it says that it will end.
        words: The traceback with which it ends, where it cannot write to its stream for errors.
        has_joined: Whether it has told that it joined the others.
        replicas: Fingerprints of its parameters after its last step, where those of all workers must be the same.
    """

    number: int
    host: str
    role: Literal["rank", "server"] = "rank"
    returncode: int | None = None
    is_lost: bool = False
    stage: str = ""
    status: int = 0
    words: str = ""
    has_joined: bool = False
    replicas: dict[str, int] = field(default_factory=dict)
    events_rest: bytes = b""

    @property
    def name(self) -> str:
        """``rank 3`` or ``server 0``: what no other process of the job is called."""
        return f"{self.role} {self.number}"

    @property
    def is_server(self) -> bool:
        return self.role == "server"

    @property
    def is_running(self) -> bool:
        return self.returncode is None and not self.is_lost


Pipe = Literal["stdout", "stderr", "events"]


class Chunk(NamedTuple):
    """Some bytes that a worker or server has written."""

    member: Member
    pipe: Pipe
    data: bytes


class Loss(NamedTuple):
    """A host that was lost, and why, in words for the report."""

    host: str
    ranks: list[int]
    reason: str
    servers: Sequence[int] = ()


class Crew(ABC):
    """All workers and servers of a job. What a worker that is killed by a signal leaves in its session is killed too.

    Attributes:
        members: Every one of them, workers before servers.
        losses: Hosts that were lost, in the order in which that was noticed.
    """

    members: list[Member]
    losses: list[Loss]

    @abstractmethod
    def read(self, seconds: float) -> Iterator[Chunk]:
        """What they write; waits at most ``seconds`` if there is nothing, and for the signals of the job.

        Once the ``returncode`` of one is set, its last words have been given out.
        """

    @abstractmethod
    def signal(self, member: Member, number: int) -> None:
        """Send a signal to one of them, if it runs."""

    @abstractmethod
    def end(self) -> Iterator[Chunk]:
        """Kill whatever is left of the job, everywhere; give out what was still to be read."""

    def clock(self, host: str) -> Clock | None:
        """How the monotonic clock of ``host`` compares with this process's; None if they are the same."""
        return None

    @abstractmethod
    def close(self) -> None:
        """Let go of everything; nothing of the job is left then. May be called at any time, and twice."""
