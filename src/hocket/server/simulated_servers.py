"""Servers in the same process as their simulated workers: no sockets, and messages take virtual time."""

from __future__ import annotations

import functools
import itertools
import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

from hocket.comm.simulated_peers import SimulatedNetwork, SimulatedPeers
from hocket.coordinator.coordinator_service import Ask, Batch, CoordinatorService
from hocket.errors import JobError
from hocket.server.answers import AnswersToWorker
from hocket.server.server_client import Client
from hocket.server.server_service import Service
from hocket.server.terms import Kind
from hocket.transport.area import Area
from hocket.transport.replies import Answer, Body
from hocket.transport.requests import SERVER, Link
from hocket.transport.simulated import Simulation, Speed
from hocket.transport.waiting import Note


@dataclass
class SimulatedService:
    """The coordinator and the servers of a simulated job."""

    coordinator: CoordinatorService
    servers: list[Service]
    timeout: float
    networks: dict[int, SimulatedNetwork] = field(default_factory=dict)


def serve(simulation: Simulation, servers: int, workers: int, timeout: float = 300.0) -> SimulatedService:
    """The coordinator and the servers of a simulated job.

    Args:
        simulation: The simulation by whose clock coordinator and servers live.
        servers: How many parameter servers there are.
        workers: How many workers there are.
        timeout: Virtual seconds that a worker may wait for others.
    """
    services = [
        Service(number, workers, timeout, make_condition=simulation.condition, clock=simulation.now)
        for number in range(servers)
    ]
    coordinator = CoordinatorService(
        workers,
        servers,
        timeout,
        lambda number, _: _DirectServer(services[number]),
        simulation.condition,
        simulation.now,
    )
    for service in services:
        coordinator.welcome(SERVER + service.number, {})
        service.total = functools.partial(_total, coordinator, service.number)
    return SimulatedService(coordinator, services, timeout)


def connect(
    simulation: Simulation, served: SimulatedService, rank: int, workers: int, speed: Speed | None = None
) -> Client:
    """The coordinator and all servers, as one simulated worker sees them."""
    speed, is_only = speed or Speed(), len(served.servers) == 1
    links = [DirectLink(simulation, _AnsweredBy(each), rank, speed, is_only) for each in served.servers]
    coordinator = DirectLink(simulation, served.coordinator, rank, speed, is_only=True)
    for link in (coordinator, *links):
        link.timeout = served.timeout
    client = Client(rank, workers, coordinator, links, simulation.now)
    models = itertools.count()  # each model has links of its own

    def make_peers() -> SimulatedPeers:
        return SimulatedPeers(served.networks.setdefault(next(models), SimulatedNetwork(simulation, speed)), rank)

    client.make_peers = make_peers
    return client


def _total(coordinator: CoordinatorService, server: int, table: int, update: int, value: float) -> float:
    head = {"table": table, "update": update, "value": value}
    answer = coordinator.answer(SERVER + server, Ask.SUM, head, _DirectBody((), None), lambda *_: None)
    return float(answer.head["total"])


class _DirectServer:
    """A server that hears of losses from a coordinator of the same process."""

    def __init__(self, service: Service) -> None:
        self._service = service

    def lose(self, rank: int, why: str, held: Sequence[Batch]) -> Callable[[], dict[str, Any]]:
        told = {"round": self._service.lose(rank, why), "kept": self._service.batches.accepted(held)}
        return lambda: told

    def welcome(self, rank: int) -> Callable[[], None]:
        self._service.welcome(rank)
        return lambda: None

    def admit(self, rank: int) -> Callable[[], None]:
        self._service.admit(rank)
        return lambda: None

    def applied(self, held: Sequence[Batch]) -> Sequence[Batch]:
        return self._service.batches.applied(held)


class Answering(Protocol):
    """A server or a coordinator."""

    who: str

    def answer(self, peer: int, kind: int, head: dict[str, Any], body: Body, note: Note) -> Answer: ...

    def lose(self, peer: int, why: str) -> Any: ...


