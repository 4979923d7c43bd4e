"""Generations of workers on several hosts: wherever one is lost, it is lost at the same place for all others."""

import itertools
import os
import signal
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch
import torch.distributed as dist
from hypothesis import example, given, settings
from hypothesis import strategies as st
from pool import Pool, RemoteError
from products import rarely

from comm.quiet_ends import QuietEnd, Square
from comm.tcp_groups import ADDRESS, SECRET, until
from comm.test_link_model import alike, in_sites
from hocket.comm import several_hosts
from hocket.comm.bucket_layout import Layout, Limits
from hocket.comm.communicator import Communicator
from hocket.comm.exchange import Exchange, Ticket
from hocket.comm.hosts_generation import GenerationCommunicator, Network, Place, open_generation
from hocket.comm.link_model import LinkModel
from hocket.coordinator.coordinator_client import open_board
from hocket.errors import WorkerLost
from hocket.job.introductions import job_secret
from hocket.job.worker import current
from hocket.transport.member_links import Links
from hocket.transport.point_to_point import PointToPoint
from hocket.transport.store import AskedStore
from hocket.transport.wire import Closed

OPERATIONS = ["small", "barrier", "large", "exchange", "broadcast", "background", "gather"]
DEADLINE = 20.0


class Death(BaseException):
    """A worker is killed."""


class Fate(bytes):
    """The secret of a job, for a worker that dies when it has sent so many messages to others."""

    messages: float = float("inf")
    is_dead = False


@dataclass
class Town:
    """A coordinator for workers that are threads of this process."""

    live: set[int]
    store: Any = field(default_factory=dist.HashStore)
    square: Square = field(default_factory=Square)
    meetings: dict[int, tuple[str, dict[int, bytes]]] = field(default_factory=dict)
    results: dict[int, dict[int, bytes]] = field(default_factory=dict)
    changed: threading.Condition = field(default_factory=threading.Condition)

    def gather(self, rank: int, number: int, what: str, data: bytes) -> dict[int, bytes]:
        with self.changed:
            expected, given_ = self.meetings.setdefault(number, (what, {}))
            assert expected == what, f"rank {rank} comes to {what}, others to {expected}"
            given_[rank] = data
            self.changed.notify_all()
            assert self.changed.wait_for(lambda: number in self.results or self.live <= given_.keys(), DEADLINE)
            return self.results.setdefault(number, dict(sorted(given_.items())))

    def lose(self, rank: int) -> None:
        with self.changed:
            self.live.discard(rank)
            self.changed.notify_all()


class Client:
    """A worker's end of the town."""

    waited = 0.0

    def __init__(self, town: Town, rank: int, workers: int, fate: Fate) -> None:
        self.rank, self.workers, self._town, self._fate = rank, workers, town, fate
        self._numbers = itertools.count()

    def gather(self, what: str, data: bytes) -> dict[int, bytes]:
        if self._fate.is_dead:
            raise Death
        return self._town.gather(self.rank, next(self._numbers), what, data)

    def close(self) -> None:
        pass


