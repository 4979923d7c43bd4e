"""The programs and rights that a rig needs of the machine, where to get them, and how programs are run."""

from __future__ import annotations

import os
import shutil
import subprocess
from pathlib import Path

from hocket import config
from hocket.errors import RigError, UsageError

_PACKAGES = {
    "ip": "iproute2",
    "tc": "iproute2",
    "bridge": "iproute2",
    "sshd": "openssh-server",
    "ssh": "openssh-client",
    "ssh-keygen": "openssh-client",
    "unshare": "util-linux",
    "hostname": "hostname",
}
_CAPABILITIES = {"CAP_NET_ADMIN": 12, "CAP_SYS_ADMIN": 21}


def missing() -> str | None:
    """Why there can be no rig here, with the remedy; None if there can."""
    if os.geteuid() != 0:
        return "a rig needs root, because only root may make network namespaces: run it as root, for example with sudo"
    lacking = [name for name, bit in _CAPABILITIES.items() if not _capabilities() >> bit & 1]
    if lacking:
        return (
            f"a rig needs {' and '.join(lacking)} to make network namespaces, and root has not got this here: "
            f"start the container with --privileged"
        )
    for name, package in _PACKAGES.items():
        if _which(name) is None:
            return f"a rig needs the program {name}, which is not here: apt-get install {package}"
    return None


def check() -> None:
    """Refuse where there can be no rig."""
    reason = missing()
    if reason is not None:
        raise UsageError(reason)


def program(name: str) -> str:
    """The path of a program; those for root are found even if PATH does not name their folders."""
    return _which(name) or name


def batch(command: list[str], lines: list[str]) -> None:
    """Have ip(8) do all ``lines``, one after the other, until one fails."""
    call([*command, "-batch", "-"], "\n".join(lines) + "\n")


def call(command: list[str], text: str = "") -> str:
    """Run a program to its end; return what it prints."""
    done = subprocess.run([program(command[0]), *command[1:]], input=text, capture_output=True, text=True, check=False)
    if done.returncode != 0:
        said = "; ".join(line.strip() for line in done.stderr.splitlines() if line.strip())
        raise RigError(f"{' '.join(command)} failed: {said or f'status {done.returncode}'}")
    return done.stdout


def _which(name: str) -> str | None:
    path = config.environment().get("PATH", "")
    return shutil.which(name, path=f"{path}:/usr/local/sbin:/usr/sbin:/sbin:/usr/bin:/bin")


def _capabilities() -> int:
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith("CapEff:"):
            return int(line.split()[1], 16)
    return 0
