"""A cluster as TensorFlow's users write it: roles, and an address for each of their tasks."""

from __future__ import annotations

import hashlib
import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

from hocket.errors import UsageError

ROLES = ("chief", "worker", "ps", "evaluator")
_EXAMPLE = '{"chief": ["node1:2222"], "worker": ["node2:2222"], "ps": ["node3:2222"]}'


class Task(NamedTuple):
    """One task of a cluster: ``worker:1``."""

    role: str
    number: int

    def __str__(self) -> str:
        return f"{self.role}:{self.number}"


@dataclass(frozen=True)
class Cluster:
    """Which tasks there are, and where.

    Attributes:
        source: Where it stands, for messages.
        roles: The addresses of each role's tasks.
    """

    source: str
    roles: dict[str, list[str]]

    @property
    def tasks(self) -> list[Task]:
        """Those that make the job, in the order of their numbers in it: chief, workers, parameter servers."""
        return [Task(role, number) for role in ROLES[:3] for number in range(len(self.roles.get(role, ())))]

    @property
    def workers(self) -> list[Task]:
        return [task for task in self.tasks if task.role != "ps"]

    @property
    def servers(self) -> int:
        return len(self.roles.get("ps", ()))

    @property
    def digest(self) -> str:
        """The same text for all who have read the same cluster."""
        return hashlib.sha256(json.dumps(self.roles, sort_keys=True).encode()).hexdigest()

    def address(self, task: Task) -> tuple[str, int]:
        """The host and the port of a task."""
        host, _, port = self.roles[task.role][task.number].rpartition(":")
        return host.strip("[]"), int(port)

    def find(self, text: str) -> Task:
        """The task that ``--task`` names."""
        role, _, number = text.partition(":")
        count = len(self.roles.get(role, ()))
        if not count or not (number or "0").isdecimal() or int(number or 0) >= count:
            known = [str(task) for task in self.tasks]
            known += [f"evaluator:{number}" for number in range(len(self.roles.get("evaluator", ())))]
            raise UsageError(f"--task {text}: {self.source} has {', '.join(known)}")
        return Task(role, int(number or 0))


def read_file(path: Path) -> Cluster:
    """Read a cluster file: JSON or, with the key ``cluster``, what TF_CONFIG has."""
    try:
        told = json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise UsageError(f"--cluster {path}: {error.strerror}; write for example {_EXAMPLE}") from None
    except ValueError as error:
        raise UsageError(f"--cluster {path}: it is no JSON ({error}); write for example {_EXAMPLE}") from None
    return _read(told.get("cluster", told) if isinstance(told, dict) else told, f"--cluster {path}")


def read_tf_config(text: str) -> tuple[Cluster, Task] | None:
    """The cluster and the task that TF_CONFIG tells; None if it tells of no cluster."""
    try:
        told = json.loads(text)
        if not told.get("cluster"):
            return None
        cluster, task = told["cluster"], told["task"]
        role, number = str(task["type"]), int(task["index"])
    except (ValueError, KeyError, TypeError, AttributeError):
        raise UsageError(
            'TF_CONFIG is not understood: it has to be {"cluster": '
            + _EXAMPLE
            + ', "task": {"type": "worker", "index": '
            "0}}; or unset it"
        ) from None
    read = _read(cluster, "TF_CONFIG")
    return read, read.find(f"{role}:{number}")


def _read(told: Any, source: str) -> Cluster:
    if not isinstance(told, dict) or not all(
        isinstance(addresses, list) and all(isinstance(address, str) for address in addresses)
        for addresses in told.values()
    ):
        raise UsageError(f"{source}: a list of addresses is expected for each role: write for example {_EXAMPLE}")
    if unknown := [role for role in told if role not in ROLES]:
        raise UsageError(f"{source}: role {unknown[0]!r}: the roles are {', '.join(ROLES)}")
    cluster = Cluster(source, {role: list(told[role]) for role in ROLES if told.get(role)})
    if not cluster.workers:
        raise UsageError(f"{source}: there is no worker in it: write for example {_EXAMPLE}")
    if len(cluster.roles.get("chief", ())) > 1:
        raise UsageError(f"{source}: it has {len(cluster.roles['chief'])} chiefs: name one, the others are workers")
    seen: dict[str, str] = {}
    for role, addresses in cluster.roles.items():
        for number, address in enumerate(addresses):
            host, _, port = address.rpartition(":")
            if not host or not port.isdecimal() or not 0 < int(port) < 1 << 16:
                raise UsageError(f"{source}: {role}:{number}: {address!r} is no address: write for example node1:2222")
            if address in seen:
                raise UsageError(
                    f"{source}: {address} is there twice, as {seen[address]} and as {role}:{number}: each task needs a "
                    "port of its own"
                )
            seen[address] = f"{role}:{number}"
    return cluster
