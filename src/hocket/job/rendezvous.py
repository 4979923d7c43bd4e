"""How the workers of a job find each other, and which communicator they get."""

from __future__ import annotations

import platform
import sys

import torch

from hocket.comm.alone import AloneCommunicator
from hocket.comm.communicator import Communicator
from hocket.comm.hosts import HostsCommunicator
from hocket.comm.shared import SharedCommunicator
from hocket.config import Config
from hocket.errors import UsageError, WorkerLost
from hocket.job import introductions
from hocket.server.client import open_client
from hocket.server.communicator import ServedCommunicator
from hocket.transport import futex, handoff
from hocket.transport.nccl import NcclGroup
from hocket.transport.process_group import ProcessGroup, Store, StoreLost, open_store, prefixed
from hocket.transport.shared_memory import SharedMemory
from hocket.transport.watch import Watch


def join(config: Config) -> Communicator:
    """Meet the other workers; blocks until all are there or the timeout."""
    _check(config)
    if config.servers:
        return _join_servers(config)
    if config.size == 1:
        return AloneCommunicator()
    shares = config.transport != "gloo" and futex.supported()
    if config.transport == "shared-memory" and not shares:
        raise UsageError("--transport shared-memory needs x86-64 Linux: use --transport auto, which takes Gloo here")
    if config.transport == "auto" and not shares and config.rank == 0:
        print("hocket: shared memory needs x86-64 Linux; using Gloo, which is slower", file=sys.stderr)
    try:
        if shares and (config.local_size == config.size or (config.rendezvous and not config.local_size)):
            return _join_host(config)
        return _join_hosts(config, shares)
    except StoreLost as error:
        raise WorkerLost(
            f"rank {config.rank} waits in hocket.init(), but the store at MASTER_ADDR={config.address}, "
            f"MASTER_PORT={config.port} is gone: see the output of rank 0 ({error})"
        ) from error


def _join_servers(config: Config) -> Communicator:
    """Workers know the servers, and meet there."""
    if config.secret_fd is None:
        raise UsageError("HOCKET_SERVERS is set, and nothing has started servers: use hocket run --servers")
    client = open_client(config, introductions.job_secret(config))
    name = config.host_name or platform.node()
    return ServedCommunicator(client, config.rendezvous or introductions.machine(), name)


def _join_host(config: Config) -> Communicator:
    """All workers are on this host."""
    store = None if config.rendezvous else _open_store(config)  # rank 0's serves the others until all have joined
    name = config.rendezvous
    if store is not None:  # under torchrun rank 0 tells the others its socket through the job's store
        key = f"hocket/socket/{config.restart}"
        if config.rank == 0:
            store.set(key, handoff.new_name())
        name = bytes(store.get(key)).decode()
    assert name is not None
    return SharedCommunicator(SharedMemory.join(name, config.rank, config.size, config.timeout))


def _join_hosts(config: Config, shares: bool) -> Communicator:
    """Workers are on several hosts, or cannot share memory and count as hosts of their own."""
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
    watch = Watch.open(
        config.rank,
        [topology.name_of(rank) for rank in range(config.size)],
        config.timeout,
        met.secret,
        met.address,
        lambda address, port: store.set("watch", f"{port} {address}"),
        lambda: introductions.read_address(store, "watch"),
    )
    if shares:
        shared.gate.numbers = list(topology.local)
        shared.gate.outlook = watch

    def group(name: str, members: list[int]) -> ProcessGroup:
        return ProcessGroup(
            prefixed(store, name), members.index(config.rank), len(members), met.address, config.timeout, watch
        )

    return HostsCommunicator(topology, local, watch, group)


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
    if config.port is None:
        raise UsageError("WORLD_SIZE is set but MASTER_PORT is not: start the script with hocket run or torchrun")
    host = config.rank == 0 and not config.store_is_hosted
    return open_store(config.address, config.port, host=host, timeout=config.timeout)
