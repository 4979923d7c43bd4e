"""Checks of what earlier jobs have left behind, and of the folders that the next one writes to."""

from __future__ import annotations

import re
import shutil
import tempfile
from pathlib import Path

from hocket import config
from hocket.lab.doctor.findings import Finding, note, ok, wrong
from hocket.lab.rig import rig_state
from hocket.launch import leftovers

_LITTLE, _TOO_LITTLE = 1 << 30, 100 << 20  # bytes of disk


def check(folder: str, is_here: bool) -> list[Finding]:
    """All of them. Records are written on the machine alone where the command runs: there ``is_here``."""
    return [_processes(), _shm(), *_rigs(), *(_records(folder) if is_here else _folder(folder)), _temporary()]


def _processes() -> Finding:
    """Processes of jobs whose launcher, or agent, is gone."""
    lost = sorted(pid for pid, launcher in _marked().items() if _is_orphan(pid, launcher))
    if not lost:
        return ok("leftovers", "no process of an earlier job")
    listed = " ".join(map(str, lost[:20])) + (" …" if len(lost) > 20 else "")
    seen = f"{len(lost)} process{'es' if len(lost) > 1 else ''} of a job that has ended: {listed}"
    return note("leftovers", seen, f"look at them with ps, then kill {listed}")


def _marked() -> dict[int, str]:
    """The launchers of all processes that carry the mark of some job and the name of its launcher, by process."""
    found = {}
    for entry in Path("/proc").glob("[0-9]*"):
        pairs = (value.partition(b"=") for value in _bytes(entry / "environ").split(b"\0"))
        values = {name: value.decode(errors="replace") for name, _, value in pairs}
        if leftovers.VARIABLE.encode() in values and values.get(leftovers.LAUNCHER.encode()):
            found[int(entry.name)] = values[leftovers.LAUNCHER.encode()]
    return found


def _is_orphan(pid: int, launcher: str) -> bool:
    """Whether none of those above it is its launcher, which adopts all of the job's that lose their parent.

    What has adopted it since may be anything, in a container also a Python or another launcher.
    """
    fields = _stat(pid)
    if not fields or fields[0] == b"Z":
        return False  # it has ended meanwhile
    while len(fields) > 1 and (pid := int(fields[1])):
        if leftovers.identity(pid) == launcher:
            return False
        fields = _stat(pid)
    return True


def _stat(pid: int) -> list[bytes]:
    """The state of a process, its parent, and more."""
    return _bytes(Path(f"/proc/{pid}/stat")).rpartition(b")")[2].split()


def _shm() -> Finding:
    """Files of torch's in shared memory are named after the process that made them."""
    dead = []
    try:
        entries = list(Path("/dev/shm").glob("torch_*"))
    except OSError:
        entries = []
    for path in entries:
        owner = re.match(r"torch_(\d+)_", path.name)
        if owner and not Path(f"/proc/{owner[1]}").exists():
            dead.append(path)
    if not dead:
        return ok("left memory", "no file in /dev/shm of a process that is gone")
    nbytes = sum(path.stat().st_size for path in dead if path.exists())
    seen = f"{len(dead)} file{'s' if len(dead) > 1 else ''} of {nbytes / 1e6:,.0f} MB in /dev/shm whose process is gone"
    return note("left memory", seen, "unless another container uses them: rm " + " ".join(map(str, dead[:5])))


def _rigs() -> list[Finding]:
    if rig_state.surrounding() is not None:
        return []  # from inside a rig's host, processes outside cannot be seen
    found = []
    for name in rig_state.names():
        known = rig_state.load(name)
        if known is not None and not rig_state.is_abandoned(known):
            continue
        what = "half-made or damaged" if known is None else "left by a process that has ended"
        remedy = f"hocket rig down --name {name}, unless it is being made"
        found.append(note("rigs", f"there is a rig {name!r}, {what}", remedy))
    return found


def _records(folder: str) -> list[Finding]:
    """The folder for the records of runs, or the one in which it will be made."""
    given = config.told().get("run-dir", config.SETTINGS["run-dir"].default)
    place = Path(folder, given)
    there = next((path for path in (place, *place.parents) if path.is_dir()), Path("/"))
    try:
        tempfile.TemporaryFile(dir=there).close()  # permissions do not say all: the disk may be read-only
    except OSError as error:
        return [wrong("run folder", f"{there}: {error.strerror}", "choose another with --run-dir, or use --no-record")]
    return [_space("run folder", there)]


def _folder(folder: str) -> list[Finding]:
    if Path(folder).is_dir():
        return [_space("folder", Path(folder))]
    return [note("folder", f"there is no {folder} here, and workers start in it",
                 "share the folder of your script between the hosts, or copy it there")]  # fmt: skip


def _temporary() -> Finding:
    try:
        folder = tempfile.gettempdir()
        tempfile.TemporaryFile(dir=folder).close()
    except OSError as error:
        return wrong("temporary files", f"{error.strerror or error}", "set TMPDIR to a folder that can be written to")
    return _space("temporary files", Path(folder))


def _space(name: str, folder: Path) -> Finding:
    free = shutil.disk_usage(folder).free
    seen = f"{folder}: {free / 1e9:,.1f} GB free"
    if free < _TOO_LITTLE:
        return wrong(name, seen, "free some space there: records and checkpoints will fail")
    if free < _LITTLE:
        return note(name, seen, "free some space there: checkpoints of a large model may not fit")
    return ok(name, seen)


def _bytes(path: Path) -> bytes:
    try:
        return path.read_bytes()
    except OSError:
        return b""
