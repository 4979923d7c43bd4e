"""The processes of a job, wherever they run: what the supervisor sees of them."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Literal, NamedTuple

from hocket import events
from hocket.observe.timeline import HostClock


@dataclass(eq=False)
class CrewMember:
    """A process of the job: a worker, a server or the coordinator.

    Attributes:
        number: The number of the process among those of its role: the rank of a worker.
        host: The host on which it runs, by the name that a report should have.
        role: ``rank`` for a worker, ``server`` or ``coordinator``.
        returncode: How it ended, as subprocess has it; None while it runs, or if nobody will ever know.
        is_lost: Whether its host was lost, or the job goes on without it.
        stage: The last stage that the process has told (see hocket.events.Stage).
        status: The exit status with which the process says that it will end.
        words: The traceback with which the process ends, where it cannot write to its stream for errors.
        has_joined: Whether the process has told that it joined the others.
        events: Puts together the records that the process sends, from the bytes of its pipe.
        replicas: Fingerprints of a worker's parameters after its last step, where all workers must have the same.
    """

    number: int
    host: str
    role: Literal["rank", "server", "coordinator"] = "rank"
    returncode: int | None = None
    is_lost: bool = False
    stage: str = ""
    status: int = 0
    words: str = ""
    has_joined: bool = False
    replicas: dict[str, int] = field(default_factory=dict)
    events: events.RecordDecoder = field(default_factory=events.RecordDecoder)

    @property
    def name(self) -> str:
        """``rank 3``, ``server 0`` or ``coordinator``: what no other process of the job is called."""
        return self.role if self.role == "coordinator" else f"{self.role} {self.number}"

    @property
    def is_worker(self) -> bool:
        """Whether the process runs the script."""
        return self.role == "rank"

    @property
    def is_running(self) -> bool:
        return self.returncode is None and not self.is_lost


Pipe = Literal["stdout", "stderr", "events"]


class Chunk(NamedTuple):
    """Some bytes that a worker or server has written."""

    member: CrewMember
    pipe: Pipe
    data: bytes


class Loss(NamedTuple):
    """A host that was lost, and why, in words for the report."""

    host: str
    ranks: list[int]
    reason: str
    servers: Sequence[int] = ()
    coordinator: bool = False


class Crew(ABC):
    """All processes of a job. What a process that was killed by a signal leaves in its session is killed too.

    Attributes:
        members: All processes, workers first.
        losses: Hosts that were lost, in the order in which that was noticed.
    """

    members: list[CrewMember]
    losses: list[Loss]

    @abstractmethod
    def read(self, seconds: float) -> Iterator[Chunk]:
        """What they write; waits at most ``seconds`` if there is nothing, and for the signals of the job.

        Once the ``returncode`` of one is set, its last words have been given out.
        """

    @abstractmethod
    def signal(self, member: CrewMember, number: int) -> None:
        """Send a signal to one of them, if it runs."""

    @abstractmethod
    def end(self) -> Iterator[Chunk]:
        """Kill whatever is left of the job, everywhere; give out what was still to be read."""

    def clock(self, host: str) -> HostClock | None:
        """How the monotonic clock of ``host`` compares with this process's; None if they are the same."""
        return None

    @abstractmethod
    def close(self) -> None:
        """Let go of everything; nothing of the job is left then. May be called at any time, and twice."""
