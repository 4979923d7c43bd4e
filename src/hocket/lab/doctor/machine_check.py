"""Checks of one machine: cores, threads, memory, limits that the system sets, clock, name and network interfaces."""

from __future__ import annotations

import contextlib
import ipaddress
import os
import platform
import resource
import socket
import tempfile
import threading
import time
from pathlib import Path

from hocket import config, errors
from hocket.lab.doctor.findings import Finding, note, ok, wrong
from hocket.launch import machine
from hocket.transport import futex, interfaces, trial

_GROUPS = Path("/sys/fs/cgroup")
_MIB = 1 << 20
_SHM = Path("/dev/shm")
_SHM_TIGHT, _SHM_NONE = 256 * _MIB, 8 * _MIB
_FILES_TIGHT, _FILES_NONE = 1024, 128
_TASKS_TIGHT, _TASKS_NONE = 256, 32
_CONTAINER = "in a container, start it with --shm-size=2g; else mount -o remount,size=2g /dev/shm, or num_workers=0"
_PATIENCE = 4.0  # seconds for an answer of a name server
_FILES = 2.0  # seconds between the clock and that of a file system that are worth a look
NTP = "set the clock by NTP: timedatectl set-ntp true"


def cores() -> list[Finding]:
    """Cores, threads, memory, swap and load."""
    return [_cores(), _threads(config.environment().get("OMP_NUM_THREADS", "")), _memory(), _swap(), _load()]


def limits() -> list[Finding]:
    """Shared memory, and what the system allows a process. This forks: call it while there is one thread."""
    return [_exchange(), _shm(), _files(), _tasks(), *_locked()]


def network(interface: str | None) -> list[Finding]:
    """The host's name, loopback and interfaces; with ``interface``, that one has to be there."""
    return [_host_name(), _localhost(), _interfaces(interface)]


def _cores() -> Finding:
    whole, counted, quota = os.cpu_count() or 1, machine.cores(), _quota()
    seen = f"{counted} of {whole}" if counted < whole else f"{whole}"
    if quota is not None and quota < counted:
        return note("cores", f"{seen}, but a control group lets only {quota:g} of them work at a time",
                    f"hocket run -n {max(1, int(quota))}, for -n auto does not see this limit")  # fmt: skip
    if counted < whole:
        why = f"a control group lets {quota:g} work" if quota is not None and quota < whole else "bound to these"
        return note("cores", f"{seen} ({why})", "nothing to do if this is meant: -n auto starts as many workers")
    return ok("cores", f"{seen}: -n auto starts as many workers")


def _quota() -> float | None:
    """The cores' worth of time that a control group allows, that of any parent too; None if there is no limit."""
    found = []
    for line in _read(Path("/proc/self/cgroup")).splitlines():
        _, kind, path = [*line.split(":", 2), "", ""][:3]
        base = _GROUPS if not kind else _GROUPS / kind
        if kind and "cpu" not in kind.split(","):
            continue
        folder = base / path.strip("/")
        for group in {base, folder, *(parent for parent in folder.parents if parent.is_relative_to(base))}:
            words = _read(group / "cpu.max").split() or [
                _read(group / "cpu.cfs_quota_us").strip(),
                _read(group / "cpu.cfs_period_us").strip(),
            ]
            if len(words) == 2 and all(word.isdecimal() for word in words) and int(words[1]):
                found.append(int(words[0]) / int(words[1]))
    return min(found, default=None)


