"""The processes of a job, wherever they run: what the supervisor sees of them."""

from __future__ import annotations

import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Literal, NamedTuple

from hocket import events
from hocket.observe.timeline import HostClock

if TYPE_CHECKING:
    from hocket.launch.crew_hosts import CrewHosts


@dataclass(eq=False)
class CrewMember:
    """A process of the job: a worker, a server or the coordinator.

    Several workers may have had the same number, one after the other. A spare becomes a worker when it is appointed.

    Attributes:
        number: The number of the process among those of its role: the rank of a worker.
        host: The host on which it runs, by the name that a report should have.
        local_rank: The number of a worker among those of its host.
        local_size: How many workers its host has, if that is not as many as at the start.
        role: ``rank`` for a worker, ``server``, ``coordinator``, or ``spare``: it may become a worker.
        is_newcomer: Whether it is a worker that joins, or has joined, others that went on already.
        is_dismissed: Whether the user wants fewer workers, so that it was asked to leave.
        returncode: How it ended, as subprocess has it; None while it runs, or if nobody will ever know.
        is_lost: Whether its host was lost, or the job goes on without it.
        stage: The last stage that the process has told (see hocket.events.Stage).
        status: The exit status with which the process says that it will end.
        words: The traceback with which the process ends, where it cannot write to its stream for errors.
        has_joined: Whether the process has told that it joined the others.
        survives: Whether it has told that its strategy goes on when another worker is lost.
        replaces: Whether it has told that newcomers can join it.
        leaves: Whether it has told that it leaves in order when it gets SIGTERM.
        has_notice: Whether it has told that it got SIGTERM, and leaves.
        began: When it was started, by the monotonic clock; for a spare, when it was appointed.
        events: Puts together the records that the process sends, from the bytes of its pipe.
        replicas: Fingerprints of a worker's parameters after its last step, where all workers must have the same.
    """

    number: int
    host: str
    role: Literal["rank", "server", "coordinator", "spare"] = "rank"
    local_rank: int = 0
    local_size: int = 0
    is_newcomer: bool = False
    is_dismissed: bool = False
    returncode: int | None = None
    is_lost: bool = False
    stage: str = ""
    status: int = 0
    words: str = ""
    has_joined: bool = False
    survives: bool = False
    replaces: bool = False
    leaves: bool = False
    has_notice: bool = False
    began: float = field(default_factory=time.monotonic)
    replicas: dict[str, int] = field(default_factory=dict)
    events: events.RecordDecoder = field(default_factory=events.RecordDecoder)

    @property
    def name(self) -> str:
        """``rank 3``, ``server 0`` or ``coordinator``: what no other process of the job is called that runs."""
        return self.role if self.role == "coordinator" else f"{self.role} {self.number}"

    @property
    def is_worker(self) -> bool:
        """Whether the process runs the script as one of the workers."""
        return self.role == "rank"

    @property
    def takes_part(self) -> bool:
        """Whether it is one of the workers with which the job began, or a newcomer that has joined them."""
        return self.is_worker and (self.has_joined or not self.is_newcomer)

    @property
    def has_left(self) -> bool:
        """Whether it has left the others on notice, or was asked to by the user, and has ended or is about to."""
        return self.is_worker and (self.stage == "left" or self.is_dismissed)

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


class Room(NamedTuple):
    """A host of the job that takes more workers, and how many it may have; None is as many as are wanted."""

    host: str
    slots: int | None


class Crew(ABC):
    """All processes of a job. What a process that was killed by a signal leaves in its session is killed too.

    Attributes:
        members: All processes that were ever started: those with which the job began, workers first, then others.
        losses: Hosts that were lost, in the order in which that was noticed.
        refusal: Why no process can be added while the job goes on; empty if one can.
        hosts: Knows the hosts, if there are several or may be.
        notes: What the user should know of the hosts; who says a line takes it away.
    """

    members: list[CrewMember]
    losses: list[Loss]
    notes: list[str]
    refusal = "nobody can start one"
    hosts: CrewHosts | None = None

    @abstractmethod
    def read(self, seconds: float) -> Iterator[Chunk]:
        """What they write; waits at most ``seconds`` if there is nothing, and for the signals of the job.

        Once the ``returncode`` of one is set, its last words have been given out.
        """

    @abstractmethod
    def signal(self, member: CrewMember, number: int) -> None:
        """Send a signal to one of them, if it runs."""

    def add(self, member: CrewMember) -> None:
        """Start one more process of the job, on one of the hosts that have room; OSError if the system cannot."""
        raise NotImplementedError

    def rooms(self) -> list[Room]:
        """The hosts on which processes can be added, in the order in which they are to be filled."""
        return []

    def appoint(self, spare: CrewMember, number: int) -> None:
        """Have a spare be the worker ``number`` from now on."""
        raise NotImplementedError

    def watch(self, descriptor: int, action: Callable[[], None]) -> None:  # noqa: B027 - made up crews need none
        """Have ``read`` also wait for ``descriptor``, and call ``action`` when it is readable."""

    def unwatch(self, descriptor: int) -> None:  # noqa: B027
        """Wait for it no longer."""

    @abstractmethod
    def end(self) -> Iterator[Chunk]:
        """Kill whatever is left of the job, everywhere; give out what was still to be read."""

    def clock(self, host: str) -> HostClock | None:
        """How the monotonic clock of ``host`` compares with this process's; None if they are the same."""
        return None

    @abstractmethod
    def close(self) -> None:
        """Let go of everything; nothing of the job is left then. May be called at any time, and twice."""
