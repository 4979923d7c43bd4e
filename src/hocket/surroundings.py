"""What has started this process as one of several: a step of Slurm, mpirun, a JobSet, or the text of TF_CONFIG.

Each says so in variables of its own. They count where there is more than one task, and nobody has said otherwise: with
``hocket run``, or with the six plain variables (RANK, WORLD_SIZE …).
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import re
import socket
import subprocess
from collections.abc import Mapping
from dataclasses import dataclass

from hocket import clusters
from hocket.errors import UsageError

_STEP = 1 << 31  # from here on, Slurm's step numbers are no steps of srun but batch scripts and shells
_FIRST_PORT, _PORTS = 20_000, 10_000  # below those that systems give to outgoing connections


@dataclass(frozen=True)
class Surroundings:
    """One task of several, in the words of what has started it.

    Attributes:
        by: What has started it: "Slurm", "MPI", "JobSet", "TF_CONFIG" or "--cluster".
        sign: How that is known: the variable and its value.
        number: The number of this task, from 0.
        count: How many tasks there are.
        local_number: The number of this task among those of its host; None if that is not known.
        local_count: How many tasks its host has; 0 if that is not known.
        node: The number of its host; None if that is not known.
        host: The name of its host.
        first: Where task 0 is reached; empty if that is not known.
        port: The port that is meant for that; None if there is none in particular.
        start: Names this start among all others; empty if nothing does.
        shares_home: Whether its hosts share a home folder, as they usually do under ``by``.
        servers: How many of the tasks, the last ones, are parameter servers.
        names: What its user calls each task, if there are names.
    """

    by: str
    sign: str
    number: int
    count: int
    local_number: int | None
    local_count: int
    node: int | None
    host: str
    first: str
    port: int | None
    start: str
    shares_home: bool = False
    servers: int = 0
    names: tuple[str, ...] = ()

    @property
    def is_one_host(self) -> bool:
        """Whether all tasks are known to be on this host."""
        return self.local_count == self.count

    def meeting(self, environ: Mapping[str, str]) -> tuple[str, int]:
        """The address and the port at which task 0 waits for the others: MASTER_ADDR and MASTER_PORT, if they are set.

        Raises:
            UsageError: nothing says where that is.
        """
        address = environ.get("MASTER_ADDR") or ("127.0.0.1" if self.is_one_host else self.first)
        if not address:
            raise UsageError(
                f"{self.sign}, on several hosts, and {self.by} does not say where task 0 is: set MASTER_ADDR to its "
                "host on all of them (mpirun -x MASTER_ADDR=node1 …)"
            )
        given = environ.get("MASTER_PORT", "")
        if given.isdecimal():
            return address, int(given)
        if self.port is None and not self.start:
            raise UsageError(
                f"{self.sign}, and {self.by} gives this start no name of its own, from which the tasks could choose a "
                "port: set MASTER_PORT to a free one for all of them"
            )
        return address, self.port or _FIRST_PORT + int.from_bytes(self.digest[:4], "big") % _PORTS

    @property
    def digest(self) -> bytes:
        """Bytes that are the same for all tasks of this start, and no secret."""
        return hashlib.sha256(f"hocket {self.by} {self.start} {os.getuid()}".encode()).digest()

    def variables(self, environ: Mapping[str, str]) -> dict[str, str]:
        """The plain variables that make this task a worker; see ``meeting``.

        Raises:
            UsageError: it needs a launcher.
        """
        if self.servers:
            raise UsageError(
                f"{self.by} names {self.servers} parameter server{'s' if self.servers > 1 else ''}, which only hocket "
                "run starts: write hocket run in place of python, on all machines"
            )
        address, port = self.meeting(environ)
        told = {"RANK": self.number, "WORLD_SIZE": self.count, "MASTER_ADDR": address, "MASTER_PORT": port}
        if self.local_number is not None and self.local_count:
            told |= {"LOCAL_RANK": self.local_number, "LOCAL_WORLD_SIZE": self.local_count}
        if self.node is not None:
            told["GROUP_RANK"] = self.node
        return {name: str(value) for name, value in told.items()}


def find(environ: Mapping[str, str]) -> Surroundings | None:
    """The surroundings of this process; None if it is alone, or if nothing says how many tasks there are."""
    if "WORLD_SIZE" in environ or "HOCKET_JOB" in environ:  # somebody has said it already
        return None
    for look in (_open_mpi, _hydra, _slurm, _jobset, _tensorflow):
        found = look(environ)
        if found is not None and found.count > 1:
            return found
    return None


def _open_mpi(environ: Mapping[str, str]) -> Surroundings | None:
    count = _number(environ, "OMPI_COMM_WORLD_SIZE")
    start = environ.get("PMIX_NAMESPACE") or environ.get("OMPI_MCA_ess_base_jobid", "")
    return _mpi(environ, "OMPI_COMM_WORLD_SIZE", count, "OMPI_COMM_WORLD_RANK",
                ("OMPI_COMM_WORLD_LOCAL_RANK", "OMPI_COMM_WORLD_LOCAL_SIZE"), start)  # fmt: skip


def _hydra(environ: Mapping[str, str]) -> Surroundings | None:
    """What MPICH and Intel MPI say. Where srun speaks their protocol, Slurm says more."""
    count = _number(environ, "PMI_SIZE")
    if count == _step_size(environ) and environ.get("PMI_RANK") == environ.get("SLURM_PROCID"):
        return None
    start = environ.get("PMI_JOBID") or environ.get("PMI_PORT", "")
    if not start and _number(environ, "MPI_LOCALNRANKS") == count:
        start = _parent()  # all tasks of one host have the same
    return _mpi(environ, "PMI_SIZE", count, "PMI_RANK", ("MPI_LOCALRANKID", "MPI_LOCALNRANKS"), start)


def _mpi(
    environ: Mapping[str, str], sign: str, count: int, number: str, local: tuple[str, str], start: str
) -> Surroundings | None:
    if not count:
        return None
    return Surroundings(
        "MPI", f"{sign}={count}", _number(environ, number), count, _number(environ, local[0]) if local[1] in environ
        else None, _number(environ, local[1]), None, socket.gethostname(), "", None, start, shares_home=True,
    )  # fmt: skip


def _step_size(environ: Mapping[str, str]) -> int:
    """How many tasks this step of srun has; 0 if this process is in none."""
    if "SLURM_PROCID" not in environ or not 0 <= _number(environ, "SLURM_STEP_ID", -1) < _STEP:
        return 0
    return _number(environ, "SLURM_STEP_NUM_TASKS") or _number(environ, "SLURM_NTASKS")


def _slurm(environ: Mapping[str, str]) -> Surroundings | None:
    count = _step_size(environ)
    if not count:
        return None
    nodes = expand_nodes(environ.get("SLURM_STEP_NODELIST") or environ.get("SLURM_NODELIST", ""))
    tasks = expand_tasks(environ.get("SLURM_STEP_TASKS_PER_NODE", ""))
    node = _number(environ, "SLURM_NODEID")
    local = tasks[node] if node < len(tasks) and len(tasks) == len(nodes) else 0
    job, step = environ.get("SLURM_JOB_ID") or environ.get("SLURM_JOBID", ""), environ["SLURM_STEP_ID"]
    return Surroundings(
        "Slurm", f"SLURM_NTASKS={count}", _number(environ, "SLURM_PROCID"), count, _number(environ, "SLURM_LOCALID"),
        local, node, environ.get("SLURMD_NODENAME") or socket.gethostname(),
        _address(nodes[0]) if len(nodes) > 1 and not environ.get("MASTER_ADDR") else "", None,
        f"{job}.{step}.{environ.get('SLURM_RESTART_COUNT', '0')}", shares_home=True,
    )  # fmt: skip


def _jobset(environ: Mapping[str, str]) -> Surroundings | None:
    """Pods of a JobSet, which have names of their own; HOCKET_PODS says how many there are."""
    name, replicated = environ.get("JOBSET_NAME", ""), environ.get("REPLICATED_JOB_NAME", "")
    if not name or not replicated or "JOB_COMPLETION_INDEX" not in environ:
        return None
    count = _number(environ, "HOCKET_PODS")
    if not count:
        raise UsageError(
            f"JOBSET_NAME={name}, and HOCKET_PODS, the number of its pods, is not set: hocket template k8s sets it"
        )
    return Surroundings(
        "JobSet", f"JOBSET_NAME={name}, HOCKET_PODS={count}", _number(environ, "JOB_COMPLETION_INDEX"), count, 0, 1,
        None, socket.gethostname(), f"{name}-{replicated}-0-0.{name}", None, name,
    )  # fmt: skip


def _tensorflow(environ: Mapping[str, str]) -> Surroundings | None:
    text = environ.get("TF_CONFIG", "")
    if not text:
        return None
    told = clusters.read_tf_config(text)
    return None if told is None else of_cluster(*told, "TF_CONFIG")


def of_cluster(cluster: clusters.Cluster, task: clusters.Task, by: str) -> Surroundings:
    """The place of a task in a cluster that its user has written down.

    Raises:
        UsageError: it has none: it is an evaluator, which would train beside the job.
    """
    tasks = cluster.tasks
    if task.role == "evaluator":
        raise UsageError(
            f"{by}: {task} is no part of the job, and would train alone: do not start this task; rank 0 evaluates in "
            "the script, or another program reads the checkpoints"
        )
    host, port = cluster.address(tasks[0])
    return Surroundings(
        by, f"{by} with {len(tasks)} tasks, of which this is {task}", tasks.index(task), len(tasks), None, 0, None,
        socket.gethostname(), host, port, cluster.digest, servers=cluster.servers,
        names=tuple(f"{each} ({cluster.roles[each.role][each.number]})" for each in tasks),
    )  # fmt: skip


def expand_nodes(text: str) -> list[str]:
    """The names in a list of Slurm's: ``a[1-3,07],b`` is a1, a2, a3, a07, b."""
    names: list[str] = []
    for part in re.findall(r"(?:[^,\[]|\[[^\]]*\])+", text):
        found = [""]
        for plain, ranges in re.findall(r"([^\[]+)|\[([^\]]*)\]", part):
            ends = [plain] if plain else [number for each in ranges.split(",") for number in _range(each)]
            found = [begun + end for begun in found for end in ends]
        names += found
    return names


