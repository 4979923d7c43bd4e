"""Fixtures of all tests; one of them fails any test that leaves something behind."""

import codecs
import contextlib
import itertools
import locale
import os
import re
import secrets
import signal
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import settings

sys.path.insert(0, str(Path(__file__).parent))

from pool import Pool

from hocket.lab.rig import Rig, rig_needs
from hocket.lab.rig.rig import down
from hocket.launch.local_crew import reserve_port

SESSION = secrets.token_hex(8)
os.environ["HOCKET_TEST_SESSION"] = SESSION  # inherited by every process that a test starts
START = str(Path(__file__).parent / "start")  # a sitecustomize with which processes start in half the time
os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, (START, os.environ.get("PYTHONPATH"))))
RIGS = f"t{SESSION[:6]}-"  # with which the names of all rigs of this session begin
settings.register_profile("untimed", deadline=None)  # else an example that takes 0.2 s on a busy machine has failed
settings.load_profile("untimed")
torch.set_num_threads(1)  # here; more of them would wait for each other while workers need the cores
for number in (signal.SIGINT, signal.SIGHUP):
    if signal.getsignal(number) == signal.SIG_IGN:  # in the background of a script, or under nohup
        signal.signal(number, lambda *_: None)  # still ignored here, and the default in what tests start
KEPT: set[int] = set()  # processes that a fixture keeps for many tests, and ends itself
MARK = f"HOCKET_TEST_SESSION={SESSION}".encode()


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--all", action="store_true", help="run every combination of parameters (tests/products.py)")


def pytest_configure(config: pytest.Config) -> None:
    config.addinivalue_line("markers", "all_combinations: runs with --all only; others prove nearly the same")
    config.addinivalue_line("markers", "few(count): without --all, only so many of the test's combinations are run")
    config.addinivalue_line("markers", "keeps_ports: the pool's processes keep ports that end with them, as NCCL does")


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    if codecs.lookup(locale.getencoding()).name == "ascii":
        reason = "torch.compile reads files of its own in the encoding of the locale, which is ASCII here"
        for item in items:
            if "compile" in item.name:
                item.add_marker(pytest.mark.skip(reason=reason))
    if config.getoption("--all"):
        return
    kept = [item for item in items if not item.get_closest_marker("all_combinations")]
    functions: dict[str, list[pytest.Item]] = {}
    for item in kept:
        functions.setdefault(item.nodeid.partition("[")[0], []).append(item)
    chosen = {item for cases in functions.values() for item in _few(cases)}
    config.hook.pytest_deselected(items=[item for item in items if item not in chosen])
    items[:] = [item for item in items if item in chosen]