class Worker:
    """One worker, which goes on with those who are left."""

    def __init__(self, client: Any, network: Network, host: str) -> None:
        self.client, self.network, self._host = client, network, host
        self.members, self.generation = tuple(range(client.workers)), 0
        self.group: Communicator | None = None
        self.log: list[Any] = []

    def regroup(self) -> None:
        while True:
            place = Place.new(self._host, self._host, ADDRESS)
            said = self.client.gather(f"who is in {self.generation}", repr(place).encode())
            places = {member: eval(data, {"Place": Place}) for member, data in said.items()}
            self.members = tuple(member for member in self.members if member in said)
            if self.group is not None:
                self.group.leave(failed=False)
            self.generation += 1
            try:
                self.group = open_generation(self.generation, self.members, places, self.client, self.network)
            except WorkerLost as loss:
                assert loss.died, loss
                self.log.append("lost at the start")
                self.group = None
                continue
            return

    def run(self, operations: list[str]) -> list[Any] | None:
        try:
            for number, name in enumerate(operations):
                self.do(lambda number=number, name=name: self.attempt(number, name))  # type: ignore[misc]
            assert self.group is not None
            self.group.leave(failed=False)
        except Death:
            return None
        return self.log

    def do(self, call: Callable[[], Any]) -> None:
        if self.group is None:
            self.regroup()
        while True:
            try:
                self.log.append(call())
                return
            except WorkerLost as loss:
                if not loss.died:
                    raise
                self.log.append("lost")
                self.regroup()

    def attempt(self, number: int, name: str) -> Any:
        group = self.group
        assert group is not None
        mine = float(number % 3 + 1) * 10.0**self.client.rank
        if name in ("small", "large"):
            value = torch.full((3 if name == "small" else 60_000,), mine, dtype=torch.float64)
            try:
                group.allreduce(value, "sum")
            finally:
                assert len(set(value.tolist())) == 1
            return float(value[0])
        if name == "broadcast":
            value = torch.full((5,), mine)
            group.broadcast(value, 0)
            return float(value[0])
        if name == "gather":
            return group.gather_bytes(str(mine).encode())
        if name == "barrier":
            group.barrier()
            return "barrier"
        tensors = [torch.full((count,), mine, dtype=torch.float64) for count in (3000, 10, 2000, 40_000)]
        exchange = group.exchange(Layout(tensors, limits=Limits(64, 1 << 16)), background=name == "background")
        found = []
        try:
            for turn in range(2):
                found.append(self.round(group, exchange, tensors, turn if name == "background" else -1))
        finally:
            assert all(bool((view == mine).all()) for view in exchange.slot_views)
            exchange.close()
        return found

    def round(self, group: Communicator, exchange: Exchange, tensors: list[torch.Tensor], between: int) -> Any:
        exchange.put(tensors)
        for bucket in range(len(exchange.slots) - 1):
            exchange.ready(bucket)
        exchange.begin(Ticket(7, self.client.rank, "a round"))
        found: list[Any] = []
        if between >= 0:
            value = torch.full((4,), float(between))
            group.allreduce(value, "sum")
            found.append(value.tolist())
        found.append(exchange.finish())
        assert all(float(view.max() - view.min()) < 1e-9 for view in exchange.result_views)
        return [*found, [round(float(view[0]) * group.size, 6) for view in exchange.result_views]]


@pytest.fixture(autouse=True, scope="module")
def mortal() -> Iterator[None]:
    """Workers whose fate it is die instead of sending."""
    send = Links.send

    def send_or_die(self: Links, to: int, *parts: torch.Tensor) -> None:
        fate = self._secret
        if isinstance(fate, Fate):
            fate.messages -= 1
            if fate.messages < 0:
                fate.is_dead = True
                self.hang_up()
                raise Closed("dead")
        send(self, to, *parts)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Links, "send", send_or_die)
        yield


@contextmanager
def no_threads_left() -> Iterator[None]:
    def ours() -> set[str]:
        return {thread.name for thread in threading.enumerate() if thread.name.startswith("hocket")}

    yield
    until(lambda: not ours())


def run(size: int, deaths: dict[int, int], operations: list[str], algorithm: str = "auto") -> list[list[Any]]:
    """What each worker that is left has seen."""
    town = Town(set(range(size)))

    def make(rank: int) -> Worker:
        fate = Fate(SECRET)
        fate.messages = deaths.get(rank, fate.messages)
        quiet = QuietEnd(town.square, rank)
        network = Network(town.store, fate, lambda _: False, lambda: town.live, DEADLINE, quiet, algorithm=algorithm)
        return Worker(Client(town, rank, size, fate), network, f"host {rank}")

    workers = [make(rank) for rank in range(size)]

    def live(worker: Worker) -> list[Any] | None:
        try:
            return worker.run(operations)
        finally:
            if isinstance(worker.group, GenerationCommunicator):
                worker.group.hang_up()
            town.lose(worker.client.rank)

    with no_threads_left(), ThreadPoolExecutor(size) as threads:
        found = list(threads.map(live, workers))
    assert all(found[rank] is not None for rank in range(size) if rank not in deaths)
    return [log for log in found if log is not None]


def test_nobody_is_lost() -> None:
    logs = run(3, {}, OPERATIONS)
    assert len(logs) == 3 and all(log == logs[0] for log in logs)
    assert logs[0][0] == 111.0 and logs[0][2] == 333.0
    assert logs[0][3] == [[[0, 1, 2], [111.0] * 4]] * 2


