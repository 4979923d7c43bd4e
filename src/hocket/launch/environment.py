"""What a worker or server is told through its environment: torchrun's variables, and Hocket's own."""

from __future__ import annotations

import secrets
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from hocket import config
from hocket.launch import leftovers, machine

_OF_ONE = ("RANK", "LOCAL_RANK", "ROLE_RANK", "HOCKET_SERVER")  # which one process has


@dataclass(frozen=True)
class Job:
    """What to start.

    Attributes:
        command: The script (or ``-m`` and the module) and its arguments.
        size: How many workers.
        settings: Values for the ``HOCKET_*`` variables, by setting.
        mark: Carried by every process of the job.
        secret: Known to the job's processes alone; never in an argument list, an environment or a log.
    """

    command: tuple[str, ...]
    size: int
    settings: dict[str, str] = field(default_factory=dict)
    mark: str = field(default_factory=lambda: secrets.token_hex(16))
    secret: bytes = field(default_factory=lambda: secrets.token_bytes(32), repr=False)

    @property
    def servers(self) -> int:
        """How many parameter servers."""
        return int(self.settings.get("servers") or 0)


@dataclass(frozen=True)
class Place:
    """One of the hosts of a job over several, and the workers and servers there.

    Attributes:
        number: Of the host, from 0; those without workers come last.
        hosts: How many hosts have workers.
        name: The host as the user wrote it.
        first: The rank of its first worker.
        count: How many workers it has.
        address: Where the other hosts reach it.
        interface: The network interface of this address.
        master: The address of the host on which server 0 is, or without servers rank 0.
        servers: The numbers of the servers that it has.
    """

    number: int
    hosts: int
    name: str
    first: int
    count: int
    address: str
    interface: str
    master: str
    servers: Sequence[int] = ()

    def mark(self, job: Job) -> str:
        """Found on this host's processes of the job only; two hosts may share a kernel."""
        return f"{job.mark}-{self.number}"


def of_worker(
    job: Job, local_rank: int, port: int, place: Place | None = None, base: Mapping[str, str] | None = None
) -> dict[str, str]:
    """The environment of one worker.

    Args:
        job: What it belongs to.
        local_rank: Its number on its host.
        port: MASTER_PORT.
        place: Its host; without one, the job has this host only.
        base: What to begin with, instead of the environment of this process.
    """
    rank = local_rank if place is None else place.first + local_rank
    env = _of_both(job, port, place, base)
    env.update(RANK=str(rank), LOCAL_RANK=str(local_rank), ROLE_RANK=str(rank))
    return config.hide(env) if env.get(config.SETTINGS["hide-torch-env"].variable) == "on" else env


def of_server(
    job: Job, number: int, port: int, place: Place | None = None, base: Mapping[str, str] | None = None
) -> dict[str, str]:
    """The environment of server ``number``: that of a worker of its host, without a rank; arguments as for one."""
    env = _of_both(job, port, place, base)
    env["HOCKET_SERVER"] = str(number)
    return env


def _of_both(job: Job, port: int, place: Place | None, base: Mapping[str, str] | None) -> dict[str, str]:
    """What workers and servers have in common; they share the cores of their host, for idle threads spin a while."""
    sharing = job.size + job.servers if place is None else place.count + len(place.servers)
    env = {name: value for name, value in (base or config.environment()).items() if not name.startswith(config.HIDDEN)}
    for name in (*(config.SETTINGS[name].variable for name in config.FOR_HOSTS), *_OF_ONE):
        env.pop(name, None)  # for the launcher alone, or of a job around this one
    if not env.get("OMP_NUM_THREADS"):
        env["OMP_NUM_THREADS"] = str(max(1, machine.cores() // sharing))
    env.update(
        GROUP_RANK="0",
        WORLD_SIZE=str(job.size),
        LOCAL_WORLD_SIZE=str(job.size if place is None else place.count),
        GROUP_WORLD_SIZE="1",
        ROLE_WORLD_SIZE=str(job.size),
        ROLE_NAME="default",
        MASTER_ADDR="127.0.0.1",
        MASTER_PORT=str(port),
        PYTHONUNBUFFERED="1",
        HOCKET_RENDEZVOUS=f"hocket-{job.mark}",
    )
    if place is not None:
        env.update(_of_place(job, place, env))
    env[leftovers.VARIABLE] = job.mark
    env[leftovers.LAUNCHER] = leftovers.identity()
    for name, value in {"servers": str(job.servers), **job.settings}.items():
        env[config.SETTINGS[name].variable] = value
    return env


def _of_place(job: Job, place: Place, env: Mapping[str, str]) -> dict[str, str]:
    told = {
        "GROUP_RANK": str(place.number),
        "GROUP_WORLD_SIZE": str(place.hosts),
        "MASTER_ADDR": place.master,
        "HOCKET_RENDEZVOUS": f"hocket-{place.mark(job)}",
        "HOCKET_HOST_NAME": place.name,
        "HOCKET_ADDRESS": place.address,
    }
    for name in ("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME"):
        if not env.get(name):
            told[name] = place.interface
    return told
