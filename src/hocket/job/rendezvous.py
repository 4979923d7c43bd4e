"""How the workers of a job find each other, and which communicator they get."""

from __future__ import annotations

import dataclasses
import functools
import os
import platform
import signal
import sys
import time
from collections import Counter
from collections.abc import Callable
from typing import Any

import torch

from hocket import specs
from hocket.comm.alone import AloneCommunicator
from hocket.comm.changing_group import RegroupingCommunicator
from hocket.comm.communicator import Communicator, ConnectGpus
from hocket.comm.connectors import Connector, OneHost
from hocket.comm.coordinator_group import MeetingCommunicator
from hocket.comm.hosts_generation import Network, SeveralHosts
from hocket.comm.several_hosts import HostsCommunicator
from hocket.comm.shared import SharedCommunicator
from hocket.config import Config, environment
from hocket.coordinator.coordinator_client import Coordinator, connect, open_board
from hocket.coordinator.hosting import HostedCoordinator
from hocket.coordinator.liveness_client import Watch
from hocket.coordinator.quiet_connection import QuietConnection
from hocket.errors import JobError, ServerLost, TakenForDead, UsageError, WorkerLost
from hocket.events import PipeSink, Stage
from hocket.job import host_groups, introductions
from hocket.server.server_client import Client, open_client
from hocket.transport import futex, handoff
from hocket.transport.door import can_be_reached
from hocket.transport.nccl import NcclGroup
from hocket.transport.requests import encrypted
from hocket.transport.shared_memory import SharedMemory
from hocket.transport.store import AskedStore, Store, StoreLost, open_store, prefixed

_REACH = 2.0  # seconds in which the host of the coordinator has to answer
_GOODBYE = 2.0  # seconds for which a coordinator in this process waits for other workers when this one ends


def join(config: Config) -> Communicator:
    """Meet the other workers; blocks until all are there or the timeout."""
    _check(config)
    if config.servers or (config.size > 1 and config.strategy and specs.parse(config.strategy).meets_at_coordinator):
        return join_at_coordinator(config)
    if config.size == 1:
        return AloneCommunicator()
    shares = config.transport != "gloo" and futex.supported()
    if config.transport == "shared-memory" and not shares:
        raise UsageError("--transport shared-memory needs x86-64 Linux: use --transport auto, which takes TCP here")
    if config.transport == "auto" and not shares and config.rank == 0:
        print("hocket: shared memory needs x86-64 Linux; using TCP, which is slower", file=sys.stderr)
    try:
        if (group := _join_to_go_on(config, shares)) is not None:
            return group
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
    host, replaces = config.rendezvous or introductions.machine(), config.on_loss in ("auto", "replace")
    channels = host_groups.channels_beside_servers(config, secret, client.live)
    return MeetingCommunicator(client, host, name, way, channels, replaces=replaces)


def _join_host(config: Config) -> Communicator:
    """Meet the other workers where all are on this host."""
    store = None if config.rendezvous else _open_store(config)  # rank 0's serves the others until all have joined
    name = config.rendezvous
    if store is not None:  # under torchrun rank 0 tells the others its socket through the job's store
        introductions.compare(config, prefixed(store, f"hocket/{config.restart}"), {})
        key = f"hocket/socket/{config.restart}"
        if config.rank == 0:
            store.set(key, handoff.new_name())
        name = bytes(store.get(key)).decode()
    assert name is not None
    return SharedCommunicator(SharedMemory.join(name, config.rank, config.size, config.timeout))


def _join_to_go_on(config: Config, shares: bool) -> Communicator | None:
    """Meet the other workers at a coordinator: when one of them dies, the others meet there again.

    None if this job cannot do so, or does so only if it is asked to, and nobody has asked for it.
    """
    if config.on_loss == "end":
        return None
    secret = introductions.job_secret(config)
    is_one_host = not config.spans_hosts and config.local_size in (0, config.size)
    # With models on GPUs of several hosts nobody goes on, and where the model will be is not known yet.
    is_asked = config.transport == "tcp" or config.on_loss != "auto"
    can_go_on = shares and (is_one_host or is_asked or config.spans_hosts != "gpus")
    if can_go_on and secret is not None and config.coordinator_port is not None:
        return _meet_to_go_on(config, secret, is_one_host=is_one_host)
    if config.on_loss == "auto":
        return None
    why = "needs hocket run on x86-64 Linux, without --transport gloo"
    if shares and config.on_loss == "replace":
        why = "needs hocket run, which starts new workers: use that, or --on-loss continue"
    elif shares and "TORCHELASTIC_RUN_ID" in environment():
        why = "cannot work under torchrun, which ends all workers when one dies: use hocket run"
    elif shares:
        return _meet_without_launcher(config)
    raise UsageError(
        f"--on-loss {config.on_loss} {why}, leave --on-loss out, or use a strategy with servers, gossip or hogwild, "
        "which go on by themselves"
    )


def _meet_to_go_on(config: Config, secret: bytes, *, is_one_host: bool) -> Communicator:
    """Meet at the coordinator that ``hocket run`` has started."""
    coordinator = _come(config, secret)
    if is_one_host:
        return _going_on(config, coordinator, OneHost(coordinator, config.timeout))
    host, name = config.rendezvous or introductions.machine(), config.host_name or platform.node()
    place = host, name, config.host_address or config.address
    return _going_on(config, coordinator, _connector(config, secret, coordinator, place))


