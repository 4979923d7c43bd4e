"""Records of runs on disk: a folder for each run, the tables of its database, and the one writer of them.

A folder is named by date, time, script and six digits: three are the fraction of the second, so that runs sort by their
start, and three are random. ``docs/observe.md`` explains the tables to whoever reads them without Hocket. Rows are
gathered in memory and committed together: between two commits no lock is held, so a run can be read while it goes on,
and what is committed survives the death of the process by any signal.
"""

from __future__ import annotations

import contextlib
import re
import secrets
import sqlite3
import time
from collections.abc import Iterator
from pathlib import Path

from hocket.errors import RecordError, UsageError

FILE = "run.sqlite"
VERSION = 2  # goes up when a table changes; kept in PRAGMA user_version

TABLES = {
    # One row each, the value as JSON. Sections: run, settings, versions, host, hosts, told (by the workers), began
    # (what each rank had waited when its training began), sent (bytes, by rank), servers (a summary), served (the last
    # that each server has told).
    "facts": "section TEXT, name TEXT, value TEXT, PRIMARY KEY (section, name)",
    # How far rank 0 was; what is a rate or a share is of the time since the row before, NULL in the first.
    "steps": (
        "time REAL, epoch INTEGER, step INTEGER, total INTEGER, seen INTEGER, "
        "seconds REAL, samples_per_second REAL, waiting REAL, communication REAL"
    ),
    # What the script has reported on rank 0, and the bytes that this rank had handed to exchanges by then; SQLite has
    # no NaN, so NULL stands for it.
    "metrics": "step INTEGER, samples INTEGER, time REAL, name TEXT, value REAL, sent INTEGER",
    # Details as JSON; rank NULL is the launcher, or the server that the details name.
    "events": "time REAL, rank INTEGER, name TEXT, details TEXT",
    # The last that each rank has told of itself, in seconds since it started; all processes of a number together.
    "ranks": "rank INTEGER PRIMARY KEY, time REAL, waited REAL, exchanging REAL",
    # At most one row; none while the run goes on, or if the launcher was killed.
    "exit": "time REAL, status INTEGER, reason TEXT, seconds REAL",
}

Value = str | int | float | None
_MOST_BUSY = 10  # commits in a row that a reader may hold up; with WAL none does


def make(parent: Path, script: str) -> Path:
    """Make the folder of a new run below ``parent``; its name is the run's id."""
    name = re.sub(r"[^A-Za-z0-9.-]+", "-", script)[:40].strip("-.") or "script"
    while True:
        now = time.time()
        date = time.strftime("%Y-%m-%d_%H-%M-%S", time.localtime(now))
        folder = parent / f"{date}_{name}_{int(now % 1 * 4096):03x}{secrets.randbelow(4096):03x}"
        try:
            parent.mkdir(parents=True, exist_ok=True)
            folder.mkdir()
        except FileExistsError:
            if parent.is_dir():
                continue  # another run has taken this name
            raise RecordError(f"{parent} is no folder") from None
        except OSError as error:
            raise RecordError(error.strerror or str(error)) from None
        return folder


def all_in(parent: Path) -> list[Path]:
    """The folders of all runs, oldest first."""
    found = [file.parent for file in parent.glob(f"*/{FILE}")]
    return sorted(found, key=lambda folder: (folder.name[:19], folder.name[-6:]))


def find(parent: Path, part: str) -> Path:
    """The run whose id contains ``part``, or the one that began ``last``."""
    found = all_in(parent)
    if not found:
        raise UsageError(f"no runs in {parent}: start one with hocket run, or name another folder with --run-dir")
    if part == "last":
        return found[-1]
    matching = [folder for folder in found if part == folder.name] or [f for f in found if part in f.name]
    if len(matching) == 1:
        return matching[0]
    what = f"{len(matching)} runs have {part!r} in their id" if matching else f"no run has {part!r} in its id"
    choices = [folder.name for folder in matching or found]
    shown = ", ".join(choices[-5:]) + (f" and {len(choices) - 5} more" if len(choices) > 5 else "")
    raise UsageError(f"{what}; {'write more of one of' if matching else 'there are'} {shown}")


class RecordWriter:
    """The one writer of a run's database, which it makes."""

    def __init__(self, path: Path) -> None:
        self._rows: dict[str, list[tuple[Value, ...]]] = {}
        self._busy = 0
        try:
            self._database = _open(path)
            with self._transaction():
                for table, columns in TABLES.items():
                    self._database.execute(f"CREATE TABLE {table} ({columns})")
                self._database.execute(f"PRAGMA user_version = {VERSION}")
        except sqlite3.Error as error:
            raise RecordError(str(error)) from None

    def add(self, table: str, *values: Value) -> None:
        """Keep a row for the next commit; it replaces one with the same primary key."""
        self._rows.setdefault(table, []).append(values)

    def commit(self) -> None:
        """Write all rows that were kept, or none of them."""
        if not self._rows:
            return
        try:
            with self._transaction():
                for table, rows in self._rows.items():
                    places = ", ".join("?" * len(rows[0]))
                    self._database.executemany(f"INSERT OR REPLACE INTO {table} VALUES ({places})", rows)
        except sqlite3.Error as error:
            # The last byte of the code is the kind; the others say more of it.
            kind = getattr(error, "sqlite_errorcode", 0) & 0xFF
            self._busy += 1
            if kind not in (sqlite3.SQLITE_BUSY, sqlite3.SQLITE_LOCKED) or self._busy > _MOST_BUSY:
                self._rows = {}
                raise RecordError(str(error)) from None
        except OverflowError as error:  # a number that does not fit into 64 bits
            self._rows = {}
            raise RecordError(str(error)) from None
        else:
            self._rows, self._busy = {}, 0

    def close(self) -> None:
        """Leave one file that can be copied and read anywhere; rows that were not committed are lost."""
        with contextlib.suppress(sqlite3.Error):  # somebody may be reading: then WAL's files stay beside it
            self._database.execute("PRAGMA journal_mode = DELETE")
        with contextlib.suppress(sqlite3.Error):
            self._database.close()

    @contextlib.contextmanager
    def _transaction(self) -> Iterator[None]:
        self._database.execute("BEGIN IMMEDIATE")
        try:
            yield
            self._database.execute("COMMIT")
        except BaseException:
            with contextlib.suppress(sqlite3.Error):  # a full disk has rolled it back already
                self._database.execute("ROLLBACK")
            raise


def _open(path: Path) -> sqlite3.Connection:
    database = _connect(path)
    try:
        # Readers and the writer do not hold each other up. Where this is not possible the answer is another mode,
        # or, on some network file systems, an error.
        database.execute("PRAGMA journal_mode = WAL")
    except sqlite3.OperationalError:
        database.close()
        path.unlink(missing_ok=True)
        database = _connect(path)
    database.execute("PRAGMA synchronous = NORMAL")
    return database


def _connect(path: Path) -> sqlite3.Connection:
    return sqlite3.connect(path.resolve().as_uri(), uri=True, timeout=1.0, isolation_level=None)
