"""Links between all workers, over which they talk to each other directly and not through a server."""

from __future__ import annotations

import threading
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any

from hocket.messages import Message
from hocket.transport.area import Area
from hocket.transport.waiting import Condition
from hocket.transport.wire import Wire

Handler = Callable[[int, Message, Wire], None]
"""Takes a message of a rank, in the thread that hears that rank; must receive the whole body, and wait for nobody."""

Gather = Callable[[str, bytes], Mapping[int, bytes]]
"""Takes this worker's data, and gives those of all workers, by rank; collective."""


class Sending:
    """Messages that are being sent, whose bytes must stay as they are meanwhile.

    Args:
        count: How many messages there are.
        then: Called when all of them were heard, or will never be.

    Attributes:
        unheard: How many will never be heard.
    """

    def __init__(self, count: int, then: Callable[[], None] | None = None) -> None:
        self._left, self._then, self.unheard = count, then, 0
        self._condition = threading.Condition()

    def note(self, *, heard: bool = True) -> None:
        """The other worker has one of the messages, or will never have it."""
        with self._condition:
            self._left -= 1
            self.unheard += not heard
            self._condition.notify_all()
            is_last = self._left == 0
        if is_last and self._then is not None:
            self._then()

    def wait(self, timeout: float) -> bool:
        """Wait until nothing is under way; False if that takes too long."""
        with self._condition:
            return self._condition.wait_for(lambda: self._left <= 0, timeout)


class Peers(ABC):
    """All other workers, as one of them sees them.

    Handlers are to be set before ``join``.

    Attributes:
        rank: The rank of this worker.
        handlers: The handler of each kind of message.
        on_loss: Called, by any thread, when a worker is gone.
        on_join: Called, by any thread, when a new worker has come, before anything is sent to it.
        gate: Is entered while a new worker comes: whoever holds it sees one state of affairs.
        lost: When the loss of each lost worker was noticed, by rank.
    """

    def __init__(self, rank: int) -> None:
        self.rank = rank
        self.handlers: dict[int, Handler] = {}
        self.on_loss: list[Callable[[int], None]] = []
        self.on_join: list[Callable[[int], None]] = []
        self.gate: AbstractContextManager[Any] = nullcontext()
        self.lost: dict[int, float] = {}

    @abstractmethod
    def join(self, gather: Gather) -> None:
        """Let all other workers connect, and connect to them; collective.

        Raises:
            JobError: a worker that is alive cannot be reached by another one; on all ranks.
        """

    @abstractmethod
    def repair(self, broken: Iterable[tuple[int, int]], gather: Gather) -> None:
        """Make links anew between workers that are alive and have lost each other; collective.

        Args:
            broken: The pairs of ranks without a link, the same on all workers.
            gather: See ``join``.

        Raises:
            JobError: a link cannot be made; on all ranks.
        """

    def where(self) -> dict[int, dict[str, Any]]:
        """Where each worker that is there is reached, as plain data for a newcomer."""
        raise NotImplementedError

    def enter(self, where: Mapping[int, dict[str, Any]]) -> None:
        """Connect this newcomer with all workers in ``where``, which connect to it; not collective.

        A worker that cannot be reached is lost.
        """
        raise NotImplementedError

    @property
    @abstractmethod
    def live(self) -> list[int]:
        """The workers that are there, this one included."""

    @abstractmethod
    def is_beside(self, rank: int) -> bool:
        """Whether a worker is on this host, and memory can be shared with it."""

    @abstractmethod
    def send(
        self, rank: int, kind: int, head: dict[str, Any], parts: Sequence[memoryview] = (), *, sequence: int = 0,
        sent: Sending | None = None, area: Area | None = None,
    ) -> None:  # fmt: skip
        """Have a message sent; returns at once. Nothing is sent to a worker that is gone.

        Shared memory may go with the message to a worker on this host.
        """

    @abstractmethod
    def close(self) -> None:
        """Say goodbye; messages that were given to be sent still are, if that is possible at once."""

    def now(self) -> float:
        """The time, in seconds."""
        return time.monotonic()

    def condition(self) -> Condition:
        """A condition in which this worker and the threads that hear others wait for each other."""
        return threading.Condition()
