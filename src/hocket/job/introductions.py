"""The workers of several hosts introduce themselves to each other, through the store of the job.

Where nobody has said which addresses connect the hosts (torchrun, schedulers), the hosts try each other's: the first
worker of each host listens and tries, and all read in the store what came of it.
"""

from __future__ import annotations

import json
import os
import secrets
import socket
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from hocket.comm.topology import Topology
from hocket.config import Config
from hocket.errors import JobError, UsageError
from hocket.transport import handoff
from hocket.transport.interfaces import Listener, Target, addresses, try_addresses
from hocket.transport.routes import Node, choose, explain
from hocket.transport.store import Store, StoreLost
from hocket.transport.waiting import ranks

_ALIKE = ("transport", "algorithm", "codec")  # settings that must be the same for all workers
_SECONDS = 5.0  # seconds in which hosts try each other's addresses


@dataclass(frozen=True)
class Introductions:
    """What a worker knows when all have introduced themselves.

    Attributes:
        topology: Which rank is on which host.
        address: The address at which the others reach this host.
        socket: The socket on which the first worker of this host hands out shared memory.
        secret: The secret of the job.
    """

    topology: Topology
    address: str
    socket: str
    secret: bytes


def meet(config: Config, store: Store, *, shares: bool) -> Introductions:
    """Tell the others where this worker is, and hear where they are; collective.

    Args:
        config: The configuration of this worker.
        store: The store of this start of the job.
        shares: Whether workers of one host share memory; if not, each counts as a host of its own.
    """
    mine = {
        "machine": (here := machine()),
        "host": f"{here} {config.group}",  # the launcher may count one machine as several hosts
        "name": config.host_name or socket.gethostname(),
        "local size": config.local_size,
        "socket": handoff.new_name(),
    }
    known = job_secret(config)
    if config.rank == 0 and known is None:
        mine["secret"] = secrets.token_bytes(32).hex()  # the store is as open as the launcher has made it
    everyone = compare(config, store, mine)
    hosts: dict[Any, list[int]] = {}
    for rank, other in enumerate(everyone):
        hosts.setdefault(other["host"] if shares else rank, []).append(rank)
    grouped = tuple(tuple(members) for members in hosts.values())
    topology = Topology(config.rank, grouped, _name([everyone[members[0]] for members in grouped]))
    _check_sizes(config, topology, everyone, shares)
    one_machine = len({other["machine"] for other in everyone}) == 1
    first = everyone[topology.local[0]]
    secret = known or bytes.fromhex(everyone[0]["secret"])
    address = "127.0.0.1" if one_machine else config.host_address
    address = address or _find_address(config, store, topology, secret)
    return Introductions(topology, address, first["socket"], secret)


def compare(config: Config, store: Store, mine: dict[str, Any]) -> list[dict[str, Any]]:
    """Tell the others what this worker says of itself, and hear what each has said, by rank; collective.

    Raises:
        UsageError: settings differ with which workers would wait for each other in different places; on all ranks.
    """
    settings = {f"HOCKET_{name.upper()}": getattr(config, name) for name in _ALIKE}
    store.set(f"worker {config.rank}", json.dumps({**mine, "settings": settings}))
    everyone = _hear_all(store, config)
    for name in settings:
        values: dict[str, list[int]] = {}
        for rank, other in enumerate(everyone):
            values.setdefault(other["settings"][name], []).append(rank)
        if len(values) > 1:
            _wait_for_readers(store, config)
            said = "; ".join(f"{value} on {ranks(who)}" for value, who in values.items())
            raise UsageError(f"{name} differs between workers: {said}. Set it to the same for all of them")
    return everyone


def read_address(store: Store, key: str) -> tuple[str, int]:
    """The address and port that another rank has announced."""
    port, _, address = bytes(store.get(key)).decode().partition(" ")
    return address, int(port)


def _hear_all(store: Store, config: Config) -> list[dict[str, Any]]:
    keys = [f"worker {rank}" for rank in range(config.size)]
    try:
        return [json.loads(bytes(store.get(key))) for key in keys]
    except StoreLost:
        raise
    except RuntimeError as error:
        absent = [rank for rank, key in enumerate(keys) if not store.check([key])]
        raise JobError(
            f"{ranks(absent)} did not reach hocket.init() within {config.timeout:g} s: see their output"
        ) from error


