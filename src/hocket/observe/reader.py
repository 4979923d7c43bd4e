"""Reads the record of a run, while it goes on or later: the run as a whole, and its curves."""

from __future__ import annotations

import json
import math
import os
import socket
import sqlite3
import statistics
import time
from contextlib import closing
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from hocket.errors import RecordError
from hocket.observe.run_records import FILE, VERSION


@dataclass(frozen=True)
class Metric:
    """One metric over the whole run."""

    count: int
    first: float
    lowest: float
    highest: float
    last: float
    last_step: int


@dataclass(frozen=True)
class RunSpeed:
    """The run as a whole; shares are those of rank 0. None where nothing was told."""

    samples_per_second: float | None = None
    step_seconds: float | None = None  # the median
    waiting: float | None = None
    communication: float | None = None
    epoch: int | None = None
    total: int | None = None
    seen: int | None = None


@dataclass(frozen=True)
class RecordedRun:
    """What a record says.

    Attributes:
        facts: By section (run, settings, versions, host, hosts, told, began, sent, servers, served) and
            name.
        state: ``running``, ``finished``, ``failed (STATUS)`` or ``killed``; ``unknown`` where the launcher is
            on another host.
        seconds: From the start to the end, or to the last sign of life.
    """

    id: str
    folder: Path
    facts: dict[str, dict[str, Any]]
    state: str
    seconds: float
    status: int | None = None
    reason: str | None = None
    metrics: dict[str, Metric] = field(default_factory=dict)
    speed: RunSpeed = RunSpeed()
    ranks: dict[int, dict[str, float]] = field(default_factory=dict)
    events: list[dict[str, Any]] = field(default_factory=list)

    def fact(self, section: str, name: str) -> Any:
        """One fact, or None."""
        return self.facts.get(section, {}).get(name)

    @property
    def strategy(self) -> str:
        """What the workers say, for the script may have chosen it; else the setting."""
        return str(self.fact("told", "strategy") or self.fact("settings", "strategy") or "?")


@dataclass(frozen=True)
class Curves:
    """What one run has reported so far, and how far its training was at its beginning and its end.

    Attributes:
        metrics: By name, in the order of their first values: times, samples, values, and the bytes that rank 0 had
            handed to exchanges by then.
        first: The time of the first batch that rank 0 had; None if there was none, so no training loop of ours.
        last: The time of the last sign of it, the end of an epoch if there was one; ``seen`` samples by then.
        epoch: In which it was then, from 1; ``step`` batches of it.
        began: When the training began, by the clock of rank 0, as times of metrics are.
        pass_samples: Samples of a pass over the data, if rank 0 knows.
    """

    metrics: dict[str, list[tuple[float, int, float, int]]] = field(default_factory=dict)
    first: float | None = None
    last: float | None = None
    seen: int = 0
    epoch: int = 0
    step: int = 0
    began: float | None = None
    pass_samples: int | None = None


def read(folder: Path) -> RecordedRun:
    """Read the record in ``folder``."""
    try:
        with closing(connect(folder / FILE)) as database:
            version = database.execute("PRAGMA user_version").fetchone()[0]
            if version != VERSION:
                raise RecordError(
                    f"{folder / FILE}: its tables have version {version}, and this Hocket reads {VERSION}"
                )
            database.execute("BEGIN")  # one state of the run, and not several
            return _read(folder, database)
    except (sqlite3.Error, ValueError) as error:
        raise RecordError(f"{folder / FILE} cannot be read: {error}") from None


def read_curves(folder: Path) -> Curves:
    """Read the curves in the record in ``folder``, while the run goes on or later."""
    metrics: dict[str, list[tuple[float, int, float, int]]] = {}
    try:
        with closing(connect(folder / FILE)) as database:
            database.execute("BEGIN")
            rows = database.execute("SELECT name, time, samples, value, sent FROM metrics ORDER BY rowid")
            for name, when, samples, value, sent in rows:
                metrics.setdefault(name, []).append((when, samples, math.nan if value is None else value, sent))
            first = database.execute("SELECT time FROM steps ORDER BY rowid LIMIT 1").fetchone()
            last = database.execute("SELECT time, seen, epoch, step FROM steps ORDER BY rowid DESC LIMIT 1").fetchone()
            begun = database.execute(
                "SELECT time, details FROM events WHERE name = 'training began' AND rank = 0 LIMIT 1"
            ).fetchone()
    except sqlite3.Error as error:
        raise RecordError(f"{folder / FILE} cannot be read: {error}") from None
    if first is None:
        return Curves(metrics)
    told = (begun[0], json.loads(begun[1]).get("samples of a pass")) if begun is not None else (None, None)
    return Curves(metrics, first[0], *last, *told)


