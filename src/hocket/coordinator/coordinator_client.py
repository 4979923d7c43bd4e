"""The coordinator, as one worker or server sees it."""

from __future__ import annotations

import secrets
import time
from collections.abc import Callable, Collection, Iterable, Sequence
from typing import TYPE_CHECKING, Any

from hocket import spans
from hocket.config import Config
from hocket.coordinator.coordinator_service import Ask, split
from hocket.errors import JobError, ServerLost, TakenForDead
from hocket.transport.area import Area
from hocket.transport.requests import BOARD, Link, WireLink, join, reach
from hocket.transport.wire import Wire

if TYPE_CHECKING:
    from hocket.coordinator.dealer_client import Deal

SOCKET = "coordinator"
"""The last part of the name of the coordinator's socket on its host."""


class Coordinator:
    """A worker's connection to the coordinator.

    Args:
        rank: The rank of the worker.
        workers: How many workers the job has.
        link: The connection.
        clock: Tells the time.
        newcomer: Whether the others train already: this worker meets nobody before it has joined them.

    Attributes:
        is_in: Whether this worker is one of those that meet.
        waited: Seconds that this worker has waited in meetings so far.
        on_loss: Called when the coordinator is out of reach, or has taken this worker for dead.
        on_goodbye: Called when this worker has said goodbye.
        deals: The deals of the loaders whose batches are dealt out, in the order in which the loaders were made.
    """

    def __init__(
        self,
        rank: int,
        workers: int,
        link: Link,
        clock: Callable[[], float] = time.monotonic,
        *,
        newcomer: bool = False,
    ) -> None:
        self.rank, self.workers, self.link, self.is_in = rank, workers, link, not newcomer
        self.waited, self.clock = 0.0, clock
        self.deals: list[Deal] = []
        self.on_loss: Callable[[JobError], None] = lambda _: None
        self.on_goodbye: Callable[[], None] = lambda: None
        self._meetings = self._areas = self._generation = 0

    def gather(self, what: str, data: bytes) -> dict[int, bytes]:
        """What all live workers give, by rank; collective. A newcomer that has not joined them is alone."""
        if not self.is_in:
            return {self.rank: data}
        self._meetings += 1
        begin = time.perf_counter()
        _, found = self._request(
            Ask.GATHER, {"number": self._meetings, "what": what}, [memoryview(data)] if data else []
        )
        end = time.perf_counter()
        self.waited += end - begin
        spans.add(spans.WAIT, "wait for all workers", begin, end, number=self._meetings)
        return split(found)

    def settle(self, *, has_trained: bool, stays: bool) -> tuple[bool, bool]:
        """Wait until no worker trains: see ``Meetings.settle``."""
        if not self.is_in:
            return False, True
        begin = time.perf_counter()
        answer, _ = self._request(Ask.SETTLE, {"has_trained": has_trained, "stays": stays})
        end = time.perf_counter()
        self.waited += end - begin
        spans.add(spans.WAIT, "wait until nobody trains", begin, end)
        return bool(answer["works"]), bool(answer["over"])

    def live(self) -> list[int]:
        """The workers that have neither died nor finished."""
        ranks: list[int] = self._request(Ask.MEMBERSHIP, {})[0]["ranks"]
        return ranks

    def history(self) -> list[dict[str, Any]]:
        """Who was lost, and who has joined, so far."""
        found: list[dict[str, Any]] = self._request(Ask.HISTORY, {})[0]["history"]
        return found

    def keep(self, answers: bytes, failure: str = "") -> None:
        """Have newcomers get these answers to their calls before they train; or be told why nobody can join."""
        self._request(Ask.KEEP, {"failure": failure}, [memoryview(answers)] if answers else [])

    def kept(self) -> tuple[bytes, str]:
        """What the workers have given to ``keep``; waits until there is something."""
        told, answers = self._request(Ask.KEPT, {})
        return answers, str(told["failure"])

    def join(self) -> tuple[dict[str, Any], bytes]:
        """Wait, as a newcomer, until the workers let this one in; returns what they tell and give it.

        They wait for it from then on; it comes to their next meeting once ``is_in`` is set.
        """
        told, given = self._request(Ask.JOIN, {})
        self._meetings = int(told["meetings"])
        return told, given

    def admit(
        self,
        numbers: Sequence[int],
        told: dict[str, Any],
        given: bytes = b"",
        queues: Sequence[tuple[int, int]] = (),
    ) -> tuple[int, int] | None:
        """Let newcomers in, who then come to the next meeting.

        Args:
            numbers: Their numbers.
            told: What they are told.
            given: What they are given.
            queues: The queues that are open, and their epochs: a newcomer comes in only if each has a batch for it.

        Returns:
            The number of the generation, and how many workers it has; None if there are no batches for a newcomer.
        """
        head = {"numbers": list(numbers), "told": {**told, "meetings": self._meetings}, "queues": list(queues)}
        answer, _ = self._request(Ask.ADMIT, head, [memoryview(given)] if given else [])
        return (int(answer["generation"]), int(answer["workers"])) if answer["admitted"] else None

    def leave(self) -> bool:
        """Say that this worker wants to leave, when the others can let it go; returns whether all have said so."""
        return bool(self._request(Ask.LEAVE, {})[0]["all"])

    def wanted(self, members: Collection[int] | None = None) -> dict[str, list[int]]:
        """The numbers of those that wait to join (``joining``), and of workers that want to leave (``leaving``).

        Only of ``members``, if these are given: of a worker that has left, it may not be known yet that it is gone.
        """
        told, _ = self._request(Ask.MEMBERSHIP, {})
        leaving = [number for number in told["leaving"] if members is None or number in members]
        return {"joining": list(told["joining"]), "leaving": leaving}

    def waiting(self) -> list[int]:
        """The newcomers that wait, if this is the worker that lets them in: the first one that is left."""
        told, _ = self._request(Ask.MEMBERSHIP, {})
        return list(told["joining"]) if self.is_in and self.rank == min(told["ranks"], default=-1) else []

    def refuse(self, batches: Iterable[Sequence[int]]) -> None:
        """The servers came to know of batches (queue, epoch and number) too late: they do not count."""
        for queue, epoch, number in batches:
            if epoch == self.deals[queue].epoch:
                self.deals[queue].refuse([number])

    def is_first(self) -> bool:
        """Whether this is rank 0, or the lowest rank that is left; not for a newcomer that has not joined."""
        return self.is_in and (self.rank == 0 or self.rank == min(self.live()))

    @property
    def is_starter(self) -> bool:
        """Whether this worker brings the first values of what all share; a newcomer finds what the others have."""
        return self.rank == 0 and self.is_in

    def begin_generation(self, generation: int) -> None:
        """The workers that are left share other memory from now on."""
        self._generation, self._areas = generation, 0

    def share(self, nbytes: int, purpose: str) -> Area:
        """Memory that all workers of one host map, all zero at first; they must ask for areas in the same order.

        The memory stays when one of the workers dies.
        """
        head = {"number": self._areas, "nbytes": nbytes, "purpose": purpose, "generation": self._generation}
        self._request(Ask.SHARE, head)
        self._areas += 1
        assert self.link.area is not None
        return self.link.area

    def close(self) -> None:
        """Say goodbye."""
        self.link.close()
        on_goodbye, self.on_goodbye = self.on_goodbye, lambda: None
        on_goodbye()

    def _request(
        self, kind: int, head: dict[str, Any], parts: Sequence[memoryview] = ()
    ) -> tuple[dict[str, Any], bytes]:
        try:
            return self.link.request(kind, head, parts)
        except (ServerLost, TakenForDead) as error:
            self.on_loss(error)
            raise