def _threads(told: str) -> Finding:
    """OMP_NUM_THREADS; OpenMP also takes one number for each level of nesting."""
    cores = machine.cores()
    if not told.strip():
        each = ", ".join(f"{max(1, cores // n)} with -n {n}" for n in sorted({1, 2, cores}))
        return ok("threads", f"OMP_NUM_THREADS is not set: workers share the cores ({each})")
    levels = told.split(",")
    if not all(level.strip().isdecimal() and int(level) > 0 for level in levels):
        return wrong("threads", f"OMP_NUM_THREADS is {told!r}, which is no number of threads",
                     "unset OMP_NUM_THREADS: hocket run then gives each worker its share of the cores")  # fmt: skip
    threads = int(levels[0])
    seen = f"OMP_NUM_THREADS is {told}, for every worker"
    if threads > 1:
        fits = max(1, cores // threads)
        return note("threads", f"{seen}: more than {fits} worker{'s' if fits > 1 else ''} would crowd {cores} cores",
                    f"unset OMP_NUM_THREADS, or use at most -n {fits}")  # fmt: skip
    return ok("threads", seen)


def _memory() -> Finding:
    free, whole = machine.free_memory(), machine.memory()
    most = machine.most_workers(free)
    if free is None or whole is None or most is None:
        return note("memory", "this system does not say how much is free", "look before you start many workers")
    seen = f"{free / 1e9:.1f} GB free of {whole / 1e9:.1f}: enough for {most} workers without their models"
    if most < 2:
        return wrong("memory", f"{free / 1e9:.1f} GB free of {whole / 1e9:.1f}: not enough for two workers",
                     "end other programs, or give the container more (--memory)")  # fmt: skip
    if most < machine.cores():
        return note("memory", seen, f"use at most -n {most}, or end other programs")
    return ok("memory", seen)


def _swap() -> Finding:
    sizes = dict(line.split(":", 1) for line in _read(Path("/proc/meminfo")).splitlines() if ":" in line)
    total, free = (int(sizes.get(key, "0").split()[0]) << 10 for key in ("SwapTotal", "SwapFree"))
    used = total - free
    if used > max(1 << 28, total // 4):
        return note("swap", f"{used / 1e9:.1f} GB of {total / 1e9:.1f} in use: memory has been short",
                    "end other programs or start fewer workers: one that is swapped out holds up all")  # fmt: skip
    return ok("swap", f"{used / 1e9:.1f} GB in use" if total else "none")


def _load() -> Finding:
    load, cores = os.getloadavg()[0], machine.cores()
    seen = f"{load:.1f} processes at work in the last minute, on {cores} cores"
    if load > cores / 2:
        return note("load", seen, "wait for other programs to end, or expect slower and uneven steps")
    return ok("load", seen)


def _read(path: Path) -> str:
    try:
        return path.read_text()
    except OSError:
        return ""


def _exchange() -> Finding:
    if not futex.supported():
        kind = f"{platform.system()} {platform.machine()}"
        return note("shared memory", f"{kind}: workers of one host exchange over TCP, not over shared memory",
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
    """How many processes and threads a user, and the control group of a container, may have."""
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
    text = _read(Path(path)).strip()
    return int(text) if text.isdecimal() else None


def _number(limit: int) -> str:
    return "any number" if limit == resource.RLIM_INFINITY else f"{limit:,}"


def _size(nbytes: int) -> str:
    return f"{nbytes / _MIB:,.0f} MiB" if nbytes < 10 << 30 else f"{nbytes >> 30:,} GiB"


def clock(folder: str) -> Finding:
    """Files that are written now should be of now, and those of Hocket of the past."""
    installed = Path(errors.__file__).stat().st_mtime
    if installed > time.time() + 3600:
        days = (installed - time.time()) / 86400
        return wrong("clock", f"it stands {days:.1f} days before Hocket was installed here", NTP)
    try:
        with tempfile.TemporaryFile(dir=folder) as file:
            before = time.time()
            file.write(b"x")
            file.flush()
            stamp, after = os.fstat(file.fileno()).st_mtime, time.time()
    except OSError:
        return ok("clock", "not compared with a file system: nothing can be written here")
    apart = max(before - stamp, stamp - after, 0.0)
    if apart > _FILES:
        way = "ahead of" if stamp < before else "behind"
        seen = f"{apart:.1f} s {way} that of the file system of {folder}"
        return note("clock", seen, f"set the clocks of this machine and of its file server by NTP ({NTP})")
    return ok("clock", "agrees with the file system")


def _host_name() -> Finding:
    name = socket.gethostname()
    found = _resolve(name)
    add = f"write its address and {name} into /etc/hosts"
    if found is None:
        return note("host name", f"no answer within {_PATIENCE:.0f} s on what {name} means",
                    f"{add}; look at the name servers in /etc/resolv.conf")  # fmt: skip
    if not found:
        return note("host name", f"{name} does not resolve: scripts that use Gloo on their own may fail", add)
    seen = f"{name} is {', '.join(found)}"
    if all(ipaddress.ip_address(address).is_loopback for address in found):
        return note("host name", f"{seen}, which other hosts cannot reach",
                    "nothing to do for hocket run, which finds addresses by trying; for other programs, "
                    f"{add}")  # fmt: skip
    return ok("host name", seen)


def _resolve(name: str) -> list[str] | None:
    """The addresses of a name; None if nobody answers. In a thread, for nothing else can be given a deadline."""
    found: list[str] | None = None

    def ask() -> None:
        nonlocal found
        answer: list[str] = []
        with contextlib.suppress(OSError, UnicodeError):
            answer = [str(entry[4][0]).partition("%")[0] for entry in socket.getaddrinfo(name, None)]
        found = list(dict.fromkeys(answer))

    thread = threading.Thread(target=ask, daemon=True)
    thread.start()
    thread.join(_PATIENCE)
    return found


def _localhost() -> Finding:
    try:
        with socket.create_server(("127.0.0.1", 0)) as server:
            server.settimeout(2)
            with socket.create_connection(server.getsockname(), 2) as one, server.accept()[0] as other:
                one.sendall(b"x")
                other.settimeout(2)
                works = other.recv(1) == b"x"
    except OSError as error:
        return wrong("loopback", f"127.0.0.1 cannot be used: {error.strerror or error}",
                     "ip link set lo up; look for a firewall that stops it")  # fmt: skip
    named = _resolve("localhost")
    if works and named and not all(ipaddress.ip_address(address).is_loopback for address in named):
        return wrong("loopback", f"localhost is {', '.join(named)}", "write 127.0.0.1 localhost into /etc/hosts")
    return ok("loopback", "works")


def _interfaces(interface: str | None) -> Finding:
    found = [(name, address) for name, address in interfaces.addresses() if not _is_loopback(address)]
    seen = ", ".join(f"{name} {address}" for name, address in found)
    if interface is not None:
        found = [entry for entry in found if entry[0] in interface.split(",")]
        if not found and not interfaces.addresses(interface):
            return wrong("interfaces", f"no {interface} that is up, but {seen or 'loopback alone'}",
                         "name one of those that are there with --interface")  # fmt: skip
    if not found:
        return note("interfaces", "loopback alone: no other host can reach this one",
                    "nothing to do for jobs on one machine; else connect it to a network")  # fmt: skip
    return ok("interfaces", f"{seen}; {found[0][0]} would be tried first" if len(found) > 1 else seen)


def _is_loopback(address: str) -> bool:
    return ipaddress.ip_address(address).is_loopback