def _name(hosts: list[dict[str, Any]]) -> tuple[str, ...]:
    """The names of the hosts; machines that call themselves the same (localhost) get a number."""
    machines: dict[str, list[str]] = {}
    for host in hosts:
        if host["machine"] not in machines.setdefault(host["name"], []):
            machines[host["name"]].append(host["machine"])
    numbers = [machines[host["name"]].index(host["machine"]) for host in hosts]
    return tuple(host["name"] + (f" ({n + 1})" if n else "") for host, n in zip(hosts, numbers, strict=True))


def _check_sizes(config: Config, topology: Topology, everyone: list[dict[str, Any]], shares: bool) -> None:
    if not shares:
        return
    for members in topology.hosts:
        sizes = {everyone[rank]["local size"] for rank in members}
        if not sizes <= {len(members), 0}:
            raise UsageError(
                f"{len(members)} workers are on {everyone[members[0]]['name']} ({ranks(members)}), and "
                f"LOCAL_WORLD_SIZE there is {', '.join(map(str, sorted(sizes)))}: set it to the number of workers there"
            )


def machine() -> str:
    """A text that tells this host from others: processes with the same text can share memory."""
    try:
        boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
        spaces = [str(Path(f"/proc/self/ns/{kind}").readlink()) for kind in ("net", "pid")]
        return f"{boot} {' '.join(spaces)}"
    except OSError:
        return socket.gethostname()


def job_secret(config: Config) -> bytes | None:
    """The job's secret, as the launcher has handed it over; None if something else has started the workers."""
    if config.secret_fd is None:
        return None
    key = (config.secret_fd, config.rendezvous)
    if key not in _secrets:
        with os.fdopen(config.secret_fd, "rb") as pipe:  # the pipe gives the secret once
            _secrets[key] = pipe.read(32)
    return _secrets[key]


_secrets: dict[tuple[int, str | None], bytes] = {}


def _find_address(config: Config, store: Store, topology: Topology, secret: bytes) -> str:
    """The address of this host that all others reach; collective.

    Raises:
        UsageError: there is no such address; on all ranks.
    """
    numbers, interface = range(len(topology.hosts)), config.interface
    if topology.local_rank == 0:
        _try_others(store, topology, secret, interface)
    listed = [_read(store, f"listens {number}") for number in numbers]
    reached = [_read(store, f"reaches {number}") for number in numbers]
    _wait_for_readers(store, config)
    for number, there in enumerate(listed):
        if not there["addresses"]:
            raise UsageError(
                f"{topology.names[number]} has no interface {interface!r} that is up, but "
                f"{', '.join(there['interfaces'])}: use HOCKET_INTERFACE={interface},NAME"
            )
    nodes = [
        Node(
            topology.names[number],
            [(name, address) for name, address in listed[number]["addresses"]],
            reached_by={topology.names[o]: set(reached[o][str(number)]) for o in numbers if o != number},
        )
        for number in numbers
    ]
    routes = [choose(node, same_network=False) for node in nodes]
    for node, route in zip(nodes, routes, strict=True):
        if route is None:
            raise UsageError(f"{node.name}: {explain(node, interface)}")
    mine = routes[topology.host]
    assert mine is not None
    return mine[1]


def _try_others(store: Store, topology: Topology, secret: bytes, interface: str | None) -> None:
    others = [number for number in range(len(topology.hosts)) if number != topology.host]
    listener = Listener(secret, topology.host)
    try:
        names = list(dict.fromkeys(name for name, _ in addresses()))
        here = {"port": listener.port, "addresses": addresses(interface), "interfaces": names}
        store.set(f"listens {topology.host}", json.dumps(here))
        targets = []
        for number in others:
            there = _read(store, f"listens {number}")
            targets += [Target(number, address, there["port"]) for _, address in there["addresses"]]
        found = try_addresses(targets, secret, _SECONDS)
        by_host = {n: [target.address for target in found if target.number == n] for n in others}
        store.set(f"reaches {topology.host}", json.dumps(by_host))
        for number in others:
            store.get(f"reaches {number}")  # until then other hosts may still try this one
    finally:
        listener.close()


def _wait_for_readers(store: Store, config: Config) -> None:
    """Wait until all ranks have read the results, since the store may end with rank 0."""
    deadline = time.monotonic() + _SECONDS
    store.add("have read", 1)
    while config.rank == 0 and store.add("have read", 0) < config.size and time.monotonic() < deadline:
        time.sleep(0.01)


def _read(store: Store, key: str) -> Any:
    return json.loads(bytes(store.get(key)))
