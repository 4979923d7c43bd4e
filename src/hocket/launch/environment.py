"""What a job is, which processes each host has of it, and their environment: torchrun's variables and our own."""

from __future__ import annotations

import os
import secrets
import socket
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import NamedTuple

import hocket
from hocket import config
from hocket.launch import leftovers, machine
from hocket.launch.crew import CrewMember

_OF_ONE = ("RANK", "LOCAL_RANK", "ROLE_RANK", "HOCKET_SERVER", "HOCKET_COORDINATOR", "HOCKET_NEWCOMER",
           "HOCKET_SPARE_FD", "HOCKET_SPANS_HOSTS")  # variables of one process  # fmt: skip
_AS_HOROVOD = str(Path(hocket.__file__).parent / "horovod" / "shadow")  # where 'import horovod' finds Hocket's own


@dataclass(frozen=True)
class Job:
    """What to start.

    Attributes:
        command: The script (or ``-m`` and the module) and its arguments.
        size: How many workers there are at the start.
        settings: Values for the ``HOCKET_*`` variables, by setting.
        mark: Carried by every process of the job.
        secret: Known to the job's processes alone; never in an argument list, an environment or a log.
        most: The most workers that it may ever have; None if there is no bound.
    """

    command: tuple[str, ...]
    size: int
    settings: dict[str, str] = field(default_factory=dict)
    mark: str = field(default_factory=lambda: secrets.token_hex(16))
    secret: bytes = field(default_factory=lambda: secrets.token_bytes(32), repr=False)
    most: int | None = None

    @property
    def servers(self) -> int:
        """How many parameter servers."""
        return int(self.settings.get("servers") or 0)

    @property
    def spares(self) -> int:
        """How many processes stand by."""
        return int(self.settings.get("spares") or 0)

    def setting(self, name: str) -> str:
        """The value of a setting, as a text."""
        return self.settings.get(name) or config.SETTINGS[name].default

    @property
    def has_coordinator(self) -> bool:
        """Whether a coordinator is needed: one worker alone has nobody to meet."""
        return self.size > 1 or self.servers > 0


class Ports(NamedTuple):
    """TCP ports on the host at whose address all meet: MASTER_PORT, and the coordinator's."""

    master: int
    coordinator: int


@dataclass(frozen=True)
class HostPart:
    """What one of the hosts has of a job over several: its workers and servers, and where it is.

    Attributes:
        number: The number of the host, from 0; hosts without workers come last.
        hosts: How many hosts have workers.
        name: The host as the user wrote it.
        first: The rank of its first worker.
        count: How many workers it has.
        address: The address at which other hosts reach this host.
        interface: The network interface of this address.
        master: The address of host 0, which has rank 0 and the coordinator.
        servers: The numbers of the servers on this host.
        spares: The numbers of the processes that stand by there from the beginning.
        slots: How many workers it may have.
        spans: Whether workers of other hosts are in the job, or may come.
        near_gpus: Whether a host with which the job began has GPUs.
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
    spares: Sequence[int] = ()
    slots: int = 0
    spans: bool = True
    near_gpus: bool = False

    def mark(self, job: Job) -> str:
        """The mark of this host's processes of the job alone: two hosts may share a kernel."""
        return f"{job.mark}-{self.number}"


def members(job: Job, part: HostPart | None = None) -> list[CrewMember]:
    """The processes of a job that one host has, workers first; without ``part``, this host has all of them."""
    here = socket.gethostname() if part is None else part.name
    workers = range(job.size) if part is None else range(part.first, part.first + part.count)
    servers = range(job.servers) if part is None else part.servers
    has_coordinator = job.has_coordinator and (part is None or part.number == 0)
    return [
        *(CrewMember(rank, here) for rank in workers),
        *(CrewMember(number, here, "server") for number in servers),
        *([CrewMember(0, here, "coordinator")] if has_coordinator else []),
        *(CrewMember(number, here, "spare") for number in (range(job.spares) if part is None else part.spares)),
    ]


