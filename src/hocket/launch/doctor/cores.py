"""Checks of what a machine has for workers: cores, threads, memory, and who else is at work."""

from __future__ import annotations

import os
from pathlib import Path

from hocket import config
from hocket.launch import machine
from hocket.launch.doctor.finding import Finding, note, ok, wrong

_GROUPS = Path("/sys/fs/cgroup")


def check() -> list[Finding]:
    """All of them."""
    return [_cores(), _threads(config.environment().get("OMP_NUM_THREADS", "")), _memory(), _swap(), _load()]


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
