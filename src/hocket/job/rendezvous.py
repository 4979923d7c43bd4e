"""How the workers of a job find each other, and which communicator they get."""

from __future__ import annotations

import dataclasses
import platform
import sys

import torch

from hocket import specs
from hocket.comm.alone import AloneCommunicator
from hocket.comm.changing_group import RegroupingCommunicator
from hocket.comm.communicator import Communicator
from hocket.comm.coordinator_group import MeetingCommunicator
from hocket.comm.several_hosts import HostsCommunicator
from hocket.comm.shared import SharedCommunicator
from hocket.config import Config
from hocket.coordinator.coordinator_client import Coordinator, connect, open_board
from hocket.coordinator.hosting import HostedCoordinator
from hocket.coordinator.liveness_client import Watch
from hocket.errors import UsageError, WorkerLost
from hocket.job import introductions
from hocket.server.server_client import Client, open_client
from hocket.transport import futex, handoff
from hocket.transport.nccl import NcclGroup
from hocket.transport.process_group import ProcessGroup
from hocket.transport.shared_memory import SharedMemory
from hocket.transport.store import AskedStore, Store, StoreLost, open_store, prefixed


def join(config: Config) -> Communicator:
    """Meet the other workers; blocks until all are there or the timeout."""
    _check(config)
    if config.servers or (config.size > 1 and config.strategy and specs.parse(config.strategy).meets_at_coordinator):
        return join_at_coordinator(config)
    if config.size == 1:
        return AloneCommunicator()
    shares = config.transport != "gloo" and futex.supported()
    if config.transport == "shared-memory" and not shares:
        raise UsageError("--transport shared-memory needs x86-64 Linux: use --transport auto, which takes Gloo here")
    if config.transport == "auto" and not shares and config.rank == 0:
        print("hocket: shared memory needs x86-64 Linux; using Gloo, which is slower", file=sys.stderr)
    try:
        if config.on_loss == "continue":
            return _join_to_go_on(config, shares)
        if shares and (config.local_size == config.size or (config.rendezvous and not config.local_size)):
            return _join_host(config)
        return _join_hosts(config, shares)
    except StoreLost as error:
        keeper = "the coordinator of the job is gone: see its output"
        if config.coordinator_port is None:
            keeper = (
                f"the store at MASTER_ADDR={config.address}, where the workers find each other, is gone: see the "
                "output of rank 0, or of torchrun"
            )
        raise WorkerLost(f"rank {config.rank} waits in hocket.init(), but {keeper} ({error})") from error


def join_at_coordinator(config: Config) -> MeetingCommunicator[Client]:
    """Meet the other workers at the coordinator, and connect to the servers if there are any."""
    secret = introductions.job_secret(config)
    if secret is None:
        what = "HOCKET_SERVERS is set" if config.servers else f"strategy {config.strategy!r} needs a coordinator"
        raise UsageError(f"{what}, and nothing has started it: use hocket run")
    client = open_client(config, secret)
    local = all(link.is_local for link in (client.link, *client.links))
    way = f"{'servers ' if config.servers else ''}{'through shared memory' if local else 'over TCP'}"
    name = config.host_name or platform.node()
    return MeetingCommunicator(client, config.rendezvous or introductions.machine(), name, way)


def _join_host(config: Config) -> Communicator:
    """Meet the other workers where all are on this host."""
    store = None if config.rendezvous else _open_store(config)  # rank 0's serves the others until all have joined
    name = config.rendezvous
    if store is not None:  # under torchrun rank 0 tells the others its socket through the job's store
        key = f"hocket/socket/{config.restart}"
        if config.rank == 0:
            store.set(key, handoff.new_name())
        name = bytes(store.get(key)).decode()
    assert name is not None
    return SharedCommunicator(SharedMemory.join(name, config.rank, config.size, config.timeout))