def variables(
    job: Job, member: CrewMember, ports: Ports, part: HostPart | None = None, base: Mapping[str, str] | None = None
) -> dict[str, str]:
    """The environment of one process of the job.

    Args:
        job: The job to which the process belongs.
        member: The process; one that runs no script has the environment of a worker of its host, without a rank.
        ports: For TCP.
        part: The host of the process; without one, the job has this host only.
        base: The environment to begin with, instead of that of this process.
    """
    env = _of_everyone(job, member, ports, part, base)
    if member.role == "server":
        env["HOCKET_SERVER"] = str(member.number)
    if member.role == "coordinator":
        env["HOCKET_COORDINATOR"] = "1"
    if member.is_newcomer or member.role == "spare":
        env["HOCKET_NEWCOMER"] = "1"
    if member.is_worker:
        env.update(RANK=str(member.number), LOCAL_RANK=str(member.local_rank), ROLE_RANK=str(member.number))
    elif member.role != "spare":
        return env
    return config.hide(env) if env.get(config.SETTINGS["hide-torch-env"].variable) == "on" else env


def local_size(job: Job, member: CrewMember, part: HostPart | None) -> int:
    """How many workers the host of ``member`` has: as many as at the start, unless the launcher says otherwise."""
    return member.local_size or (job.size if part is None else part.count)


def _of_everyone(
    job: Job, member: CrewMember, ports: Ports, part: HostPart | None, base: Mapping[str, str] | None
) -> dict[str, str]:
    """What all processes of a host have in common. They share its cores evenly: idle threads of torch spin a while."""
    workers = local_size(job, member, part)
    sharing = max(1, workers + (job.servers if part is None else len(part.servers)))
    env = {name: value for name, value in (base or config.environment()).items() if not name.startswith(config.HIDDEN)}
    for name in (*(config.SETTINGS[name].variable for name in config.FOR_HOSTS), *_OF_ONE):
        env.pop(name, None)  # what is for the launcher alone, or comes from a job around this one
    if not env.get("OMP_NUM_THREADS"):
        env["OMP_NUM_THREADS"] = str(max(1, machine.cores() // sharing))
    env.update(
        GROUP_RANK="0",
        WORLD_SIZE=str(job.size),
        LOCAL_WORLD_SIZE=str(workers),
        GROUP_WORLD_SIZE="1",
        ROLE_WORLD_SIZE=str(job.size),
        ROLE_NAME="default",
        MASTER_ADDR="127.0.0.1",
        MASTER_PORT=str(ports.master),
        HOCKET_COORDINATOR_PORT=str(ports.coordinator),
        PYTHONUNBUFFERED="1",
        HOCKET_RENDEZVOUS=f"hocket-{job.mark}",
    )
    if part is not None:
        env.update(_of_part(job, part, env))
    env[leftovers.VARIABLE] = job.mark
    env[leftovers.LAUNCHER] = leftovers.identity()
    for name, value in {"servers": str(job.servers), **job.settings}.items():
        env[config.SETTINGS[name].variable] = value
    if env.get(config.SETTINGS["as-horovod"].variable) == "on":
        before = [path for path in env.get("PYTHONPATH", "").split(os.pathsep) if path not in ("", _AS_HOROVOD)]
        env["PYTHONPATH"] = os.pathsep.join([_AS_HOROVOD, *before])
    return env


def _of_part(job: Job, part: HostPart, env: Mapping[str, str]) -> dict[str, str]:
    told = {
        "GROUP_RANK": str(part.number),
        "GROUP_WORLD_SIZE": str(part.hosts),
        "MASTER_ADDR": part.master,
        "HOCKET_RENDEZVOUS": f"hocket-{part.mark(job)}",
        "HOCKET_HOST_NAME": part.name,
        "HOCKET_ADDRESS": part.address,
        **({"HOCKET_SPANS_HOSTS": "gpus" if part.near_gpus else "1"} if part.spans else {}),
    }
    for name in ("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME"):
        if not env.get(name):
            told[name] = part.interface
    return told
