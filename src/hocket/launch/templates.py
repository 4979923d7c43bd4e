"""What Kubernetes and SkyPilot are told to run a job on several machines: a JobSet, or a task, in YAML."""

from __future__ import annotations

import re
import shlex
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from hocket.errors import UsageError

_NAME = re.compile(r"[a-z]([-a-z0-9]{0,38}[a-z0-9])?")
_PLAIN = re.compile(r"[A-Za-z/][\w./@-]*")  # texts that YAML takes for nothing else
_WORDS = {"true", "false", "yes", "no", "on", "off", "null", "y", "n"}
_PORT = 29400


@dataclass(frozen=True)
class Wanted:
    """A job as its user wants it elsewhere.

    Attributes:
        command: The script, or ``-m`` and the module, and its arguments.
        nodes: On how many machines, each with one worker.
        image: The image, with Hocket, torch and the script in it.
        name: The name of the job.
        gpus: The GPU of each machine: 1, or its kind, A100:1; empty for none.
        cpus: How many cores each machine has; None is what there is.
        settings: Flags of ``hocket run``, by name.
    """

    command: Sequence[str]
    nodes: int
    image: str
    name: str
    gpus: str = ""
    cpus: int | None = None
    settings: Sequence[tuple[str, str]] = ()

    def check(self) -> None:
        """Raise a UsageError if a value makes no sense."""
        if self.nodes < 1:
            raise UsageError(f"-n {self.nodes}: a job needs at least one machine, for example -n 2")
        if not _NAME.fullmatch(self.name):
            raise UsageError(
                f"--name {self.name}: must be at most 40 letters a-z, digits and dashes, as names in DNS are: for "
                "example --name train"
            )

        count = self.gpus.rpartition(":")[2]
        if count.isdecimal() and int(count) > 1:
            remedy = f"-n {self.nodes * int(count)} --gpus {self.gpus.removesuffix(count)}1"
            raise UsageError(f"--gpus {self.gpus}: each machine has one worker, which uses one GPU: use {remedy}")

    @property
    def run(self) -> list[str]:
        """The command on each machine."""
        flags = [part for name, value in self.settings for part in (f"--{name}", value)]
        return ["hocket", "run", *flags, *self.command]


def jobset(wanted: Wanted) -> dict[str, Any]:
    """A JobSet of Kubernetes, whose pods find each other by their names; the job's secret is a Secret of that name."""
    limits: dict[str, Any] = {"nvidia.com/gpu": int(wanted.gpus)} if wanted.gpus else {}
    if wanted.cpus is not None:
        limits["cpu"] = wanted.cpus
    told = {
        "JOBSET_NAME": wanted.name,
        "REPLICATED_JOB_NAME": "workers",
        "HOCKET_PODS": str(wanted.nodes),
        "HOCKET_SECRET_FILE": "/etc/hocket/secret",
    }
    container: dict[str, Any] = {
        "name": "worker",
        "image": wanted.image,
        "command": wanted.run,
        "env": [{"name": name, "value": value} for name, value in told.items()],
        "volumeMounts": [
            {"name": "secret", "mountPath": "/etc/hocket", "readOnly": True},
            {"name": "memory", "mountPath": "/dev/shm"},
        ],
    }
    if limits:
        container["resources"] = {"limits": limits}
    pod = {
        "restartPolicy": "Never",
        "terminationGracePeriodSeconds": 60,  # SIGTERM is a notice: a worker finishes its batch
        "containers": [container],
        "volumes": [
            {"name": "secret", "secret": {"secretName": wanted.name, "defaultMode": 0o400}},
            {"name": "memory", "emptyDir": {"medium": "Memory"}},
        ],
    }
    job: dict[str, Any] = {"parallelism": wanted.nodes, "completions": wanted.nodes, "completionMode": "Indexed"}
    job |= {"backoffLimit": 0, "template": {"spec": pod}}
    return {
        "apiVersion": "jobset.x-k8s.io/v1alpha2",
        "kind": "JobSet",
        "metadata": {"name": wanted.name},
        "spec": {
            "network": {"enableDNSHostnames": True, "publishNotReadyAddresses": True},
            "failurePolicy": {"maxRestarts": 0},
            "replicatedJobs": [{"name": "workers", "replicas": 1, "template": {"spec": job}}],
        },
    }


def skypilot(wanted: Wanted) -> dict[str, Any]:
    """A task of SkyPilot: each node starts its part, and TF_CONFIG says where the others are."""
    resources: dict[str, Any] = {"image_id": f"docker:{wanted.image}"}
    if wanted.gpus:
        resources["accelerators"] = wanted.gpus
    if wanted.cpus is not None:
        resources["cpus"] = str(wanted.cpus)
    tell = (
        'import json, os; nodes = os.environ["SKYPILOT_NODE_IPS"].split(); '
        f'cluster = {{"worker": [node + ":{_PORT}" for node in nodes]}}; '
        'task = {"type": "worker", "index": int(os.environ["SKYPILOT_NODE_RANK"])}; '
        'print(json.dumps({"cluster": cluster, "task": task}))'
    )
    run = [
        "set -e",
        f'export TF_CONFIG="$(python3 -c {shlex.quote(tell)})"',
        'export HOCKET_SECRET_FILE="$(mktemp)"  # readable for this user alone',
        "trap 'rm -f \"$HOCKET_SECRET_FILE\"' EXIT",
        'printf %s "$HOCKET_JOB_SECRET" > "$HOCKET_SECRET_FILE"',
        shlex.join(wanted.run),
    ]
    return {
        "name": wanted.name,
        "num_nodes": wanted.nodes,
        "resources": resources,
        "workdir": ".",
        "secrets": {"HOCKET_JOB_SECRET": None},
        "run": "\n".join(run) + "\n",
    }


def write(value: Any, indent: int = 0) -> str:
    """Plain data as YAML."""
    margin = " " * indent
    if isinstance(value, dict):
        lines = []
        for key, each in value.items():
            if isinstance(each, (dict, list)) and each:
                lines.append(f"{margin}{key}:\n{write(each, indent + 2)}")
            elif isinstance(each, str) and "\n" in each:
                block = "".join(f"{margin}  {line}\n" for line in each.splitlines())
                lines.append(f"{margin}{key}: |\n{block}")
            else:
                lines.append(f"{margin}{key}: {_scalar(each)}\n")
        return "".join(lines)
    found = []
    for each in value:
        text = write(each, indent + 2) if isinstance(each, (dict, list)) else f"{margin}  {_scalar(each)}\n"
        found.append(f"{margin}- {text[indent + 2 :]}")
    return "".join(found)


def _scalar(value: Any) -> str:
    if value is None:
        return "null"
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, int):
        return str(value)
    text = str(value)
    if _PLAIN.fullmatch(text) and text.lower() not in _WORDS:
        return text
    return '"' + text.replace("\\", "\\\\").replace('"', '\\"') + '"'
