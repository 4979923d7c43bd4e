"""The coordinator and all servers of a job, as one worker sees them."""

from __future__ import annotations

import secrets
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from hocket.comm.peers import Peers
from hocket.comm.wire_peers import WirePeers
from hocket.config import Config
from hocket.coordinator.coordinator_client import Coordinator, connect
from hocket.coordinator.dealer_client import Deal
from hocket.errors import JobError
from hocket.server.terms import Kind
from hocket.transport.requests import Link, WireLink, join, reach
from hocket.transport.wire import Wire


class Client(Coordinator):
    """The coordinator and all servers.

    Args:
        rank: The rank of this worker.
        workers: How many workers the job has.
        coordinator: The connection to the coordinator.
        links: The connections to the servers; empty in a job without servers.
        clock: Tells the time.
        newcomer: See ``Coordinator``.

    Attributes:
        is_even: Whether all workers took part in every round so far; all workers in a round learn the same of it.
        tables: How many tables this worker has defined.
        paced: Tables whose pushes follow the batches of training loops.
        make_peers: Makes this worker's links to all other workers, for strategies that need them.
        on_close: Called before this worker says goodbye to servers and coordinator.
    """

    def __init__(
        self,
        rank: int,
        workers: int,
        coordinator: Link,
        links: Sequence[Link],
        clock: Callable[[], float] = time.monotonic,
        *,
        newcomer: bool = False,
    ) -> None:
        super().__init__(rank, workers, coordinator, clock, newcomer=newcomer)
        self.links = list(links)
        self.is_even = not newcomer
        self.tables = 0
        self.paced: list[int] = []
        self.make_peers: Callable[[], Peers] = _no_peers
        self.on_close: list[Callable[[], None]] = []
        remote = sum(not link.is_local for link in links)
        # One thread for each server: a server may wait for another one, which waits for this worker's message.
        self._pool = ThreadPoolExecutor(len(links), "hocket-link") if remote and len(links) > 1 else None

    @property
    def first(self) -> Link:
        """The link to server 0."""
        return self.links[0]

    def await_batch(self, deal: Deal, epoch: int) -> bool:
        """Whether ``epoch`` has a batch for this worker after all: see ``Deal.wait``; no server waits meanwhile."""
        self.leave_epoch(epoch)
        found = deal.wait()
        if found:
            self.tell(Kind.ENTER, {"epoch": epoch, "tables": self.paced})
        return found

    def leave_epoch(self, epoch: int) -> None:
        """This worker has no more batches of ``epoch``: no server is to wait for its pushes."""
        self.tell(Kind.LEAVE, {"epoch": epoch, "tables": self.paced})

    def each(self, ask: Callable[[int, Link], Callable[[], Any]]) -> list[Any]:
        """Ask all servers at once: ``ask`` begins a request, and what it returns finishes it.

        If one fails, its error is raised when all others have been heard.
        """
        if self._pool is None:
            return _finish([_defer(ask, number, link) for number, link in enumerate(self.links)])

        def one(number: int) -> Any:
            return ask(number, self.links[number])()

        return _finish([self._pool.submit(one, number).result for number in range(len(self.links))])

    def tell(self, kind: int, head: dict[str, Any]) -> None:
        """Send the same message to all servers."""

        def ask(_: int, link: Link) -> Callable[[], Any]:
            link.begin(kind, head)
            return link.finish

        self.each(ask)

    def close(self) -> None:
        """Say goodbye to all servers and, at last, to the coordinator."""
        while self.on_close:
            self.on_close.pop()()
        for link in [*self.links, self.link]:
            link.close()
        if self._pool is not None:
            self._pool.shutdown(wait=False)


def _defer(ask: Callable[[int, Link], Callable[[], Any]], number: int, link: Link) -> Callable[[], Any]:
    """Begin a request; a failure to do so is found when it is finished, so that no earlier request is left open."""
    try:
        return ask(number, link)
    except Exception as error:
        failure = error

    def fail() -> Any:
        raise failure

    return fail


def _finish(pending: Sequence[Callable[[], Any]]) -> list[Any]:
    """All results, or the first error when all have been heard."""
    results, failures = [], []
    for finish in pending:
        try:
            results.append(finish())
        except Exception as error:
            failures.append(error)
    if failures:
        raise failures[0]
    return results


def open_client(config: Config, secret: bytes) -> Client:
    """Join the job at its coordinator, and connect to all servers; blocks until they are there or the timeout."""
    said = {"newcomer": config.newcomer}
    coordinator, answered = connect(config, secret, config.rank, said)
    nonce = secrets.token_hex(8)

    def to(where: dict[str, Any]) -> Callable[[float], Wire]:
        def make(deadline: float) -> Wire:
            wire = reach(config, secret, config.rank, where, deadline)
            join(wire, nonce, deadline, said)
            return wire

        return make

    links = [WireLink(f"server {n}", to(where), config.timeout) for n, where in enumerate(answered["servers"])]
    client = Client(config.rank, config.size, coordinator, links, newcomer=config.newcomer)
    client.make_peers = lambda: WirePeers(config, secret)
    return client


def _no_peers() -> Peers:
    raise JobError("this worker has no links to other workers")