def _few(cases: list[pytest.Item]) -> list[pytest.Item]:
    """Those of a test's combinations that are run: as many as it says, spread evenly from the first to the last."""
    marker = cases[0].get_closest_marker("few")
    count = len(cases) if marker is None else min(marker.args[0], len(cases))
    return [cases[number * (len(cases) - 1) // max(count - 1, 1)] for number in range(count)]


@pytest.fixture(scope="session", autouse=True)
def records_elsewhere(tmp_path_factory: pytest.TempPathFactory) -> None:
    """Runs that tests start from the working tree are recorded outside of it."""
    os.environ["HOCKET_RUN_DIR"] = str(tmp_path_factory.mktemp("hocket-runs"))


@pytest.fixture(scope="session")
def pool() -> Iterator[Pool]:
    shared = Pool()
    yield shared
    shared.close()


def _processes() -> list[int]:
    return [int(name) for name in os.listdir("/proc") if name.isdigit()]  # noqa: PTH208


def _read(path: str) -> bytes:
    """What is in a file of ``/proc``; nothing where the process is gone. These are many, and ``Path`` is slow."""
    try:
        with open(path, "rb", buffering=0) as file:  # noqa: PTH123
            return file.read()
    except OSError:
        return b""


def _children(*pids: int) -> set[int]:
    """The processes below ``pids``, at any depth."""
    found: set[int] = set()
    parents: dict[int, list[int]] = {}
    for process in _processes():
        fields = _read(f"/proc/{process}/stat").rpartition(b")")[2].split(None, 2)
        if fields and fields[0] != b"Z":
            parents.setdefault(int(fields[1]), []).append(process)
    todo = list(pids)
    while todo:
        for child in parents.get(todo.pop(), []):
            found.add(child)
            todo.append(child)
    return found


def _marked() -> set[int]:
    """Processes that some test of this session has started, children of ours or not."""
    return {process for process in _processes() if MARK in _read(f"/proc/{process}/environ").split(b"\0")}


def _listening() -> dict[str, str]:
    """The sockets of this machine on which anybody listens: what a descriptor of one is called, and its address."""
    lines = [line.split() for name in ("tcp", "tcp6") for line in _read(f"/proc/net/{name}").decode().splitlines()[1:]]
    return {f"socket:[{fields[9]}]": f"tcp {fields[1]}" for fields in lines if fields[3] == "0A"}


def _ports(pids: set[int], listening: dict[str, str]) -> set[str]:
    """Those of ``listening`` that one of ``pids`` holds."""
    found = set()
    for folder in (f"/proc/{pid}/fd" for pid in pids if listening):
        try:
            links = os.listdir(folder)  # noqa: PTH208
        except OSError:
            continue
        for link in links:
            try:
                found.add(listening.get(os.readlink(f"{folder}/{link}"), ""))  # noqa: PTH115
            except OSError:
                continue
    return found - {""}


def _rigs() -> set[Path]:
    """What is there of rigs that tests of this session have made; others may be at work on this machine."""
    places = [("/run/netns", "hocket."), ("/etc/netns", "hocket."), ("/run/hocket-rig", ""), ("/sys/class/net", "hk-")]
    return {path for folder, prefix in places for path in Path(folder).glob(f"{prefix}{RIGS}*")}


def _shared_memory() -> set[Path]:
    """Files in shared memory, without those that torch has made for processes of others at work on this machine."""
    found = set()
    for path in Path("/dev/shm").iterdir():
        with contextlib.suppress(FileNotFoundError):
            if path.stat().st_uid != os.geteuid():
                continue
        owner = re.match(r"torch_(\d+)_", path.name)
        theirs = _read(f"/proc/{owner[1]}/environ") if owner else b""
        if not theirs or MARK in theirs.split(b"\0"):
            found.add(path)
    return found


def _is_of_others(path: Path) -> bool:
    """Whether a file in shared memory is in use by a process that no test of this session has started.

    It is known by its number: semaphores get their name after they were mapped.
    """
    try:
        number = str(path.stat().st_ino).encode()
    except FileNotFoundError:
        return True
    maps = (_read(f"/proc/{pid}/maps") for pid in set(_processes()) - {os.getpid(), *_marked()})
    return any(number == line.split()[4] for text in maps for line in text.splitlines() if b" /dev/shm/" in line)


def _state(known: set[int]) -> dict[str, set[Any]]:
    """What is there now, without the processes of the pool, ``known``."""
    return {
        "processes": (_children(os.getpid()) | _marked()) - {os.getpid(), *known},
        # Without those of torch's compiler, and of CUDA's autograd, which Python has not started.
        "threads": {t.name for t in threading.enumerate() if not isinstance(t, threading._DummyThread)}
        - {"tqdm_monitor"},
        "shared memory": set(_shared_memory()),
        "rigs": set(_rigs()),
    }


@pytest.fixture(autouse=True)
def nothing_left_behind(pool: Pool, request: pytest.FixtureRequest) -> Iterator[None]:
    """Five seconds after a test nothing may be there that was not there before."""
    before, others = _state(set(pool.pids())), _listening()
    yield
    deadline = time.monotonic() + 5
    while True:
        # The pool's own processes may have grown in number, and multiprocessing keeps one to count its resources.
        known = {*pool.pids(), *_children(*pool.pids()), *_trackers(), *KEPT, *_children(*KEPT)}
        after = _state(known)
        after["shared memory"] = {
            path for path in after["shared memory"] - before["shared memory"] if not _is_of_others(path)
        }
        new = {kind: after[kind] - before[kind] for kind in after if after[kind] - before[kind]}
        # The pool has many descriptors: they are looked at only where somebody listens who did not before.
        listening = {name: address for name, address in _listening().items() if name not in others}
        keeps = known if request.node.get_closest_marker("keeps_ports") else set[int]()
        if ports := _ports({os.getpid(), *known} - keeps, listening):
            new["ports"] = set(ports)
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
def free_port() -> Iterator[int]:
    """A port on which nobody else listens until the end of the test."""
    with reserve_port() as reserved:
        yield reserved.getsockname()[1]


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
    reason = rig_needs.missing()
    if reason is not None:
        pytest.skip(reason)
    rigs = Rigs()
    yield rigs
    rigs.remove()
