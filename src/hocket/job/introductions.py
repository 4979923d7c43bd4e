"""The workers of several hosts introduce themselves to each other, through the store of the job."""

from __future__ import annotations

import json
import os
import secrets
import socket
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from hocket.comm.topology import Topology
from hocket.config import Config
from hocket.errors import JobError, UsageError
from hocket.job.reaching import reach
from hocket.transport import handoff
from hocket.transport.gate import ranks
from hocket.transport.store import Store, StoreLost


@dataclass(frozen=True)
class Introductions:
    """What a worker knows when all have introduced themselves.

    Attributes:
        topology: Who is where.
        address: Of this host, as the others reach it.
        socket: On which the first worker of this host hands out shared memory.
        secret: The job's.
    """

    topology: Topology
    address: str
    socket: str
    secret: bytes


def meet(config: Config, store: Store, *, shares: bool) -> Introductions:
    """Tell the others where this worker is, and hear it of them; collective.

    Args:
        config: Of this worker.
        store: Of this job and start.
        shares: Whether workers of one host share memory; if not, each counts as a host of its own.
    """
    mine = {
        "machine": (here := machine()),
        "host": f"{here} {config.group}",  # whoever started the workers may count one machine as several hosts
        "name": config.host_name or socket.gethostname(),
        "local size": config.local_size,
        "socket": handoff.new_name(),
    }
    known = job_secret(config)
    if config.rank == 0 and known is None:
        mine["secret"] = secrets.token_bytes(32).hex()  # the store is as open as whoever started the workers has it
    store.set(f"worker {config.rank}", json.dumps(mine))
    everyone = _hear_all(store, config)
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
    address = address or reach(store, topology, secret, config.interface)
    return Introductions(topology, address, first["socket"], secret)


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
    """What tells this host from others: those that share it can share memory and see each other's processes."""
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
        with os.fdopen(config.secret_fd, "rb") as pipe:  # which gives it once
            _secrets[key] = pipe.read(32)
    return _secrets[key]


_secrets: dict[tuple[int, str | None], bytes] = {}
