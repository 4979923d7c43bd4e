"""The workers of one generation of a job on several hosts: one that is lost is lost at the same place for all.

Shared memory connects the workers of a host, and groups over TCP the hosts; all of them end with the generation.

A worker that dies may have sent its last messages to some and not to others. So a collective is over for a worker only
when it has heard from all others that they have the whole result. When a worker is lost, the others tell each other at
the coordinator which collectives they have the results of. Those that all of them have are over, whoever had heard so;
the first that one of them lacks was over for nobody, and all raise the loss there, to repeat it in the next generation.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any, TypeVar

import torch

from hocket.comm.algorithms.host_reductions import HostSlices
from hocket.comm.algorithms.network_reductions import Flat, Lane, NetworkTimes
from hocket.comm.alone import AloneCommunicator
from hocket.comm.bucket_layout import Layout
from hocket.comm.channel import Channel, Channels, Explained
from hocket.comm.committed_rounds import Committed
from hocket.comm.communicator import Communicator
from hocket.comm.coordinator_group import Meets
from hocket.comm.exchange import Algorithm, Exchange
from hocket.comm.generation_watch import GenerationWatch, Quiet
from hocket.comm.several_hosts import Groups, HostsCommunicator
from hocket.comm.shared import SharedCommunicator
from hocket.comm.tcp_group import TcpGroup
from hocket.comm.topology import Topology
from hocket.errors import DeadlineExceeded, JobError, WorkerLost
from hocket.transport import handoff
from hocket.transport.gate import signature
from hocket.transport.member_links import Links
from hocket.transport.network_group import Among, Wait, introduce
from hocket.transport.shared_memory import SharedMemory
from hocket.transport.store import Store, prefixed
from hocket.transport.waiting import Description

T = TypeVar("T")
_HAND = "collectives"
_MAP = 10.0  # seconds in which workers of a host, who have just met at the coordinator, map the same memory


@dataclass(frozen=True)
class Place:
    """Where a worker is, as it says to the others: anew for each generation.

    Attributes:
        host: A text that tells its host from others: workers with the same text share memory.
        name: The name of its host, for messages.
        address: The address at which the other hosts reach it.
        socket: The socket on which it would hand out the memory of its host; a name that nobody has had before.
    """

    host: str
    name: str
    address: str
    socket: str

    @classmethod
    def new(cls, host: str, name: str, address: str) -> Place:
        """The place of this worker in one more generation."""
        return cls(host, name, address, handoff.new_name())


@dataclass(frozen=True)
class Network:
    """What the workers of all generations need to find each other.

    Attributes:
        store: A store at the coordinator.
        secret: The secret of the job.
        encrypts: Whether connections to an address are encrypted.
        live: Says which workers are alive, as far as the coordinator knows.
        timeout: Seconds to wait for a worker that is alive.
        quiet: Tells the others where this worker waits.
        end: Ends this process, which others do not reach, for a reason in words.
        algorithm: The name of the algorithm for sums, or ``auto``.
        refused: How many strangers and messages were refused so far, by why.
    """

    store: Store
    secret: bytes
    encrypts: Callable[[str], bool]
    live: Callable[[], Collection[int]]
    timeout: float
    quiet: Quiet
    end: Callable[[str], None] = lambda _: None
    algorithm: str = "auto"
    refused: Counter[str] = field(default_factory=Counter)


class SeveralHosts:
    """Connects the workers of several hosts.

    Args:
        coordinator: This worker's connection to the coordinator.
        network: How the members find each other.
        host: A text that tells the host of this worker from others.
        name: The name of its host, for messages.
        address: The address at which the other hosts reach it.
    """

    spreads = True

    def __init__(self, coordinator: Meets, network: Network, host: str, name: str, address: str) -> None:
        self._coordinator, self._network, self._host, self._name = coordinator, network, host, name
        self._address = address

    def describe(self) -> dict[str, Any]:
        """See ``Connector``."""
        return {"place": asdict(Place.new(self._host, self._name, self._address))}

    def connect(self, generation: int, members: Sequence[int], said: dict[int, dict[str, Any]]) -> Communicator:
        """See ``Connector``."""
        places = {member: Place(**said[member]["place"]) for member in members}
        return open_generation(generation, members, places, self._coordinator, self._network)

    def leave(self, failed: bool) -> None:
        """See ``Connector``."""
        self._network.quiet.leave(failed)


def open_generation(
    number: int, members: Sequence[int], places: Mapping[int, Place], coordinator: Meets, network: Network
) -> Communicator:
    """The communicator of one generation; all its members call this, when each knows where the others are.

    Args:
        number: The number of the generation.
        members: The number of each worker, by rank.
        places: Where each of ``members`` is.
        coordinator: This worker's connection to the coordinator.
        network: How the members find each other.

    Raises:
        WorkerLost: a member was lost meanwhile; raised by all others.
    """
    if len(members) == 1:
        return AloneCommunicator()
    hosts, store = {member: places[member].name for member in members}, prefixed(network.store, f"generation {number}")
    own, quiet = coordinator.rank, network.quiet
    watch = GenerationWatch(own, members, hosts, store, network.live, network.timeout, quiet, number)
    quiet.follow({member: (places[member].name, places[member].address) for member in members})
    group: Communicator | None = None
    failure = ""
    try:
        group = _connect(number, members, places, coordinator, network, watch)
    except (JobError, OSError) as error:
        failure = str(error) or repr(error)
    # All go on with this generation, or none: the coordinator gives all the same answer.
    mine = json.dumps([failure, watch.cut_off()]).encode()
    said = coordinator.gather(f"generation {number} is connected", mine)
    found = {member: json.loads(data) for member, data in said.items()}
    failures = [failure for failure, _ in found.values() if failure]
    if failures or len(found) < len(members):
        if isinstance(group, GenerationCommunicator):
            group.hang_up()
        if group is not None:
            group.leave(failed=False)
        missing = [member for member in members if member not in found]
        silent = {member: cut for member, (_, cut) in found.items()}
        loss = watch.loss(missing, f"were connecting generation {number}", failures, silent)
        if watch.is_cut_off:
            network.end(str(loss))
        raise loss
    assert group is not None
    return group


def _connect(
    number: int,
    members: Sequence[int],
    places: Mapping[int, Place],
    coordinator: Meets,
    network: Network,
    watch: GenerationWatch,
) -> Communicator:
    rank = members.index(coordinator.rank)
    hosts: dict[str, list[int]] = {}
    for each, member in enumerate(members):
        hosts.setdefault(places[member].host, []).append(each)
    names = tuple(places[members[local[0]]].name for local in hosts.values())
    topology = Topology(rank, tuple(map(tuple, hosts.values())), names)
    name = places[members[topology.local[0]]].socket
    memory = SharedMemory.join(name, topology.local_rank, len(topology.local), min(network.timeout, _MAP))
    memory.gate.timeout = network.timeout
    memory.gate.numbers = [members[each] for each in topology.local]
    local = SharedCommunicator(memory)
    if len(hosts) == 1:
        return local  # its meetings have a common end without more ado
    memory.gate.outlook = watch
    groups, channels = _openers(number, rank, places[coordinator.rank].address, network, watch)
    try:
        inner = HostsCommunicator(topology, local, watch, groups, channels, "TCP")
        inner.traffic.refused = network.refused
        return GenerationCommunicator(number, inner, coordinator, watch, network.end)
    except BaseException:
        watch.hang_up()
        local.leave(failed=False)
        raise


def _openers(number: int, own: int, address: str, network: Network, watch: GenerationWatch) -> tuple[Groups, Channels]:
    """What makes the groups of a generation, and the channels."""

    def make(name: str, ranks_: Sequence[int], look: Callable[[], None] | None) -> TcpGroup:
        rank, size, name = ranks_.index(own), len(ranks_), f"generation {number}, {name}"
        store = prefixed(network.store, name)
        links = Links(name, rank, size, network.secret, address, network.encrypts, refused=network.refused)
        watch.expect(links)

        def meet(said: dict[str, Any], wait: Wait) -> list[dict[str, Any]]:
            return introduce(store, rank, size, said, wait)

        over = Among(watch, [watch.members[each] for each in ranks_])
        if look:
            group = TcpGroup.connect_later(links, over, meet, look, network.algorithm)
        else:
            group = TcpGroup.connect(links, over, meet, network.algorithm)
        watch.add(group)
        return group

    return (
        lambda name, ranks_: make(name, ranks_, None),
        lambda name, ranks_: make(f"channel {name}", ranks_, lambda: watch.look_for(ranks_)),
    )


class GenerationCommunicator(Communicator):
    """The workers of one generation on several hosts, made by ``open_generation``.

    When a worker is lost, all others raise WorkerLost from the same call, and from all that follow; ``died`` says
    whether it said nothing before. What tensors had before that call, they have after it, and so have the slots of
    exchanges.
    """

    def __init__(
        self,
        number: int,
        inner: HostsCommunicator,
        coordinator: Meets,
        watch: GenerationWatch,
        end: Callable[[str], None],
    ) -> None:
        self._end = end
        self.generation, self._inner, self._coordinator, self._watch = number, inner, coordinator, watch
        self.rank, self.size, self.way = inner.rank, inner.size, inner.way
        self.traffic: NetworkTimes = inner.traffic
        self._begun: dict[str, int] = {}  # collectives of each lane that this worker has begun
        self._have: dict[str, int] = {}  # and those of which it has the result
        self._over: dict[str, int] | None = None  # those of which all had it when a worker was lost
        self._loss = WorkerLost("no worker was lost")
        self._lanes = 0
        self._stays = False

    @property
    def topology(self) -> Topology:
        return self._inner.topology

    @property
    def on_host(self) -> Communicator:
        return self._inner.on_host

    @property
    def waited(self) -> float:
        return self._inner.waited

    @property
    def is_broken(self) -> bool:
        """Whether a worker was lost: the next collective raises that."""
        return self._over is not None

    def allreduce(self, tensor: torch.Tensor, operation: str) -> None:
        self._replace(tensor, lambda copy: self._inner.allreduce(copy, operation))

    def allgather(self, tensor: torch.Tensor) -> torch.Tensor:
        return self.finish(_HAND, lambda: self._inner.allgather(tensor))

    def broadcast(self, tensor: torch.Tensor, root: int) -> None:
        self._replace(tensor, lambda copy: self._inner.broadcast(copy, root))

    def barrier(self, what: str = "hocket.barrier()") -> None:
        self.finish(_HAND, lambda: self._inner.barrier(what))

    def meet(self, number: int, payload: int, what: Description) -> list[int]:
        return self.finish(_HAND, lambda: self._inner.meet(number, payload, what))

    def gather_bytes(self, data: bytes) -> list[bytes]:
        return self.finish(_HAND, lambda: self._inner.gather_bytes(data))

    def collect(self, data: torch.Tensor, root: int) -> list[torch.Tensor]:
        return self.finish(_HAND, lambda: self._inner.collect(data, root))

    def open_lane(self, nbytes: int = 0) -> Lane:
        return self._inner.open_lane(nbytes)  # a sum over it alone may be over for some, and not for others

    def open_channel(self, name: str, ranks: Sequence[int]) -> Channel:
        return Explained(self._inner.open_channel(name, ranks), self._lose)

    def exchange(self, layout: Layout, *, turns: int = 1, **options: Any) -> Exchange:
        if any(self.meet(signature("a new exchange"), self._stays, "a new exchange")):
            return self._inner.exchange(layout, turns=turns, **options)
        assert layout.device.type == "cpu"
        private, codec = options.get("private", True), options.get("codec")

        def make() -> Algorithm:
            nbytes = sum(bucket.nbytes for bucket in layout.buckets)
            lane, memory = self._inner.open_lane(nbytes), self.on_host.memory
            if memory is None or memory.size == 1:
                return Flat(lane, layout, in_place=False, codec=codec)  # what is in the slots stays, to be sent again
            return HostSlices(lane, layout, memory, private=private, codec=codec)

        algorithms = []
        for _ in range(turns):
            self._lanes += 1
            algorithms.append(Committed(self.finish(_HAND, make), f"exchange {self._lanes}", self))
        return Exchange(layout, algorithms)

    def finish(self, lane: str, call: Callable[[], T]) -> T:
        """The result of ``call``, a collective, once all workers have it.

        Args:
            lane: The sequence of collectives to which this one belongs, the same on all workers.
            call: The collective; it must change nothing that is needed to repeat it.

        Raises:
            WorkerLost: a worker was lost before all others had the result; on all of them.
        """
        number = self._begun[lane] = self._begun.get(lane, 0) + 1
        if self._over is not None and number > self._over.get(lane, 0):
            raise self._loss
        result: list[T] = []
        try:
            result.append(call())
            self._have[lane] = number
            if self.size > 2:  # of two, at most one is left, which needs to agree with nobody
                what = f"the end of {lane} {number}"
                self._inner.confirm(signature(what), what)
        except DeadlineExceeded:
            raise
        except (JobError, OSError) as error:
            if number > self._agree(error).get(lane, 0):
                raise self._loss from error
        return result[0]

    def hang_up(self) -> None:
        """End all connections to other hosts; nothing of this generation touches a tensor after this."""
        self._watch.hang_up()

    def stay(self, why: str) -> None:
        """See ``Communicator``: exchanges that are made from now on need not be over at the same place for all."""
        self._stays = True

    def leave(self, failed: bool) -> None:
        self._inner.leave(failed)

    def _replace(self, tensor: torch.Tensor, call: Callable[[torch.Tensor], None]) -> None:
        def make() -> torch.Tensor:
            copy = tensor.detach().clone()
            call(copy)
            return copy

        tensor.copy_(self.finish(_HAND, make))

    def _lose(self, error: Exception) -> WorkerLost:
        """The loss in which this generation ends: a channel has failed."""
        self._agree(error)
        return self._loss

    def _agree(self, error: Exception) -> dict[str, int]:
        """Agree with all who are left on what is over; they all come here, since the connections end with this."""
        if self._over is None:
            self.hang_up()
            mine = json.dumps([self._have, self._watch.cut_off()]).encode()
            said = self._coordinator.gather(f"what is over of generation {self.generation}", mine)
            found = {member: json.loads(data) for member, data in said.items()}
            have = [each for each, _ in found.values()]
            self._over = {lane: min(each.get(lane, 0) for each in have) for lane in self._have}
            missing = [member for member in self._watch.members if member not in found]
            silent = {member: cut for member, (_, cut) in found.items()}
            self._loss = self._watch.loss(missing, f"were in generation {self.generation}", [str(error)], silent)
            if self._watch.is_cut_off:
                self._end(str(self._loss))
        return self._over
