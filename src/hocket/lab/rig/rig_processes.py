"""The processes of a host: how to get into its namespaces, who is in there, and how to end them all."""

from __future__ import annotations

import contextlib
import os
import signal
import time
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path

from hocket.errors import RigError
from hocket.lab.rig import rig_names as naming
from hocket.lab.rig.rig_needs import program

# The name is per UTS namespace, and each process that enters has its own; ip(8) has already changed /etc/hosts.
_ENTER = 'hostname "$1" && export HOCKET_RIG="$2" HOCKET_SSH="$3" && shift 3 && exec "$@"'


def entering(rig: str, host: str, ssh: str, argv: Sequence[str]) -> list[str]:
    """The command that becomes ``argv``, by exec and without a process between, inside ``host``."""
    ip = [program("ip"), "netns", "exec", naming.namespace(rig, host)]
    return [*ip, program("unshare"), "--uts", "sh", "-c", _ENTER, host, host, rig, ssh, *argv]


def inode(path: Path) -> int | None:
    """The number of a network namespace, or None if there is none at ``path``."""
    try:
        return path.stat().st_ino
    except OSError:
        return None


def inside(spaces: Iterable[int], names: str) -> set[int]:
    """The processes in the network namespaces with these numbers, or on the way into one whose name begins so."""
    wanted = set(spaces)
    found = {pid for pid in _all() if inode(Path(f"/proc/{pid}/ns/net")) in wanted}
    return found | {pid for pid in _all() if f"\0netns\0exec\0{names}".encode() in _cmdline(pid)}


def marked(rig: str) -> list[int]:
    """Processes that were started inside the rig, or that serve it, even if its namespaces have lost their names."""
    mark, path = f"{naming.VARIABLE}={rig}".encode(), f"{naming.folder(rig)}/".encode()
    found = []
    for pid in _all():
        with contextlib.suppress(OSError):
            if mark in Path(f"/proc/{pid}/environ").read_bytes().split(b"\0") or path in _cmdline(pid):
                found.append(pid)
    return found


def first(pids: Iterable[int]) -> set[int]:
    """Those that a host's own processes hang on: the first of its process namespace (sshd), and who made this."""
    found = set()
    for pid in pids:
        with contextlib.suppress(OSError, KeyError):
            status = dict(line.split(":", 1) for line in Path(f"/proc/{pid}/status").read_text().splitlines())
            numbers = status["NSpid"].split()
            if len(numbers) > 1 and numbers[-1] == "1" and b"sshd" in _cmdline(pid):
                found |= {pid, int(status["PPid"])}
    return found


def kill(find: Callable[[], Iterable[int]], seconds: float = 5.0) -> int:
    """SIGKILL what ``find`` finds, again and again until it finds nothing; return how many were hit."""
    deadline = time.monotonic() + seconds
    hit: set[int] = set()
    while pids := set(find()) - {os.getpid()}:
        if time.monotonic() > deadline:
            raise RigError(f"processes {sorted(pids)} cannot be killed: see what they wait for in /proc/PID/stack")
        for pid in pids:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        hit |= pids
        time.sleep(0.005)
    return len(hit)


def _cmdline(pid: int) -> bytes:
    try:
        return Path(f"/proc/{pid}/cmdline").read_bytes()
    except OSError:
        return b""


def _all() -> list[int]:
    return [int(entry.name) for entry in Path("/proc").iterdir() if entry.name.isdigit()]