def _meet_without_launcher(config: Config) -> Communicator:
    """Meet at a coordinator that is a thread of rank 0, and ends with it; the job's store says where that is."""
    store = prefixed(_open_store(config), f"hocket/{config.restart}")
    met = introductions.meet(config, store, shares=True)
    topology = met.topology
    is_one_host = len(topology.hosts) == 1
    told, hosted = _host_coordinator(
        dataclasses.replace(
            host_groups.secured_as(config), host_address=met.address, rendezvous=met.socket if is_one_host else None
        ),
        store,
        met.secret,
    )
    try:
        coordinator = _come(told, met.secret)
        if hosted is not None:
            coordinator.on_goodbye = functools.partial(_end_coordinator, hosted)
        connector: Connector = OneHost(coordinator, config.timeout)
        if not is_one_host:
            place = str(topology.host), topology.names[topology.host], met.address
            connector = _connector(told, met.secret, coordinator, place)
        return _going_on(told, coordinator, connector)
    except BaseException:
        if hosted is not None:
            hosted.close()
        raise


def _end_coordinator(hosted: HostedCoordinator) -> None:
    """End the coordinator once all workers have said goodbye, or after a while."""
    end = time.monotonic() + _GOODBYE
    while hosted.service.ledger.live and time.monotonic() < end:
        time.sleep(0.01)
    hosted.close()


def _come(config: Config, secret: bytes) -> Coordinator:
    link, _ = connect(config, secret, config.rank, {"newcomer": config.newcomer})
    return Coordinator(config.rank, config.size, link)


def _connector(config: Config, secret: bytes, coordinator: Coordinator, place: tuple[str, str, str]) -> SeveralHosts:
    """What connects workers of several hosts; ``place`` has a text that tells hosts apart, a name and an address."""
    board, secured = open_board(config, secret), host_groups.secured_as(config)

    def ask(operation: str, head: dict[str, Any], value: bytes) -> tuple[dict[str, Any], bytes]:
        try:
            return board(operation, head, value)
        except ServerLost as error:
            _heed_loss(config, error)
            raise

    coordinator.on_loss = functools.partial(_heed_loss, config)
    network = Network(
        AskedStore(ask, config.timeout),
        secret,
        lambda to: encrypted(to, secured),
        coordinator.live,
        config.timeout,
        QuietConnection(secured, secret, place[1]),
        functools.partial(_end_cut_off, config),
        config.algorithm,
    )
    return SeveralHosts(coordinator, network, *place)


def _going_on(config: Config, coordinator: Coordinator, connector: Connector) -> RegroupingCommunicator:
    return RegroupingCommunicator(
        coordinator,
        connector,
        newcomer=config.newcomer,
        replaces=config.on_loss in ("auto", "replace"),
        asked="" if config.on_loss == "auto" else f"--on-loss {config.on_loss}",
    )


def _end_cut_off(config: Config, why: str) -> None:
    """End this process, which other workers do not reach: they go on without it."""
    if config.events is not None:
        PipeSink(config.events).put(Stage("cut off", words=why))
    else:
        print(f"hocket: rank {config.rank} ends: {why}", file=sys.stderr, flush=True)
    os.kill(os.getpid(), signal.SIGKILL)


def _heed_loss(config: Config, error: JobError) -> None:
    """The coordinator is gone, and the job ends; or it is out of reach of this host, which the others do without."""
    if isinstance(error, TakenForDead):
        _end_cut_off(config, str(error))
    elif not can_be_reached(config.address, config.coordinator_port or 0, _REACH):
        _end_cut_off(config, "it does not reach the coordinator")


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

    between = "Gloo" if config.transport == "gloo" else "TCP"
    refused = Counter[str]()
    groups = host_groups.opener(config, store, met, watch, refused)
    channels = host_groups.channels(config, store, met, watch, refused)
    communicator = HostsCommunicator(topology, local, watch, groups, channels, between)
    communicator.traffic.refused = refused
    return communicator


def _open_watch(config: Config, store: Store, met: introductions.Introductions) -> Watch:
    """The watch over all ranks, at the job's coordinator; where nothing has started one, rank 0 does so in a thread."""
    names = [met.topology.name_of(rank) for rank in range(config.size)]
    if introductions.job_secret(config) is not None and config.coordinator_port is not None:
        return Watch(config, met.secret, names)
    config = dataclasses.replace(host_groups.secured_as(config), host_address=met.address, rendezvous=None)
    config, hosted = _host_coordinator(config, store, met.secret)
    try:
        return Watch(config, met.secret, names, is_of_rank_0=True, hosted=hosted)
    except BaseException:
        if hosted is not None:
            hosted.close()
        raise


def _host_coordinator(config: Config, store: Store, secret: bytes) -> tuple[Config, HostedCoordinator | None]:
    """Have rank 0 start the coordinator in a thread; returns how it is reached, and on rank 0 itself. Collective."""
    hosted = None
    if config.rank == 0:
        hosted = HostedCoordinator(config, secret)
        hosted.service.say = lambda line: print(line, file=sys.stderr, flush=True)
        store.set("coordinator", f"{hosted.said['port']} {hosted.said['address']}")
    try:
        address, port = introductions.read_address(store, "coordinator")
    except BaseException:
        if hosted is not None:
            hosted.close()
        raise
    return dataclasses.replace(config, address=address, coordinator_port=port), hosted


def gpu_connector(config: Config, device: torch.device) -> ConnectGpus:
    """What connects the GPUs of all ranks, of which this rank has ``device``, in each generation; collective."""
    store = prefixed(_open_store(config), f"hocket/{config.restart}/nccl")

    def connect(rank: int, size: int, generation: int, look: Callable[[], None] | None) -> NcclGroup:
        return NcclGroup(prefixed(store, str(generation)), rank, size, config.timeout, device, look)

    return connect


def _check(config: Config) -> None:
    fits = not config.local_size or 0 <= config.local_rank < config.local_size <= config.size
    if config.newcomer:
        return
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
