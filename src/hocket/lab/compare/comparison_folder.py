"""The folder of a comparison: what was wanted, what was found, as JSON in files that are always whole."""

from __future__ import annotations

import contextlib
import dataclasses
import fcntl
import json
import math
import os
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from hocket.errors import RecordError, UsageError
from hocket.lab.compare.plan import signature
from hocket.lab.compare.results import Comparison, Contender, Goal, Point, Result
from hocket.observe import run_records

RESULTS = "results.json"
VERSION = 1
PLAN = "plan.json"
REPORT = "report.html"
_FILES, _FOLDERS = (PLAN, RESULTS, REPORT), ("runs", "logs")


class ComparisonFolder:
    """A folder that this process alone writes to, until it ends.

    Attributes:
        folder: The folder of the comparison.
        earlier: What was found there.
    """

    def __init__(self, folder: Path, lock: int) -> None:
        self.folder, self._lock = folder, lock
        self.earlier: Comparison | None = load(folder) if (folder / RESULTS).is_file() else None

    @property
    def records(self) -> Path:
        """The folder for records of runs."""
        return self.folder / _FOLDERS[0]

    @property
    def logs(self) -> Path:
        """The folder for what runs print."""
        return self.folder / _FOLDERS[1]

    @property
    def is_unfinished(self) -> bool:
        """Whether runs are missing, or the report of what there is."""
        if self.earlier is None or self.earlier.missing:
            return True
        return any(entry.good for entry in self.earlier.entries) and not self._has_report()

    def _has_report(self) -> bool:
        """Whether there is a report of these results, which is made after they are written."""
        try:
            return (self.folder / REPORT).stat().st_mtime_ns >= (self.folder / RESULTS).stat().st_mtime_ns
        except OSError:
            return False

    def prepare(self, wanted: Mapping[str, Any]) -> None:
        """Write down what is wanted, and make what is needed."""
        write(self.folder / PLAN, {"signature": signature(dict(wanted)), "wanted": wanted})
        for folder in (self.records, self.logs):
            folder.mkdir(exist_ok=True)

    def close(self) -> None:
        """Let others write there."""
        os.close(self._lock)


def named(folder: Path, wanted: Mapping[str, Any]) -> ComparisonFolder:
    """The folder of ``--out``, new or with the same comparison in it.

    Raises:
        UsageError: It holds another one or something else, is in use, or cannot be written to.
    """
    try:
        folder.mkdir(parents=True, exist_ok=True)
        tempfile.TemporaryFile(dir=folder).close()  # permissions do not say all: the disk may be read-only
    except OSError as error:
        raise UsageError(f"--out {folder}: {error.strerror}; choose a folder that can be written to") from None
    wrong = _wrong(folder)
    if wrong:
        raise UsageError(f"--out {folder} {wrong}: choose a folder that is new, empty, or of a comparison")
    if (folder / PLAN).exists():
        before = read(folder / PLAN).get("wanted")
        if not isinstance(before, dict):
            raise UsageError(f"{folder / PLAN} is not of a comparison; remove it, or choose another folder with --out")
        if signature(before) != signature(dict(wanted)):
            keys = [key for key in dict.fromkeys([*before, *wanted]) if before.get(key) != wanted.get(key)]
            raise UsageError(
                f"--out {folder} holds another comparison ({', '.join(keys)} differ{'s' if len(keys) == 1 else ''}): "
                "choose another folder, or remove it"
            )
    lock = _take(folder)
    if lock is None:
        raise UsageError(
            f"--out {folder}: a comparison is being made there: wait for its end, or choose another folder"
        )
    return ComparisonFolder(folder, lock)


def found_or_made(parent: Path, script: str, wanted: Mapping[str, Any]) -> ComparisonFolder:
    """An unfinished comparison of the same below ``parent``, the newest one, or a new folder.

    Raises:
        UsageError: Nothing can be written there.
    """
    for plan in sorted(parent.glob(f"*/{PLAN}"), reverse=True):
        try:
            if read(plan).get("signature") != signature(dict(wanted)) or _wrong(plan.parent):
                continue
            lock = _take(plan.parent)
            if lock is None:
                continue
            place = ComparisonFolder(plan.parent, lock)
        except (UsageError, OSError, KeyError, TypeError):
            continue  # whatever it is, nothing is to be continued there
        if place.is_unfinished:
            return place
        place.close()
    try:
        folder = run_records.make(parent, script)
        lock = _take(folder)
    except (RecordError, OSError) as error:
        raise UsageError(f"{parent.absolute()}: {error}; name a folder that can be written to with --out") from None
    assert lock is not None
    return ComparisonFolder(folder, lock)