def open_board(config: Config, secret: bytes) -> Callable[[str, dict[str, Any], bytes], tuple[dict[str, Any], bytes]]:
    """Ask the coordinator's board (see ``Board``), over a connection beside the worker's own; any thread may.

    Returns:
        A function that takes an operation, its arguments and a value, and gives the answer and a value.
    """
    link, _ = connect(config, secret, BOARD + config.rank, {"newcomer": config.newcomer})

    def ask(operation: str, head: dict[str, Any], value: bytes) -> tuple[dict[str, Any], bytes]:
        return link.request(Ask.BOARD, {"operation": operation, **head}, [memoryview(value)] if value else [])

    return ask


def connect(
    config: Config, secret: bytes, name: int, said: dict[str, Any] | None = None
) -> tuple[WireLink, dict[str, Any]]:
    """Join the job at its coordinator; blocks until the coordinator has let this process in, or the timeout.

    Args:
        config: The configuration of this process.
        secret: The secret of the job.
        name: The number of this process in proofs.
        said: What this process says of itself.

    Returns:
        The connection, and what the coordinator has answered.
    """
    nonce, answered = secrets.token_hex(8), dict[str, Any]()

    def make(deadline: float) -> Wire:
        wire = reach_coordinator(config, secret, name, deadline)
        answered.update(join(wire, nonce, deadline, said))
        return wire

    return WireLink("the coordinator", make, config.timeout), answered


def reach_coordinator(config: Config, secret: bytes, name: int, deadline: float) -> Wire:
    """A connection to the coordinator, as ``name``, on which nothing was said yet."""
    # Several names of one machine have one address, and count as several hosts: the first has the coordinator.
    is_beside = config.host_address in (None, config.address) and config.rendezvous is not None and not config.group
    if config.coordinator_port is None and (not is_beside or config.transport == "gloo"):
        raise JobError("HOCKET_COORDINATOR_PORT is not set: start the script with hocket run")
    where = {
        "socket": f"{config.rendezvous}-{SOCKET}" if is_beside else None,
        "address": config.address,
        "port": config.coordinator_port,
    }
    return reach(config, secret, name, where, deadline)
