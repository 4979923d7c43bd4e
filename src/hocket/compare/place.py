"""The folder of a comparison: what was wanted there, and whether an earlier one is continued."""

from __future__ import annotations

import fcntl
import os
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from hocket.compare import store
from hocket.compare.plan import signature
from hocket.compare.results import Comparison
from hocket.errors import RecordError, UsageError
from hocket.observe import folders

PLAN = "plan.json"
REPORT = "report.html"
_FILES, _FOLDERS = (PLAN, store.RESULTS, REPORT), ("runs", "logs")


class Place:
    """A folder that this process alone writes to, until it ends.

    Attributes:
        folder: Where it is.
        earlier: What was found there.
    """

    def __init__(self, folder: Path, lock: int) -> None:
        self.folder, self._lock = folder, lock
        self.earlier: Comparison | None = store.load(folder) if (folder / store.RESULTS).is_file() else None

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
        """Of these results: it is made after they are written."""
        try:
            return (self.folder / REPORT).stat().st_mtime_ns >= (self.folder / store.RESULTS).stat().st_mtime_ns
        except OSError:
            return False

    def prepare(self, wanted: Mapping[str, Any]) -> None:
        """Write down what is wanted, and make what is needed."""
        store.write(self.folder / PLAN, {"signature": signature(dict(wanted)), "wanted": wanted})
        for folder in (self.records, self.logs):
            folder.mkdir(exist_ok=True)

    def close(self) -> None:
        """Let others write there."""
        os.close(self._lock)


def named(folder: Path, wanted: Mapping[str, Any]) -> Place:
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
        before = store.read(folder / PLAN).get("wanted")
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
    return Place(folder, lock)


def found_or_made(parent: Path, script: str, wanted: Mapping[str, Any]) -> Place:
    """An unfinished comparison of the same below ``parent``, the newest one, or a new folder.

    Raises:
        UsageError: Nothing can be written there.
    """
    for plan in sorted(parent.glob(f"*/{PLAN}"), reverse=True):
        try:
            if store.read(plan).get("signature") != signature(dict(wanted)) or _wrong(plan.parent):
                continue
            lock = _take(plan.parent)
            if lock is None:
                continue
            place = Place(plan.parent, lock)
        except (UsageError, OSError, KeyError, TypeError):
            continue  # whatever it is, nothing is to be continued there
        if place.is_unfinished:
            return place
        place.close()
    try:
        folder = folders.make(parent, script)
        lock = _take(folder)
    except (RecordError, OSError) as error:
        raise UsageError(f"{parent.absolute()}: {error}; name a folder that can be written to with --out") from None
    assert lock is not None
    return Place(folder, lock)


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
