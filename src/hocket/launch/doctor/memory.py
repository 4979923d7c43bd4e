"""Checks of shared memory, and of the limits that the system sets for processes."""

from __future__ import annotations

import os
import platform
import resource
from pathlib import Path

from hocket.launch.doctor.finding import Finding, note, ok, wrong
from hocket.transport import futex, trial

_MIB = 1 << 20
_SHM = Path("/dev/shm")
_SHM_TIGHT, _SHM_NONE = 256 * _MIB, 8 * _MIB
_FILES_TIGHT, _FILES_NONE = 1024, 128
_TASKS_TIGHT, _TASKS_NONE = 256, 32
_CONTAINER = "in a container, start it with --shm-size=2g; else mount -o remount,size=2g /dev/shm, or num_workers=0"


def check() -> list[Finding]:
    """All of them."""
    return [_exchange(), _shm(), _files(), _tasks(), *_locked()]


def _exchange() -> Finding:
    if not futex.supported():
        kind = f"{platform.system()} {platform.machine()}"
        return note("shared memory", f"{kind}: workers of one host exchange over Gloo, not over shared memory",
                    "nothing to do; on x86-64 Linux it is faster")  # fmt: skip
    try:
        seconds = trial.exchange()
    except OSError as error:  # TimeoutError is one
        reason = error.strerror or str(error)
        return wrong("shared memory", f"two processes cannot exchange over it: {reason}",
                     "use --transport gloo, or let memfd_create and futex through (seccomp, sandbox)")  # fmt: skip
    return ok("shared memory", f"memfd and futex work: {seconds * 1e6:.0f} µs from one process to the other")


def _shm() -> Finding:
    """Hocket's own memory has no name, and is not limited by it; data loaders' is."""
    users = "data loaders with num_workers > 0 hand over batches there"
    try:
        size = os.statvfs(_SHM)
    except OSError as error:
        return note("/dev/shm", f"{error.strerror}: {users}", _CONTAINER)
    free, total = size.f_bavail * size.f_frsize, size.f_blocks * size.f_frsize
    seen = f"{_size(free)} free of {_size(total)}"
    if not os.access(_SHM, os.W_OK):
        return wrong("/dev/shm", f"not writable, but {users}", "chmod 1777 /dev/shm, or num_workers=0")
    if free < _SHM_NONE:
        return wrong("/dev/shm", f"{seen}: {users}, and would die of a bus error", _CONTAINER)
    if free < _SHM_TIGHT:
        return note("/dev/shm", f"{seen}: {users}", _CONTAINER)
    return ok("/dev/shm", seen)


def _files() -> Finding:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    seen = f"{_number(soft)} may be open in a process"
    most = 4096 if hard == resource.RLIM_INFINITY else min(hard, 4096)
    remedy = f"ulimit -n {most}"
    if most < _FILES_TIGHT:
        remedy += " is the most for now: raise the hard limit (nofile in /etc/security/limits.conf)"
    if _is_below(soft, _FILES_NONE):
        return wrong("open files", seen, remedy)
    if _is_below(soft, _FILES_TIGHT):
        return note("open files", seen, f"{remedy}; many workers and data loaders need more")
    return ok("open files", seen)


def _tasks() -> Finding:
    """Of a user, and in the control group of a container; threads count too."""
    soft, _ = resource.getrlimit(resource.RLIMIT_NPROC)
    seen = f"{_number(soft)} for this user"
    group = [_first_number(f"/sys/fs/cgroup/pids.{name}") for name in ("max", "current")]
    left = soft if soft != resource.RLIM_INFINITY else None
    if group[0] is not None and group[1] is not None:
        seen += f", {group[0] - group[1]:,} more in this control group"
        left = min(left or group[0], group[0] - group[1])
    remedy = "raise ulimit -u, or in a container --pids-limit"
    if left is not None and left < _TASKS_NONE:
        return wrong("processes", seen, remedy)
    if left is not None and left < _TASKS_TIGHT:
        return note("processes", seen, f"{remedy}: every thread of every worker counts")
    return ok("processes", seen)


def _locked() -> list[Finding]:
    """Only InfiniBand needs locked memory."""
    soft, _ = resource.getrlimit(resource.RLIMIT_MEMLOCK)
    if not Path("/sys/class/infiniband").is_dir() or not _is_below(soft, 64 * _MIB):
        return []
    seen = f"{_size(soft)} may be locked, and NCCL over InfiniBand needs more"
    return [note("locked memory", seen, "ulimit -l unlimited, or in a container --ulimit memlock=-1")]


def _is_below(limit: int, least: int) -> bool:
    return limit != resource.RLIM_INFINITY and limit < least


def _first_number(path: str) -> int | None:
    try:
        text = Path(path).read_text().strip()
    except OSError:
        return None
    return int(text) if text.isdecimal() else None


def _number(limit: int) -> str:
    return "any number" if limit == resource.RLIM_INFINITY else f"{limit:,}"


def _size(nbytes: int) -> str:
    return f"{nbytes / _MIB:,.0f} MiB" if nbytes < 10 << 30 else f"{nbytes >> 30:,} GiB"
