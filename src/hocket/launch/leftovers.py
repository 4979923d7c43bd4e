"""Nothing of a job is left behind: find its processes, and end them.

Every process of a job inherits one environment variable with the job's own mark, however it was started.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import signal
import time
from collections.abc import Callable, Collection
from pathlib import Path

VARIABLE = "HOCKET_JOB"
LAUNCHER = "HOCKET_LAUNCHER"
_PR_SET_PDEATHSIG, _PR_SET_CHILD_SUBREAPER = 1, 36


def find(mark: str, session: int | None = None) -> list[int]:
    """The process ids that carry the mark of a job, or of one host of a job, this process excepted.

    Args:
        mark: The mark.
        session: Look only at the processes of this session.
    """
    wanted = {f"{VARIABLE}={mark}".encode(), f"HOCKET_RENDEZVOUS=hocket-{mark}".encode()}
    found = []
    for entry in Path("/proc").glob("[0-9]*"):
        try:
            if session is not None and os.getsid(int(entry.name)) != session:
                continue
            environment = (entry / "environ").read_bytes()
            # A process shows no environment for a moment while it is being executed; its session tells whose it is.
            is_ours = not wanted.isdisjoint(environment.split(b"\0")) or (session is not None and not environment)
            if is_ours and int(entry.name) != os.getpid():
                found.append(int(entry.name))
        except OSError:
            continue
    return found


def identity(pid: int | None = None) -> str:
    """What names a process, or this one, for good: its id as it sees it itself, and when it started; empty if gone.

    It is the same seen from outside of a container, and is not used again as ids are.
    """
    folder = Path("/proc", str(pid or "self"))
    try:
        status, stat = (folder / "status").read_text(errors="replace"), (folder / "stat").read_bytes()
    except OSError:
        return ""
    own = next((line.split()[-1] for line in status.splitlines() if line.startswith("NSpid:")), "")
    return f"{own}@{stat.rpartition(b')')[2].split()[19].decode()}"


def is_ending(pid: int) -> bool:
    """Whether a process has ended, or is killed and about to end.

    On a busy machine the threads of a killed process take their time to end, one after the other. Its children have
    its id as their parent's until the last one has.
    """
    try:
        text = Path(f"/proc/{pid}/status").read_text(errors="replace")
    except OSError:
        return True
    status = dict(line.split(":", 1) for line in text.splitlines() if ":" in line)
    pending = int(status["SigPnd"], 16) | int(status["ShdPnd"], 16)
    return status["State"].split()[0] in "ZX" or bool(pending >> (signal.SIGKILL - 1) & 1)


def adopt_orphans() -> None:
    """Have processes that lose their parent become children of this one, so that none gets out of sight."""
    prctl = getattr(ctypes.CDLL(None), "prctl", None)
    if prctl is not None:
        prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)


def kill(mark: str, spare: Collection[int] = (), seconds: float = 2.0) -> None:
    """SIGKILL every process of the job, new ones and orphans too, until there is none (or the time is over).

    Args:
        mark: The job's mark.
        spare: Children of this process that are no orphans of the job. Without any, all children are left alone.
        seconds: How long to try.
    """
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline:
        pids = set(find(mark))
        if spare:
            pids |= children() - set(spare)
        if not pids:
            return
        for pid in pids:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
            with contextlib.suppress(ChildProcessError):
                os.waitpid(pid, os.WNOHANG)
        time.sleep(0.01)


def kill_session(mark: str, session: int, seconds: float = 1.0) -> None:
    """SIGKILL the processes of the job in one session, whose leader has ended; waits for those that become ours."""
    killed: set[int] = set()
    deadline = time.monotonic() + seconds
    while True:
        found = find(mark, session)
        killed.update(found)
        for pid in found:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        killed = {pid for pid in killed if not _is_reaped(pid)}
        if not killed or time.monotonic() > deadline:
            return
        time.sleep(0.005)


def _is_reaped(pid: int) -> bool:
    """Whether a killed process is gone; one that this process has adopted is released here."""
    with contextlib.suppress(ChildProcessError):
        return os.waitpid(pid, os.WNOHANG)[0] == pid
    return not Path(f"/proc/{pid}").exists()


def children() -> set[int]:
    """The processes whose parent this process is now."""
    try:
        text = Path(f"/proc/self/task/{os.getpid()}/children").read_text()
    except OSError:
        return set()
    return set(map(int, text.split()))


def die_with_parent() -> Callable[[], None]:
    """A function for a child process to call first: it then is killed when the launcher is, even by SIGKILL."""
    parent = os.getpid()
    prctl = getattr(ctypes.CDLL(None), "prctl", None)

    def arrange() -> None:
        if prctl is not None:
            prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
            if os.getppid() != parent:
                os._exit(1)

    return arrange


def end_with_parent(parent: int, number: int = signal.SIGTERM) -> None:
    """Have the kernel send this process a signal when its parent ends; SystemExit if ``parent`` is gone already.

    For a process that has started: what has many threads, as a notebook has, must run no code between fork and exec.
    """
    prctl = getattr(ctypes.CDLL(None), "prctl", None)
    if prctl is not None:
        prctl(_PR_SET_PDEATHSIG, number, 0, 0, 0)
    if os.getppid() != parent:
        raise SystemExit(128 + signal.SIGTERM)
