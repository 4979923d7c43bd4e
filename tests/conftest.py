"""Fixtures of all tests; one of them fails any test that leaves something behind."""

import itertools
import os
import secrets
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

sys.path.insert(0, str(Path(__file__).parent))

from pool import Pool

from hocket.rig import Rig, needs
from hocket.rig.rig import down

SESSION = secrets.token_hex(8)
os.environ["HOCKET_TEST_SESSION"] = SESSION  # inherited by every process that a test starts
RIGS = f"t{SESSION[:6]}-"  # with which the names of all rigs of this session begin
MARK = f"HOCKET_TEST_SESSION={SESSION}".encode()


@pytest.fixture(scope="session", autouse=True)
def records_elsewhere(tmp_path_factory: pytest.TempPathFactory) -> None:
    """Runs that tests start from the working tree are recorded outside of it."""
    os.environ["HOCKET_RUN_DIR"] = str(tmp_path_factory.mktemp("hocket-runs"))


@pytest.fixture(scope="session")
def pool() -> Iterator[Pool]:
    shared = Pool()
    yield shared
    shared.close()


def _children(pid: int) -> set[int]:
    found: set[int] = set()
    parents: dict[int, list[int]] = {}
    for entry in Path("/proc").glob("[0-9]*/stat"):
        try:
            fields = entry.read_text().rpartition(")")[2].split()
        except OSError:
            continue
        if fields[0] != "Z":
            parents.setdefault(int(fields[1]), []).append(int(entry.parent.name))
    todo = [pid]
    while todo:
        for child in parents.get(todo.pop(), []):
            found.add(child)
            todo.append(child)
    return found


def _marked() -> set[int]:
    """Processes that some test of this session has started, children of ours or not."""
    found = set()
    for entry in Path("/proc").glob("[0-9]*/environ"):
        try:
            if MARK in entry.read_bytes().split(b"\0"):
                found.add(int(entry.parent.name))
        except OSError:
            continue
    return found


def _ports(pids: set[int]) -> set[str]:
    """The sockets on which one of ``pids`` listens."""
    lines = [
        line.split() for name in ("tcp", "tcp6") for line in Path(f"/proc/net/{name}").read_text().splitlines()[1:]
    ]
    listening = {fields[9]: f"tcp {fields[1]}" for fields in lines if fields[3] == "0A"}
    found = set()
    for pid in pids:
        for link in Path(f"/proc/{pid}/fd").glob("*"):
            try:
                target = str(link.readlink())
            except OSError:
                continue
            found.add(listening.get(target.removeprefix("socket:[").removesuffix("]"), ""))
    return found - {""}


def _rigs() -> set[Path]:
    """What is there of rigs that tests of this session have made; others may be at work on this machine."""
    places = [("/run/netns", "hocket."), ("/etc/netns", "hocket."), ("/run/hocket-rig", ""), ("/sys/class/net", "hk-")]
    return {path for folder, prefix in places for path in Path(folder).glob(f"{prefix}{RIGS}*")}


def _state(pool_pids: set[int]) -> dict[str, set[object]]:
    return {
        "processes": ({p for p in _children(os.getpid()) if p not in pool_pids} | _marked())
        - {os.getpid(), *pool_pids},
        "threads": {thread.name for thread in threading.enumerate()},
        "shared memory": set(Path("/dev/shm").iterdir()),
        "ports": set(_ports({os.getpid(), *pool_pids})),
        "rigs": set(_rigs()),
    }


@pytest.fixture(autouse=True)
def nothing_left_behind(pool: Pool) -> Iterator[None]:
    """Five seconds after a test nothing may be there that was not there before."""
    before = _state(set(pool.pids()))
    yield
    deadline = time.monotonic() + 5
    while True:
        # The pool's own processes may have grown in number, and multiprocessing keeps one to count its resources.
        known = {p for pid in pool.pids() for p in (pid, *_children(pid))} | _trackers()
        after = _state(known)
        new = {kind: after[kind] - before[kind] for kind in after if after[kind] - before[kind]}
        if not new:
            return
        if time.monotonic() > deadline:
            pytest.fail(f"left behind: {new}")
        time.sleep(0.05)


def _trackers() -> set[int]:
    from multiprocessing import resource_tracker

    pid = resource_tracker._resource_tracker._pid  # type: ignore[attr-defined]
    return {pid} if pid else set()


@pytest.fixture
def free_port() -> int:
    import socket

    with socket.socket() as probe:
        probe.bind(("", 0))
        return int(probe.getsockname()[1])


class Rigs:
    """Makes rigs with names of their own."""

    _numbers = itertools.count(1)

    def __init__(self) -> None:
        self._names: list[str] = []

    def name(self) -> str:
        """A name for a rig that is removed after the test, whoever makes it."""
        self._names.append(f"{RIGS}{next(self._numbers)}")
        return self._names[-1]

    def __call__(self, hosts: int = 2, rate: str | None = None, **options: Any) -> Rig:
        return Rig.up(hosts, rate, **{"name": self.name(), **options})

    def remove(self) -> None:
        for name in self._names:
            down(name)


@pytest.fixture
def rig() -> Iterator[Rigs]:
    """Call it for a rig: ``rig(2, "100mbit")``, with the arguments of ``Rig.up``; it is removed after the test."""
    reason = needs.missing()
    if reason is not None:
        pytest.skip(reason)
    rigs = Rigs()
    yield rigs
    rigs.remove()
