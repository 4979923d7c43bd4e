"""Servers in the same process as their simulated workers: no sockets, and messages take virtual time."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from hocket.errors import JobError
from hocket.server.answers import Answer, Answers
from hocket.server.client import Client
from hocket.server.link import Link
from hocket.server.service import Service
from hocket.server.terms import Kind
from hocket.transport.area import Area
from hocket.transport.simulated import Simulation


@dataclass(frozen=True)
class Speed:
    """Of the network between a worker and a server.

    Attributes:
        latency: Seconds that a message takes, however small it is.
        bandwidth: Bytes per second.
    """

    latency: float = 0.0
    bandwidth: float = math.inf

    def seconds(self, nbytes: int) -> float:
        """For one message."""
        return self.latency + nbytes / self.bandwidth


def serve(simulation: Simulation, servers: int, workers: int, timeout: float = 300.0) -> list[Service]:
    """The servers of a simulated job.

    Args:
        simulation: By whose clock they live.
        servers: How many there are; ``workers`` likewise.
        timeout: Virtual seconds that a worker may wait for others.
    """
    services = [
        Service(number, servers, workers, timeout, make_condition=simulation.condition, clock=simulation.now)
        for number in range(servers)
    ]
    for service in services:
        service.total = lambda table, update, value, number=service.number: services[0].add(  # type: ignore[misc]
            number, table, update, value
        )
    return services


def connect(
    simulation: Simulation, services: Sequence[Service], rank: int, workers: int, speed: Speed | None = None
) -> Client:
    """All servers, as one simulated worker sees them."""
    links = [DirectLink(simulation, each, rank, speed or Speed(), len(services) == 1) for each in services]
    return Client(rank, workers, links)


class DirectLink(Link):
    """A link to a server of the same process.

    Args:
        simulation: By whose clock it lives.
        service: The server.
        rank: Of the worker.
        speed: Of the network between them.
        is_only: Whether there is no other server. Else a simulated thread of its own does the server's part, so that
            several can be asked at once; that takes longer in the real world, where threads are slow to change.
    """

    is_local = True

    def __init__(self, simulation: Simulation, service: Service, rank: int, speed: Speed, is_only: bool) -> None:
        self._simulation, self._service, self._rank, self._speed = simulation, service, rank, speed
        self._is_only = is_only
        self._name = f"server {service.number} for worker {rank}"
        self._answers = Answers(service, rank, lambda *_: None)
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
        answer = self._answers.answer(kind, head, body)
        self._travel(back + sum(part.nbytes for part in answer.parts))
        return answer

    def _travel(self, nbytes: int) -> None:
        seconds = self._speed.seconds(nbytes)
        if seconds:
            self._simulation.sleep(seconds)

    def _shared(self, kind: int, head: dict[str, Any]) -> tuple[int, int]:
        """Bytes to the server and back that do not travel here, because both sides see them, but would elsewhere."""
        if kind not in (Kind.PUSH, Kind.PULL, Kind.ASSIGN) or "rows" in head:
            return 0, 0
        nbytes = sum(each.nbytes for each in self._service.desk(head["table"], self._rank).gradients)
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
    """Bytes from some pieces of memory to others that are as long together."""
    data, at = b"".join(sources), 0
    for target in targets:
        target[:] = data[at : at + target.nbytes]
        at += target.nbytes