def _join_to_go_on(config: Config, shares: bool) -> Communicator:
    """Meet the other workers of this host, at the coordinator: when one of them dies, the others meet there again."""
    secret = introductions.job_secret(config)
    if secret is None or not shares or config.local_size not in (0, config.size):
        raise UsageError(
            "--on-loss continue needs hocket run, and all workers on one host with shared memory: leave it out, or use "
            "a strategy with servers, gossip or hogwild, which go on by themselves"
        )
    link, _ = connect(config, secret, config.rank)
    return RegroupingCommunicator(Coordinator(config.rank, config.size, link), config.timeout)


def _join_hosts(config: Config, shares: bool) -> Communicator:
    """Meet workers on several hosts, or workers that cannot share memory and count as hosts of their own."""
    store = prefixed(_open_store(config), f"hocket/{config.restart}")
    met = introductions.meet(config, store, shares=shares)
    topology = met.topology
    local: Communicator = AloneCommunicator()
    if shares:
        name = config.rendezvous or met.socket
        shared = SharedMemory.join(name, topology.local_rank, len(topology.local), config.timeout)
        local = SharedCommunicator(shared)
        if len(topology.hosts) == 1:
            return local
    watch = _open_watch(config, store, met)
    if shares:
        shared.gate.numbers = list(topology.local)
        shared.gate.outlook = watch

    def group(name: str, members: list[int]) -> ProcessGroup:
        return ProcessGroup(
            prefixed(store, name), members.index(config.rank), len(members), met.address, config.timeout, watch
        )

    return HostsCommunicator(topology, local, watch, group)


def _open_watch(config: Config, store: Store, met: introductions.Introductions) -> Watch:
    """The watch over all ranks, at the job's coordinator; where nothing has started one, rank 0 does so in a thread."""
    names = [met.topology.name_of(rank) for rank in range(config.size)]
    if introductions.job_secret(config) is not None and config.coordinator_port is not None:
        return Watch(config, met.secret, names)
    # The store that has brought the workers together is not encrypted either.
    config = dataclasses.replace(
        config, host_address=met.address, rendezvous=None, tls="on" if config.tls == "on" else "off"
    )
    hosted = None
    if config.rank == 0:
        hosted = HostedCoordinator(config, met.secret)
        hosted.service.say = lambda line: print(line, file=sys.stderr, flush=True)
        store.set("coordinator", f"{hosted.said['port']} {hosted.said['address']}")
    try:
        address, port = introductions.read_address(store, "coordinator")
        config = dataclasses.replace(config, address=address, coordinator_port=port)
        return Watch(config, met.secret, names, is_of_rank_0=True, hosted=hosted)
    except BaseException:
        if hosted is not None:
            hosted.close()
        raise


def connect_gpus(config: Config, device: torch.device) -> NcclGroup:
    """A group of all ranks' GPUs, of which this rank has ``device``; collective."""
    store = prefixed(_open_store(config), f"hocket/{config.restart}/nccl")
    return NcclGroup(store, config.rank, config.size, config.timeout, device)


def _check(config: Config) -> None:
    fits = not config.local_size or 0 <= config.local_rank < config.local_size <= config.size
    if not 0 <= config.rank < config.size or not fits:
        raise UsageError(
            f"RANK={config.rank}, WORLD_SIZE={config.size}, LOCAL_RANK={config.local_rank} and "
            f"LOCAL_WORLD_SIZE={config.local_size} do not fit together: start the script with hocket run or torchrun"
        )


def _open_store(config: Config) -> Store:
    """The board of the job's coordinator or, where something else has started the workers, torch's own store."""
    secret = introductions.job_secret(config)
    if secret is not None and config.coordinator_port is not None:
        return AskedStore(open_board(config, secret), config.timeout)
    if config.port is None:
        raise UsageError("WORLD_SIZE is set but MASTER_PORT is not: start the script with hocket run or torchrun")
    host = config.rank == 0 and not config.store_is_hosted
    return open_store(config.address, config.port, host=host, timeout=config.timeout)