def go_on(hosts: tuple[int, ...], deaths: dict[int, int]) -> list[Any] | None:
    """A worker in a process of its own, which is killed after so many messages if it is one of ``deaths``."""
    config = current().config
    secret = job_secret(config)
    assert secret is not None
    client: Any = current().communicator.client  # type: ignore[attr-defined]
    store = AskedStore(open_board(config, secret), config.timeout)
    quiet = QuietEnd(Square(), config.rank)
    network = Network(store, secret, lambda _: False, client.live, config.timeout, quiet)
    places = [f"host {number}" for number, count in enumerate(hosts) for _ in range(count)]
    worker, send, left = Worker(client, network, places[config.rank]), Links.send, itertools.count()

    def send_or_die(self: Links, to: int, *parts: torch.Tensor) -> None:
        if next(left) == deaths.get(config.rank, -1):
            os.kill(os.getpid(), signal.SIGKILL)
        send(self, to, *parts)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Links, "send", send_or_die)
        return worker.run(OPERATIONS)


@pytest.mark.parametrize("hosts", [(2, 1), (2, 2)])
def test_hosts_with_several_workers(pool: Pool, hosts: tuple[int, ...]) -> None:
    logs = pool.run(sum(hosts), go_on, hosts, {}, coordinated=True)
    assert all(log == logs[0] for log in logs)


@pytest.mark.few(2)
@pytest.mark.parametrize(
    ("hosts", "deaths"),
    [((2, 1), {1: 9}), ((2, 1), {2: 30}), ((2, 2), {0: 5}), ((2, 2), {3: 20}), ((2, 2), {2: 12, 3: 12})],
)
def test_killed(pool: Pool, hosts: tuple[int, ...], deaths: dict[int, int]) -> None:
    size = sum(hosts)
    logs = pool.outcomes_with_death(size, go_on, list(deaths), hosts, deaths, coordinated=True)
    left = [logs[rank] for rank in range(size) if rank not in deaths]
    assert not any(isinstance(log, RemoteError) for log in left), left
    assert all(log == left[0] for log in left), left
    assert any("lost" in str(each) for each in left[0])


@settings(max_examples=30)
@given(
    size=st.integers(2, 4),
    deaths=st.dictionaries(st.integers(0, 3), st.integers(0, 90), min_size=1, max_size=2),
    operations=st.permutations(OPERATIONS),
)
@example(size=3, deaths={0: 0}, operations=OPERATIONS)
@example(size=3, deaths={1: 3}, operations=OPERATIONS)  # it tells one of the others that it has the sum
@example(size=4, deaths={1: 4, 2: 7}, operations=OPERATIONS)
def test_a_loss_is_at_the_same_place_for_all(size: int, deaths: dict[int, int], operations: list[str]) -> None:
    check_losses(size, deaths, operations, "auto")


@pytest.mark.few(1)
@pytest.mark.parametrize(
    "name", ["tree", "hierarchical", *(rarely(name) for name in ("halving_doubling", "star", "ring", "direct"))]
)
@settings(max_examples=8)
@given(
    size=st.integers(3, 4),
    deaths=st.dictionaries(st.integers(0, 3), st.integers(0, 90), min_size=1, max_size=2),
    operations=st.permutations(["large", "exchange", "background"]),
)
@example(size=4, deaths={1: 20}, operations=["large", "exchange", "background"])
def test_a_loss_with_each_algorithm(name: str, size: int, deaths: dict[int, int], operations: list[str]) -> None:
    """Where links are measured, two sites are found: the even ranks and the odd ones."""
    sites = [rank for rank in range(size) if rank % 2 == 0], [rank for rank in range(size) if rank % 2]

    def found(links: PointToPoint) -> LinkModel:
        here = tuple([rank for rank in site if rank < links.size] for site in sites)
        return in_sites(here) if links.size > 2 else alike(links.size)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(several_hosts, "measure", found)
        patch.setattr(several_hosts, "_WORTH_MEASURING", 0)
        check_losses(size, deaths, operations, name)


def check_losses(size: int, deaths: dict[int, int], operations: list[str], algorithm: str) -> None:
    deaths = {rank: messages for rank, messages in deaths.items() if rank < size}
    logs = run(size, deaths, operations, algorithm)
    assert all(log == logs[0] for log in logs), logs
    assert len(logs) >= size - len(deaths)
