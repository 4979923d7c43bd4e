"""All servers of a job, as one worker sees them."""

from __future__ import annotations

import secrets
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Any

from hocket import spans
from hocket.config import Config
from hocket.server import answers
from hocket.server.front import connect, encrypted
from hocket.server.link import Link, WireLink, join
from hocket.server.terms import Kind
from hocket.transport import door
from hocket.transport.area import Area
from hocket.transport.wire import Wire


@dataclass
class Turn:
    """The batch that a worker is at, for what it pushes next.

    Attributes:
        epoch: In which it is.
        weight: How much its gradient counts in an average.
        batches: Of shared queues, that are done when it is pushed.
    """

    epoch: int = 0
    weight: float = 1.0
    batches: list[tuple[int, int]] = field(default_factory=list)


class Client:
    """Links to all servers.

    Attributes:
        turn: What is said of the next push.
        is_even: Whether all workers took part in every round so far; all who are in a round learn the same of it.
        tables: How many tables this worker has defined; ``queues``, ``passes`` over data and shared ``areas`` likewise.
    """

    def __init__(self, rank: int, workers: int, links: Sequence[Link]) -> None:
        self.rank, self.workers, self.links = rank, workers, list(links)
        self.turn = Turn()
        self.is_even = True
        self.tables = self.queues = self.passes = self.areas = 0
        self.paced: list[int] = []  # tables whose pushes follow the batches of training loops
        self.waited = 0.0
        self.config: Config | None = None  # and the job's secret, of a worker that may open doors of its own
        self.secret = b""
        self.on_close: list[Callable[[], None]] = []
        self._meetings = 0
        remote = sum(not link.is_local for link in links)
        # One for each: a server may wait for another one, which waits for what this worker has for it.
        self._pool = ThreadPoolExecutor(len(links), "hocket-link") if remote and len(links) > 1 else None

    def gather(self, what: str, data: bytes) -> dict[int, bytes]:
        """What all live workers give, by rank; collective."""
        self._meetings += 1
        begin = time.perf_counter()
        _, found = self.first.request(
            Kind.GATHER, {"number": self._meetings, "what": what}, [memoryview(data)] if data else []
        )
        end = time.perf_counter()
        self.waited += end - begin
        spans.add(spans.WAIT, "wait for all workers", begin, end, number=self._meetings)
        return answers.split(found)

    def settle(self, *, has_trained: bool, stays: bool) -> tuple[bool, bool]:
        """Wait until no worker trains: see ``Meetings.settle``."""
        begin = time.perf_counter()
        answer, _ = self.first.request(Kind.SETTLE, {"has_trained": has_trained, "stays": stays})
        end = time.perf_counter()
        self.waited += end - begin
        spans.add(spans.WAIT, "wait until nobody trains", begin, end)
        return bool(answer["works"]), bool(answer["over"])

    @property
    def first(self) -> Link:
        """Server 0, which also keeps the meetings and the queues."""
        return self.links[0]

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
        """The same to all servers."""

        def ask(_: int, link: Link) -> Callable[[], Any]:
            link.begin(kind, head)
            return link.finish

        self.each(ask)

    def is_first(self) -> bool:
        """Whether this is rank 0, or the lowest of those that are left."""
        return self.rank == 0 or self.rank == min(self.live())

    def live(self) -> list[int]:
        """The workers that have neither died nor ended, as server 0 knows them."""
        ranks: list[int] = self.first.request(Kind.LIVE, {})[0]["ranks"]
        return ranks

    def share(self, nbytes: int) -> Area:
        """Memory of server 0 that all workers map, who ask for it in the same order; all zero at first.

        Whoever dies leaves it to the others. Only on one host.
        """
        self.first.request(Kind.SHARE, {"number": self.areas, "nbytes": nbytes})
        self.areas += 1
        assert self.first.area is not None
        return self.first.area

    def close(self) -> None:
        """Say goodbye to all servers; before that, whatever is in ``on_close`` is called."""
        while self.on_close:
            self.on_close.pop()()
        for link in self.links:
            link.close()
        if self._pool is not None:
            self._pool.shutdown(wait=False)


def _defer(ask: Callable[[int, Link], Callable[[], Any]], number: int, link: Link) -> Callable[[], Any]:
    """Begin a request; a failure to do so is found when it is finished, so that those before it are not left open."""
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
    """Connect to all servers of the job; blocks until they are there or the timeout."""
    nonce = secrets.token_hex(8)
    known: list[dict[str, Any]] = []

    def to_first(deadline: float) -> Wire:
        wire = connect(config, secret, config.rank, deadline)
        known[:] = join(wire, config.rank, nonce, deadline)["servers"]
        return wire

    def to_other(said: dict[str, Any]) -> Callable[[float], Wire]:
        def make(deadline: float) -> Wire:
            wire = _knock(config, secret, said, deadline)
            join(wire, config.rank, nonce, deadline)
            return wire

        return make

    links = [WireLink("server 0", to_first, config.timeout)]
    for number, said in enumerate(known[1:], start=1):
        links.append(WireLink(f"server {number}", to_other(said), config.timeout))
    client = Client(config.rank, config.size, links)
    client.config, client.secret = config, secret
    return client


def _knock(config: Config, secret: bytes, said: dict[str, Any], deadline: float) -> Wire:
    beside = config.rendezvous is not None and str(said["socket"]).startswith(f"{config.rendezvous}-server-")
    if beside and config.transport != "gloo":
        return door.knock_here(said["socket"], secret, config.rank, deadline)
    return door.knock(
        said["address"], said["port"], secret, config.rank, deadline, encrypted=encrypted(said["address"], config)
    )
