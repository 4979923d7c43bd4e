"""Writes rows to a run's database: gathered in memory, and committed together.

Between two commits no lock is held, so a run can be read while it goes on. What is committed survives the death
of the process by any signal.
"""

from __future__ import annotations

import contextlib
import sqlite3
from collections.abc import Iterator
from pathlib import Path

from hocket.errors import RecordError
from hocket.observe.tables import TABLES, VERSION

Value = str | int | float | None
_MOST_BUSY = 10  # commits in a row that a reader may hold up; with WAL none does


class Writer:
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