def connect(path: Path) -> sqlite3.Connection:
    """Open a record for reading, even one on a disk that cannot be written to."""
    address = path.resolve().as_uri()
    try:
        database = sqlite3.connect(f"{address}?mode=ro", uri=True)
        database.execute("SELECT count(*) FROM sqlite_schema").fetchone()
    except sqlite3.OperationalError as error:
        if error.sqlite_errorcode & 0xFF not in (sqlite3.SQLITE_CANTOPEN, sqlite3.SQLITE_READONLY):
            raise
        # On a disk that cannot be written to there is no place for WAL's index, and nobody who writes either.
        database = sqlite3.connect(f"{address}?immutable=1", uri=True)
    return database


def _read(folder: Path, database: sqlite3.Connection) -> RecordedRun:
    facts: dict[str, dict[str, Any]] = {}
    for section, name, value in database.execute("SELECT section, name, value FROM facts"):
        facts.setdefault(section, {})[name] = json.loads(value)
    ended = database.execute("SELECT status, reason, seconds FROM exit").fetchone()
    started = float(facts["run"]["started"]) if "run" in facts else 0.0
    if ended is not None:
        state, seconds = f"failed ({ended[0]})" if ended[0] else "finished", ended[2]
    else:
        state = _state_of(facts)
        seconds = (time.time() if state == "running" else _last_sign(database, started)) - started
    return RecordedRun(
        id=folder.name,
        folder=folder,
        facts=facts,
        state=state,
        seconds=seconds,
        status=ended[0] if ended else None,
        reason=ended[1] if ended else None,
        metrics=_metrics(database),
        speed=_speed(database),
        ranks={
            rank: {"waited": waited, "exchanging": exchanging}
            for rank, waited, exchanging in database.execute("SELECT rank, waited, exchanging FROM ranks ORDER BY rank")
        },
        events=[
            {"time": when, "rank": rank, "name": name, "details": json.loads(details)}
            for when, rank, name, details in database.execute(
                "SELECT time, rank, name, details FROM events ORDER BY time"
            )
        ],
    )


def _state_of(facts: dict[str, dict[str, Any]]) -> str:
    """The state of a run whose end is not recorded: ``running``, ``killed`` or ``unknown``."""
    run = facts.get("run", {})
    if facts.get("host", {}).get("name") != socket.gethostname():
        return "unknown"
    return "running" if _is_alive(int(run["pid"]), run.get("pid_started")) else "killed"


def process_start(pid: int) -> int | None:
    """When a process started, in the kernel's ticks: with it, a process id that is used again is recognised."""
    try:
        return int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[19])
    except (OSError, IndexError):
        return None


def _is_alive(pid: int, started: int | None) -> bool:
    if started is not None:
        return process_start(pid) == started and not _is_zombie(pid)
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except PermissionError:
        return True
    return True


def _is_zombie(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] == "Z"
    except OSError:
        return True


def _last_sign(database: sqlite3.Connection, started: float) -> float:
    latest = started
    for table in ("ranks", "metrics", "events"):
        when: float | None = database.execute(f"SELECT max(time) FROM {table}").fetchone()[0]
        latest = max(latest, when or 0.0)
    return latest


def _metrics(database: sqlite3.Connection) -> dict[str, Metric]:
    found = {}
    query = (
        "SELECT name, count(*), min(value), max(value), min(rowid), max(rowid) FROM metrics "
        "GROUP BY name ORDER BY min(rowid)"
    )
    for name, count, lowest, highest, first, last in database.execute(query).fetchall():
        ends = [
            database.execute("SELECT value, step FROM metrics WHERE rowid = ?", (row,)).fetchone()
            for row in (first, last)
        ]
        (start, _), (end, step) = ends
        found[name] = Metric(count, _real(start), _real(lowest), _real(highest), _real(end), step)
    return found


def _real(value: float | None) -> float:
    return math.nan if value is None else value


def _speed(database: sqlite3.Connection) -> RunSpeed:
    """Each row counts as much as the time since the row before it."""
    last = database.execute("SELECT epoch, total, seen FROM steps ORDER BY rowid DESC LIMIT 1").fetchone()
    if last is None:
        return RunSpeed()
    mean = database.execute(
        "SELECT sum(samples_per_second * span) / sum(span), sum(waiting * span) / sum(span), "
        "sum(communication * span) / sum(span) "
        "FROM (SELECT *, time - lag(time) OVER (ORDER BY rowid) AS span FROM steps) "
        "WHERE samples_per_second IS NOT NULL AND span > 0"
    ).fetchone()
    times = [row[0] for row in database.execute("SELECT seconds FROM steps WHERE seconds IS NOT NULL")]
    return RunSpeed(mean[0], statistics.median(times) if times else None, mean[1], mean[2], *last)
