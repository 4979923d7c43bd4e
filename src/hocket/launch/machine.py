"""What this machine is, and what it has for workers: cores and memory."""

from __future__ import annotations

import os
import platform
from pathlib import Path

from hocket.errors import UsageError

_WORKER_BYTES = 300 << 20  # what an interpreter with PyTorch takes before it has any model


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


def worker_count(text: str) -> int:
    """Read ``-n``: a number of workers that fits this machine, or ``auto`` for one per core."""
    if text == "auto":
        return cores()
    try:
        count = int(text)
    except ValueError:
        raise UsageError(f"-n {text}: must be a whole number of workers, or auto") from None
    if count < 1:
        raise UsageError(f"-n {count}: a job needs at least one worker, for example -n 2 or -n auto")
    free = free_memory()
    if free is not None and count * _WORKER_BYTES > free:
        raise UsageError(
            f"-n {count}: {count} workers need about {count * _WORKER_BYTES / 1e9:.1f} GB of memory for PyTorch alone, "
            f"and this host has {free / 1e9:.1f} GB free: use at most -n {max(1, free // _WORKER_BYTES)}"
        )
    return count


def _read(path: str) -> str:
    try:
        return Path(path).read_text()
    except OSError:
        return ""