def expand_tasks(text: str) -> list[int]:
    """How many tasks each node has, in Slurm's short form: ``2(x3),1`` is 2, 2, 2, 1."""
    found: list[int] = []
    for count, _, times in re.findall(r"(\d+)(\(x(\d+)\))?", text):
        found += [int(count)] * int(times or 1)
    return found


def _range(text: str) -> list[str]:
    first, _, last = text.partition("-")
    if not last:
        return [first]
    return [str(number).zfill(len(first)) for number in range(int(first), int(last) + 1)]


def _address(node: str) -> str:
    """A name or an address that leads to a node: its own name, unless only Slurm knows where that is."""
    try:
        socket.getaddrinfo(node, None)
    except OSError:
        with contextlib.suppress(OSError, subprocess.SubprocessError):
            said = subprocess.run(
                ["scontrol", "-o", "show", "node", node], capture_output=True, text=True, timeout=10, check=True
            )
            if found := re.search(r"\bNodeAddr=(\S+)", said.stdout):
                return found[1]
    return node


def _parent() -> str:
    """What names the parent of this process for good."""
    try:
        with open(f"/proc/{os.getppid()}/stat", "rb") as stat:  # noqa: PTH123 - a path of the kernel's
            return f"{os.getppid()}@{stat.read().rpartition(b')')[2].split()[19].decode()}"
    except OSError:
        return str(os.getppid())


def _number(environ: Mapping[str, str], name: str, default: int = 0) -> int:
    text = environ.get(name, "")
    return int(text) if text.isdecimal() else default
