"""The coordinator, as one worker or server sees it."""

from __future__ import annotations

import secrets
import time
from collections.abc import Callable, Iterable, Sequence
from typing import TYPE_CHECKING, Any

from hocket import spans
from hocket.config import Config
from hocket.coordinator.coordinator_service import Ask, split
from hocket.errors import JobError
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

    Attributes:
        waited: Seconds that this worker has waited in meetings so far.
        deals: The deals of the loaders whose batches are dealt out, in the order in which the loaders were made.
    """

    def __init__(
        self, rank: int, workers: int, link: Link, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self.rank, self.workers, self.link = rank, workers, link
        self.waited, self.clock = 0.0, clock
        self.deals: list[Deal] = []
        self._meetings = self._areas = self._generation = 0

    def gather(self, what: str, data: bytes) -> dict[int, bytes]:
        """What all live workers give, by rank; collective."""
        self._meetings += 1
        begin = time.perf_counter()
        _, found = self.link.request(
            Ask.GATHER, {"number": self._meetings, "what": what}, [memoryview(data)] if data else []
        )
        end = time.perf_counter()
        self.waited += end - begin
        spans.add(spans.WAIT, "wait for all workers", begin, end, number=self._meetings)
        return split(found)

    def settle(self, *, has_trained: bool, stays: bool) -> tuple[bool, bool]:
        """Wait until no worker trains: see ``Meetings.settle``."""
        begin = time.perf_counter()
        answer, _ = self.link.request(Ask.SETTLE, {"has_trained": has_trained, "stays": stays})
        end = time.perf_counter()
        self.waited += end - begin
        spans.add(spans.WAIT, "wait until nobody trains", begin, end)
        return bool(answer["works"]), bool(answer["over"])

    def live(self) -> list[int]:
        """The workers that have neither died nor finished."""
        ranks: list[int] = self.link.request(Ask.MEMBERSHIP, {})[0]["ranks"]
        return ranks

    def refuse(self, batches: Iterable[Sequence[int]]) -> None:
        """The servers came to know of batches (queue, epoch and number) too late: they do not count."""
        for queue, epoch, number in batches:
            if epoch == self.deals[queue].epoch:
                self.deals[queue].refuse([number])

    def is_first(self) -> bool:
        """Whether this is rank 0, or the lowest rank that is left."""
        return self.rank == 0 or self.rank == min(self.live())

    def begin_generation(self, generation: int) -> None:
        """The workers that are left share other memory from now on."""
        self._generation, self._areas = generation, 0

    def share(self, nbytes: int) -> Area:
        """Memory that all workers of one host map, all zero at first; they must ask for areas in the same order.

        The memory stays when one of the workers dies.
        """
        self.link.request(Ask.SHARE, {"number": self._areas, "nbytes": nbytes, "generation": self._generation})
        self._areas += 1
        assert self.link.area is not None
        return self.link.area

    def close(self) -> None:
        """Say goodbye."""
        self.link.close()


def open_board(config: Config, secret: bytes) -> Callable[[str, dict[str, Any], bytes], tuple[dict[str, Any], bytes]]:
    """Ask the coordinator's board (see ``Board``), over a connection beside the worker's own; any thread may.

    Returns:
        A function that takes an operation, its arguments and a value, and gives the answer and a value.
    """
    link, _ = connect(config, secret, BOARD + config.rank)

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
    is_beside = config.host_address in (None, config.address) and config.rendezvous is not None
    if config.coordinator_port is None and (not is_beside or config.transport == "gloo"):
        raise JobError("HOCKET_COORDINATOR_PORT is not set: start the script with hocket run")
    where = {
        "socket": f"{config.rendezvous}-{SOCKET}" if is_beside else None,
        "address": config.address,
        "port": config.coordinator_port,
    }
    return reach(config, secret, name, where, deadline)
