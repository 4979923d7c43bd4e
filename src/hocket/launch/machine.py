"""What this machine is, and what it has for workers: cores, GPUs and memory."""

from __future__ import annotations

import contextlib
import errno
import os
import platform
import resource
import socket
import subprocess
import time
from importlib import metadata
from pathlib import Path
from typing import Any

from hocket import __version__, config
from hocket.errors import UsageError

_FILES = 48  # files that a process may have open for itself: torch, shared memory, sockets
_WORKER_BYTES = 300 << 20  # what an interpreter with PyTorch takes before it has any model


def describe() -> dict[str, Any]:
    """What an agent tells of its host: versions, cores, GPUs, memory, time and network."""
    return {
        "hocket": __version__,
        "python": platform.python_version(),
        "torch": version("torch"),
        "system": f"{platform.system()} {platform.release()} {platform.machine()}",
        "hostname": socket.gethostname(),
        "cores": cores(),
        "gpus": gpus(),
        "free memory": free_memory(),
        "time": time.time(),
        "network": network(),
    }


def cores() -> int:
    """The cores that this process may use, control-group limits included."""
    allowed = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    quota, _, period = _read("/sys/fs/cgroup/cpu.max").partition(" ")
    if quota.isdigit() and period.strip().isdigit():
        allowed = min(allowed, max(1, int(quota) // int(period)))
    return allowed


def cpu() -> str:
    """The model of the processor."""
    for line in _read("/proc/cpuinfo").splitlines():
        if line.startswith("model name"):
            return line.partition(":")[2].strip()
    return platform.processor() or platform.machine()


def gpus() -> int:
    """The NVIDIA GPUs that workers may use, counted without torch."""
    visible = config.visible_gpus()
    if visible is not None:
        return len(visible)
    with contextlib.suppress(OSError):
        return len(list(Path("/proc/driver/nvidia/gpus").iterdir()))
    with contextlib.suppress(OSError, subprocess.SubprocessError):
        listed = subprocess.run(["nvidia-smi", "-L"], capture_output=True, text=True, timeout=10, check=True)
        return sum(line.startswith("GPU ") for line in listed.stdout.splitlines())
    return 0


def version(package: str) -> str | None:
    """The version of an installed package, which is not imported for it."""
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return None


def check_files(processes: int) -> None:
    """Raise if the limit on open files is too low for so many workers and servers; they have the same one."""
    allowed, needed = resource.getrlimit(resource.RLIMIT_NOFILE)[0], _FILES + 4 * processes
    if allowed != resource.RLIM_INFINITY and allowed < needed:
        raise UsageError(
            f"this shell allows {allowed} open files, and a job of {processes} processes needs {needed}: call "
            f"ulimit -n {max(1024, needed)} before, or start fewer workers (-n)"
        )


def explain(error: OSError) -> str:
    """What is to be done about an error of the system that has nothing to do with Hocket; empty if that is unknown."""
    if error.errno in (errno.EMFILE, errno.ENFILE):
        return f"{error.strerror}: raise the limit (ulimit -n 1024), or start fewer workers (-n)"
    try:
        os.getcwd()  # noqa: PTH109
    except FileNotFoundError:
        return "the working directory does not exist any more: change to another one (cd) and start again"
    except OSError:
        pass
    return ""


def memory() -> int | None:
    """Bytes of memory that the machine has, or None where that is unknown."""
    for line in _read("/proc/meminfo").splitlines():
        if line.startswith("MemTotal:"):
            return int(line.split()[1]) << 10
    return None


def free_memory() -> int | None:
    """Bytes of memory that new processes can have, or None where that is unknown."""
    free = None
    for line in _read("/proc/meminfo").splitlines():
        if line.startswith("MemAvailable:"):
            free = int(line.split()[1]) << 10
    limit, used = _read("/sys/fs/cgroup/memory.max").strip(), _read("/sys/fs/cgroup/memory.current").strip()
    if free is not None and limit.isdigit() and used.isdigit():
        free = min(free, int(limit) - int(used))
    return free


def worker_count(text: str, servers: int = 0) -> int:
    """Read ``-n``: a number of workers that fits this machine, beside ``servers``, or ``auto`` for one per core."""
    if text == "auto":
        return cores()
    try:
        count = int(text)
    except ValueError:
        raise UsageError(f"-n {text}: must be a whole number of workers, or auto") from None
    if count < 1:
        raise UsageError(f"-n {count}: a job needs at least one worker, for example -n 2 or -n auto")
    if (most := most_workers(free := free_memory())) is not None and count + servers > most:
        remedy = f"use at most -n {most - servers}" if most > servers else "use fewer servers"
        raise UsageError(f"-n {count}: {too_many(count, free, servers)}: {remedy}")
    return count


def worker_bounds(text: str) -> tuple[int, int] | None:
    """Read ``-n 2..8``: the fewest and the most workers; None if the text is no range."""
    least, dots, most = text.partition("..")
    if not dots:
        return None
    if not (least.isdecimal() and most.isdecimal()) or int(least) < 1:
        raise UsageError(f"-n {text}: must be the fewest and the most workers, from 1, for example -n 2..8")
    if int(least) > int(most):
        raise UsageError(f"-n {text}: the fewest workers come first, for example -n {most}..{least}")
    return int(least), int(most)


def number(text: str) -> int | None:
    """Read ``-n`` for machines of which nothing is known yet; None is as many as there is room for."""
    if text != "auto" and (not text.isdecimal() or int(text) < 1):
        raise UsageError(f"-n {text}: must be a number of workers from 1, or be left out for all slots of the hosts")
    return None if text == "auto" else int(text)


def choose_workers(bounds: tuple[int, int], beside: int = 0) -> int:
    """As many workers as cores, within ``bounds``; fewer if the memory is not enough for these and what is beside."""
    least, most = bounds
    count = max(least, min(most, cores()))
    if (room := most_workers(free_memory())) is not None:
        count = max(least, min(count, room - beside))
    return worker_count(str(count), beside)


def most_workers(free: int | None) -> int | None:
    """How many workers the free memory is enough for, at least one; None where it is unknown."""
    return None if free is None else max(1, free // _WORKER_BYTES)


def too_many(count: int, free: int | None, servers: int = 0) -> str:
    """What is wrong with ``count`` workers and ``servers`` servers on a host."""
    more = f" and {servers} server{'s' if servers > 1 else ''}" if servers else ""
    needed = (count + servers) * _WORKER_BYTES / 1e9
    return (
        f"{count} workers{more} need about {needed:.1f} GB of memory for PyTorch alone, "
        f"and this host has {(free or 0) / 1e9:.1f} GB free"
    )


def _read(path: str) -> str:
    try:
        return Path(path).read_text()
    except OSError:
        return ""


def network() -> str:
    """A text that is the same on hosts that share one network stack, such as several names of one machine."""
    try:
        return f"{Path('/proc/sys/kernel/random/boot_id').read_text().strip()} {os.stat('/proc/self/ns/net').st_ino}"  # noqa: PTH116
    except OSError:
        return socket.gethostname()


def working_folder() -> str:
    """The working folder by the name that the user has for it, which other hosts know too if it is a link."""
    named = config.environment().get("PWD", "")
    try:
        return named if os.path.isabs(named) and os.path.samefile(named, ".") else str(Path.cwd())  # noqa: PTH117, PTH121
    except OSError:
        return str(Path.cwd())


def ssh_address() -> str | None:
    """The address of this host at which SSH was reached, if this process was started through it."""
    parts = config.environment().get("SSH_CONNECTION", "").split()
    return parts[2] if len(parts) == 4 else None
