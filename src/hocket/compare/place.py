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
        return self.folder / "runs"

    @property
    def logs(self) -> Path:
        """The folder for what runs print."""
        return self.folder / "logs"

    def prepare(self, wanted: Mapping[str, Any]) -> None:
        """Write down what is wanted, and make what is needed."""
        for folder in (self.records, self.logs):
            folder.mkdir(exist_ok=True)
        store.write(self.folder / PLAN, {"signature": signature(dict(wanted)), "wanted": wanted})

    def close(self) -> None:
        """Let others write there."""
        os.close(self._lock)


def named(folder: Path, wanted: Mapping[str, Any]) -> Place:
    """The folder of ``--out``, new or with the same comparison in it.

    Raises:
        UsageError: It holds another one, is in use, or cannot be written to.
    """
    try:
        folder.mkdir(parents=True, exist_ok=True)
        tempfile.TemporaryFile(dir=folder).close()  # permissions do not say all: the disk may be read-only
    except OSError as error:
        raise UsageError(f"--out {folder}: {error.strerror}; choose a folder that can be written to") from None
    if (folder / PLAN).is_file():
        before = store.read(folder / PLAN).get("wanted", {})
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
            if store.read(plan).get("signature") != signature(dict(wanted)):
                continue
            lock = _take(plan.parent)
            if lock is None:
                continue
            place = Place(plan.parent, lock)
        except (UsageError, OSError, KeyError, TypeError):
            continue  # whatever it is, nothing is to be continued there
        if place.earlier is None or place.earlier.missing:
            return place
        place.close()
    try:
        folder = folders.make(parent, script)
        lock = _take(folder)
    except (RecordError, OSError) as error:
        raise UsageError(f"{parent.absolute()}: {error}; name a folder that can be written to with --out") from None
    assert lock is not None
    return Place(folder, lock)


def _take(folder: Path) -> int | None:
    """Lock the folder for this process, for as long as it lives; None if another one has it."""
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        os.close(descriptor)
        return None
    return descriptor
