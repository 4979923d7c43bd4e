"""Servers in this process, and workers that talk to them from threads: what tests need to come between the two."""

import contextlib
import dataclasses
import secrets
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

import torch

from hocket.config import Config
from hocket.coordinator.hosting import HostedCoordinator
from hocket.launch.local_crew import reserve_port
from hocket.server import rule
from hocket.server.copies import DenseCopy
from hocket.server.front import Front
from hocket.server.placement import place
from hocket.server.server_client import Client
from hocket.server.server_service import Service
from hocket.server.terms import Push, Terms
from hocket.transport import door
from hocket.transport.requests import WireLink, join
from hocket.transport.wire import Wire

SECRET = b"t" * 32
ADDRESS = "127.0.0.1"


@dataclass
class Served:
    """A coordinator and servers at work."""

    coordinator: HostedCoordinator
    coordinator_port: int
    fronts: list[Front]
    services: list[Service]
    ports: list[int]
    said: list[str]
    name: str

    @property
    def refused(self) -> dict[str, int]:
        """What server 0 has refused, and why."""
        return dict(self.services[0].refused)

    @property
    def refused_by_coordinator(self) -> dict[str, int]:
        return dict(self.coordinator.service.refused)

    def peer(self, rank: int, server: int | None = 0) -> Any:
        """What a server, or the coordinator, knows of the connections of a worker."""
        host = self.coordinator if server is None else self.fronts[server]
        return host._reception._peers[rank]


@contextlib.contextmanager
def serve(workers: int, servers: int = 1, timeout: float = 20.0, *, tcp: bool = True) -> Iterator[Served]:
    """Servers over loopback TCP, or over sockets of this host, until the end of the block."""
    name = f"hocket-{secrets.token_hex(8)}"
    reserved = reserve_port()
    config = Config(
        launched=True,
        servers=servers,
        size=workers,
        timeout=timeout,
        rendezvous=name,
        coordinator_port=reserved.getsockname()[1] if tcp else None,
        transport="gloo" if tcp else "auto",
    )
    coordinator = HostedCoordinator(config, SECRET)
    found = Served(coordinator, config.coordinator_port or 0, [], [], [], [], name)
    coordinator.service.say = found.said.append
    try:
        for number in range(servers):
            service = Service(number, workers, timeout)
            found.fronts.append(Front(dataclasses.replace(config, server=number), SECRET, service))
            found.services.append(service)
            found.ports.append(found.fronts[-1].said["port"] or 0)
        yield found
    finally:
        coordinator.close()  # first: it may be telling a server that a worker has left
        for front in found.fronts:
            front.close()
        reserved.close()


def knock(port: int, rank: int, nonce: str = "", deadline: float = 5.0) -> Wire:
    """A connection of a worker that has proved the secret and joined."""
    until = time.monotonic() + deadline
    wire = door.knock(ADDRESS, port, SECRET, rank, until, encrypted=False)
    join(wire, nonce, until)
    return wire


def links(served: Served, rank: int, timeout: float = 20.0, ports: Sequence[int] | None = None) -> list[WireLink]:
    """A worker's links over TCP to the coordinator and to the servers, at ``ports`` if these are others."""
    nonce = secrets.token_hex(8)

    def connect(port: int) -> Callable[[float], Wire]:
        def make(deadline: float) -> Wire:
            wire = door.knock(ADDRESS, port, SECRET, rank, deadline, encrypted=False)
            join(wire, nonce, deadline)
            return wire

        return make

    coordinator = WireLink("the coordinator", connect(served.coordinator_port), timeout)
    found = [WireLink(f"server {n}", connect(port), timeout) for n, port in enumerate(ports or served.ports)]
    return [coordinator, *found]


def local_links(served: Served, rank: int, timeout: float = 20.0) -> list[WireLink]:
    """The same over sockets of this host."""
    nonce = secrets.token_hex(8)

    def connect(label: str) -> Callable[[float], Wire]:
        def make(deadline: float) -> Wire:
            wire = door.knock_here(f"{served.name}-{label}", SECRET, rank, deadline)
            join(wire, nonce, deadline)
            return wire

        return make

    coordinator = WireLink("the coordinator", connect("coordinator"), timeout)
    found = [WireLink(f"server {n}", connect(f"server-{n}"), timeout) for n in range(len(served.fronts))]
    return [coordinator, *found]


@contextlib.contextmanager
def client(found: Sequence[WireLink], rank: int, workers: int) -> Iterator[Client]:
    """A worker until the end of the block; the first of its links is that to the coordinator."""
    made = Client(rank, workers, found[0], found[1:])
    try:
        yield made
    finally:
        made.close()


def tensors() -> list[torch.Tensor]:
    random = torch.Generator().manual_seed(5)
    return [torch.randn(size, generator=random, dtype=torch.float64) for size in (40, 3, 130)]


def optimizer() -> torch.optim.Optimizer:
    """Momentum, so that an update that is lost or made twice shows in all that follow."""
    return torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=0.1, momentum=0.9)


def copy(made: Client, terms: Terms, rules: dict[str, Any] | None = None) -> DenseCopy:
    """A worker's copy of ``tensors()``."""
    placement = place(tensors(), [0, 0, 0], len(made.links), "partitioned", whole=False)
    found = DenseCopy(made, placement, terms, rules or rule.describe(optimizer()))
    for view, tensor in zip(placement.layout.views(found.parameters), tensors(), strict=True):
        view.copy_(tensor)
    if made.rank == 0:
        found.assign()
    return found


def gradient(rank: int, step: int, count: int) -> torch.Tensor:
    return torch.sin(torch.arange(count, dtype=torch.float64) * (rank + 1) + step)


def train(made: Client, terms: Terms, steps: int, rules: dict[str, Any] | None = None) -> torch.Tensor:
    """Steps with gradients that follow from rank and number; the parameters after the last."""
    found = copy(made, terms, rules)
    made.gather("all are there", b"")
    found.pull()
    for step in range(steps):
        found.gradients[0].copy_(gradient(made.rank, step, found.gradients[0].numel()))
        assert found.push(Push())
    return found.parameters[0].clone()


def alone(workers: int, steps: int) -> torch.Tensor:
    """What one process would have: each step with the mean of all workers' gradients."""
    from hocket.comm.bucket_layout import Layout

    layout = Layout(tensors())
    flat = torch.zeros(layout.buckets[0].count, dtype=torch.float64)
    for view, tensor in zip(layout.views([flat]), tensors(), strict=True):
        view.copy_(tensor)
    parameter = torch.nn.Parameter(flat)
    own = torch.optim.SGD([parameter], lr=0.1, momentum=0.9)
    for step in range(steps):
        given = [gradient(rank, step, flat.numel()) for rank in range(workers)]
        parameter.grad = torch.stack(given).mean(0)
        own.step()
    return parameter.detach()


def together(count: int, work: Callable[[int], Any]) -> list[Any]:
    """``work(rank)`` in as many threads; the results by rank, or the first error."""
    with ThreadPoolExecutor(count) as threads:
        return [each.result(60) for each in [threads.submit(work, rank) for rank in range(count)]]


def until(condition: Callable[[], Any], seconds: float = 10.0) -> None:
    """Wait for something that another thread or process does."""
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, "it did not happen in time"
        threading.Event().wait(0.005)
