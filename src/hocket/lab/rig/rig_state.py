"""Which rigs there are, what is known of them, and a lock so that only one is made or removed at a time."""

from __future__ import annotations

import contextlib
import dataclasses
import fcntl
import json
import os
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from hocket.lab.rig import rig_names as naming
from hocket.lab.rig import rig_processes
from hocket.lab.rig.rig_names import RigHost

_FILE = "rig.json"


@dataclass(frozen=True)
class State:
    """A rig that is complete.

    Attributes:
        hosts: The hosts of the rig, in order.
        network: The network of their addresses, such as ``10.213.0.0/24``.
        owner: The process whose end makes the rig a leftover, and when that process began; None if it is to stay.
    """

    hosts: tuple[RigHost, ...]
    network: str
    owner: tuple[int, int] | None


@contextlib.contextmanager
def locked() -> Iterator[None]:
    """Wait until nobody else makes or removes a rig, then have others wait; the end of this process undoes it."""
    descriptor = _lock()
    try:
        yield
    finally:
        with contextlib.suppress(OSError):
            naming.STATE.rmdir()  # if it is empty
        os.close(descriptor)


def _lock() -> int:
    while True:
        naming.STATE.mkdir(mode=0o700, exist_ok=True)
        with contextlib.suppress(FileNotFoundError):
            descriptor = os.open(naming.STATE, os.O_RDONLY | os.O_DIRECTORY)
            fcntl.flock(descriptor, fcntl.LOCK_EX)
            if rig_processes.inode(naming.STATE) == os.fstat(descriptor).st_ino:
                return descriptor
            os.close(descriptor)  # removed while we waited


def save(name: str, state: State) -> None:
    """Write down that the rig is complete."""
    unfinished = naming.folder(name) / f"{_FILE}.tmp"
    unfinished.write_text(json.dumps(dataclasses.asdict(state)))
    unfinished.rename(naming.folder(name) / _FILE)


def load(name: str) -> State | None:
    """What is known of the rig, or None if there is none or one that is half-made or damaged."""
    try:
        raw = json.loads((naming.folder(name) / _FILE).read_text())
        owner = raw["owner"]
        crew = tuple(RigHost(**host) for host in raw["hosts"])
        found = State(crew, str(raw["network"]), (int(owner[0]), int(owner[1])) if owner else None)
    except (OSError, ValueError, TypeError, KeyError, IndexError):
        return None
    spaces = [naming.namespace(name, naming.SWITCH), *(host.namespace for host in found.hosts)]
    named = {path.name for path in spaces_of(name)}
    return found if named >= set(spaces) and _has_link(name) else None


def is_abandoned(state: State) -> bool:
    """Whether the process that the rig was made for is gone."""
    return state.owner is not None and started(state.owner[0]) != state.owner[1]


def started(pid: int) -> int | None:
    """When a process began, in the kernel's clock; None if it is gone."""
    try:
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return None
    return None if fields[0] == "Z" else int(fields[19])


def names() -> list[str]:
    """The rigs there are, half-made and damaged ones too."""
    found = {path.name for path in _listed(naming.STATE) if path.is_dir()}
    for parent in (naming.NAMED_NAMESPACES, naming.FILES_OVER_ETC):
        found |= {path.name.split(".")[1] for path in _listed(parent) if path.name.count(".") == 2 and _ours(path)}
    return sorted(found)


def spaces_of(name: str) -> list[Path]:
    """The named network namespaces of a rig."""
    return [path for path in _listed(naming.NAMED_NAMESPACES) if path.name.startswith(naming.namespace(name, ""))]


def files_of(name: str) -> list[Path]:
    """The folders with what stands over /etc in the hosts of a rig."""
    return [path for path in _listed(naming.FILES_OVER_ETC) if path.name.startswith(naming.namespace(name, ""))]


def surrounding() -> str | None:
    """The rig inside of which this process runs, if it does."""
    own = rig_processes.inode(Path("/proc/self/ns/net"))
    for path in _listed(naming.NAMED_NAMESPACES):
        if _ours(path) and rig_processes.inode(path) == own:
            return path.name.split(".")[1]
    return None


def _has_link(name: str) -> bool:
    return Path("/sys/class/net", naming.outside_interface(name)).exists()


def _ours(path: Path) -> bool:
    return path.name.startswith("hocket.")


def _listed(folder: Path) -> list[Path]:
    try:
        return sorted(folder.iterdir())
    except OSError:
        return []
