"""What the parts of a rig are called; every name follows from the rig's own, so remains can be found."""

from __future__ import annotations

import hashlib
import re
from dataclasses import dataclass
from pathlib import Path

from hocket.errors import UsageError

DEFAULT = "rig"
STATE = Path("/run/hocket-rig")
NAMED_NAMESPACES = Path("/run/netns")  # where ip(8) keeps them
FILES_OVER_ETC = Path("/etc/netns")  # from where ip(8) takes files that stand over those of /etc
SWITCH = "switch"
MOST_HOSTS = 250
VARIABLE = "HOCKET_RIG"  # every process that a rig starts inherits it, with the rig's name

_NAME = re.compile(r"[a-z0-9][a-z0-9-]{0,30}")
_INTERFACE = re.compile(r"[A-Za-z0-9][A-Za-z0-9_.-]{0,14}")


@dataclass(frozen=True)
class RigHost:
    """A host of a rig.

    Attributes:
        name: The name of the host, in every host of the rig and for ssh.
        address: The IPv4 address of the host.
        interface: What its network interface is called inside.
        namespace: The name of its network namespace.
        port: The other end of its cable, an interface in the namespace of the switch.
    """

    name: str
    address: str
    interface: str
    namespace: str
    port: str


def check_name(name: str) -> str:
    """``name`` if a rig may have it."""
    if not _NAME.fullmatch(name):
        raise UsageError(
            f"--name {name!r}: a rig's name has at most 31 lower-case letters, digits and dashes, for example lab-2"
        )
    return name


def check_interface(name: str) -> str:
    """``name`` if an interface of a host may have it."""
    if not _INTERFACE.fullmatch(name) or name == "lo":
        raise UsageError(f"an interface cannot be called {name!r}: use at most 15 letters and digits, for example ens3")
    return name


def folder(name: str) -> Path:
    """Where the rig keeps keys, settings and logs."""
    return STATE / name


def namespace(name: str, host: str) -> str:
    """The network namespace of a host, or of the switch."""
    return f"hocket.{name}.{host}"


def outside_interface(name: str) -> str:
    """The interface by which this machine itself reaches the rig; the kernel allows 15 characters."""
    return f"hk-{name if len(name) <= 12 else hashlib.sha256(name.encode()).hexdigest()[:12]}"
