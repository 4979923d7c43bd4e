"""What a rig needs of the machine, and where it is to be had."""

from __future__ import annotations

import os
import shutil
from pathlib import Path

from hocket import config
from hocket.errors import UsageError

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


def _which(name: str) -> str | None:
    path = config.environment().get("PATH", "")
    return shutil.which(name, path=f"{path}:/usr/local/sbin:/usr/sbin:/sbin:/usr/bin:/bin")


def _capabilities() -> int:
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith("CapEff:"):
            return int(line.split()[1], 16)
    return 0