class _AnsweredBy:
    """A server whose workers are answered without a connection."""

    def __init__(self, service: Service) -> None:
        self.service, self.who = service, f"server {service.number}"

    def answer(self, peer: int, kind: int, head: dict[str, Any], body: Body, note: Note) -> Answer:
        return AnswersToWorker(self.service, peer).answer(kind, head, body, note)

    def lose(self, peer: int, why: str) -> None:
        """Nothing to do: the coordinator tells the server of losses."""


class DirectLink(Link):
    """A link to a server, or the coordinator, of the same process.

    Args:
        simulation: The simulation by whose clock messages travel.
        service: Answers the requests.
        rank: The rank of the worker.
        speed: The speed of the network between worker and server.
        is_only: Whether there is no other server. Else a simulated thread of its own does the server's part, so that
            several servers can be asked at once; switching threads makes the simulation itself slower.
    """

    is_local = True

    def __init__(self, simulation: Simulation, service: Answering, rank: int, speed: Speed, is_only: bool) -> None:
        self._simulation, self._service, self._rank, self._speed = simulation, service, rank, speed
        self._is_only = is_only
        self._name = f"{service.who} for worker {rank}"
        self._finish: Callable[[], Answer] | None = None

    def begin(
        self, kind: int, head: dict[str, Any], parts: Sequence[memoryview] = (), *, area: Area | None = None
    ) -> None:
        assert self._finish is None, "one request at a time"
        told = json.loads(json.dumps(head))  # as it would arrive over a wire
        body = _DirectBody(parts, area)

        def work() -> Answer:
            return self._answer(kind, told, body)

        self._finish = work if self._is_only else self._simulation.start(work, self._name).result

    def finish(self, into: Sequence[memoryview] | None = None) -> tuple[dict[str, Any], bytes]:
        assert self._finish is not None
        work, self._finish = self._finish, None
        answer = work()
        self.area = answer.area
        if into is None:
            return answer.head, b"".join(answer.parts)
        if sum(part.nbytes for part in into) != sum(part.nbytes for part in answer.parts):
            raise JobError(f"{self._name} sent other bytes than were expected")
        _copy(into, answer.parts)
        return answer.head, b""

    def close(self) -> None:
        self._service.lose(self._rank, "")

    def _answer(self, kind: int, head: dict[str, Any], body: _DirectBody) -> Answer:
        there, back = self._shared(kind, head)
        self._travel(there + body.length)
        answer = self._service.answer(self._rank, kind, head, body, lambda *_: None)
        self._travel(back + sum(part.nbytes for part in answer.parts))
        return answer

    def _travel(self, nbytes: int) -> None:
        seconds = self._speed.seconds(nbytes)
        if seconds:
            self._simulation.sleep(seconds)

    def _shared(self, kind: int, head: dict[str, Any]) -> tuple[int, int]:
        """Bytes to the server and back that are shared memory here, and would travel between hosts."""
        if kind not in (Kind.PUSH, Kind.PULL, Kind.ASSIGN) or "rows" in head:
            return 0, 0
        assert isinstance(self._service, _AnsweredBy)
        nbytes = sum(each.nbytes for each in self._service.service.desk(head["table"], self._rank).gradients)
        if kind == Kind.PULL:
            return 0, nbytes
        return nbytes if head.get("weight", 1) else 0, nbytes if head.get("pull") else 0


class _DirectBody:
    """The body of a message that did not travel."""

    def __init__(self, parts: Sequence[memoryview], area: Area | None) -> None:
        self._parts, self._area = parts, area
        self.length = sum(part.nbytes for part in parts)

    def into(self, parts: list[memoryview]) -> None:
        _copy(parts, self._parts)

    def read(self) -> bytes:
        return b"".join(self._parts)

    def area(self) -> Area:
        assert self._area is not None
        return self._area  # the worker's own: the same process needs no second mapping


def _copy(targets: Sequence[memoryview], sources: Sequence[memoryview]) -> None:
    """Copy bytes from some pieces of memory to others of the same total length."""
    data, at = b"".join(sources), 0
    for target in targets:
        target[:] = data[at : at + target.nbytes]
        at += target.nbytes