def _wrong(folder: Path) -> str:
    """Why this folder cannot be one of a comparison, if so: something else has been there before."""
    for names, fits, kind in ((_FILES, Path.is_file, "file"), (_FOLDERS, Path.is_dir, "folder")):
        for name in names:
            if (folder / name).exists() and not fits(folder / name):
                return f"has {name!r} in it, which is no {kind}"
    others = [path.name for path in folder.iterdir() if not path.name.startswith(f".{PLAN}.")]  # of one that was killed
    if others and PLAN not in others:
        return f"holds something else ({', '.join(sorted(others)[:3])}{' …' if others[3:] else ''})"
    return ""


def _take(folder: Path) -> int | None:
    """Lock the folder for this process, for as long as it lives; None if another one has it."""
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        os.close(descriptor)
        return None
    return descriptor


def to_json(comparison: Comparison) -> dict[str, Any]:
    """Numbers, texts, lists and dictionaries alone; NaN and infinities, which JSON has not, become null."""
    found = _plain({"version": VERSION, **dataclasses.asdict(comparison)})
    assert isinstance(found, dict)
    return found


def from_json(found: Mapping[str, Any]) -> Comparison:
    """The comparison that ``to_json`` has written.

    Raises:
        UsageError: That is none, or of another version.
    """
    if found.get("version") != VERSION:
        raise UsageError(f"version {found.get('version')} of a comparison, but this Hocket reads version {VERSION}")
    values = {key: value for key, value in found.items() if key != "version"}
    entries = tuple(
        Contender(entry["strategy"], entry["workers"], tuple(result_from_json(result) for result in entry["results"]))
        for entry in values["entries"]
    )
    target = Goal(**values["target"]) if values["target"] else None
    parts = {"entries": entries, "target": target}
    return Comparison(**{**values, **parts, "arguments": tuple(values["arguments"]), "notes": tuple(values["notes"])})


def result_from_json(found: Mapping[str, Any]) -> Result:
    """One run of it."""
    parts = {
        "staleness": {int(late): count for late, count in found["staleness"].items()},
        "curves": {name: [_point(point) for point in points] for name, points in found["curves"].items()},
        "reached": _point(found["reached"]) if found["reached"] else None,
    }
    return Result(**{**found, **parts})


def save(comparison: Comparison, folder: Path) -> Path:
    """``results.json`` of ``folder``, the old one or the new one at any time."""
    return write(folder / RESULTS, to_json(comparison))


def load(folder: Path) -> Comparison:
    """What ``save`` has written there.

    Raises:
        UsageError: That is no comparison.
    """
    try:
        return from_json(read(folder / RESULTS))
    except (KeyError, TypeError, AttributeError, ValueError):
        raise UsageError(f"{folder / RESULTS} is no comparison; remove it, or choose another folder") from None


def write(path: Path, value: Mapping[str, Any]) -> Path:
    """Replace a file by this JSON, at once: whoever is killed here leaves the old one.

    Raises:
        UsageError: It cannot be written.
    """
    try:
        replace_file(path, (json.dumps(_plain(value), indent=1, allow_nan=False) + "\n").encode())
    except OSError as error:
        raise UsageError(f"{path}: {error.strerror or error}; make room there, or choose another folder") from None
    return path


def replace_file(path: Path, content: bytes) -> None:
    """Replaces ``path`` at once: whoever has it open, or interrupts this, never sees half of it.

    Raises:
        OSError: It cannot be written.
    """
    beside = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        beside.write_bytes(content)
        beside.replace(path)
    finally:
        with contextlib.suppress(OSError):
            beside.unlink(missing_ok=True)


def read(path: Path) -> dict[str, Any]:
    """The other way.

    Raises:
        UsageError: The file cannot be read, or is no JSON object.
    """
    try:
        found = json.loads(path.read_text())
    except (OSError, ValueError) as error:
        raise UsageError(f"{path}: {error}; remove it, or choose another folder with --out") from None
    if not isinstance(found, dict):
        raise UsageError(f"{path} is no comparison; remove it, or choose another folder with --out")
    return found


def _point(found: Mapping[str, Any]) -> Point:
    value = found["value"]
    return Point(found["seconds"], found["samples"], math.nan if value is None else value)


def _plain(value: Any) -> Any:
    if isinstance(value, Mapping):
        return {str(key): _plain(part) for key, part in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(part) for part in value]
    if isinstance(value, float) and not math.isfinite(value):
        return None
    return value
