"""Reads the curves of a run: what was reported when, and how far training was at its beginning and its end."""

from __future__ import annotations

import json
import math
import sqlite3
from contextlib import closing
from dataclasses import dataclass, field
from pathlib import Path

from hocket.errors import RecordError
from hocket.observe.reader import connect
from hocket.observe.tables import FILE


@dataclass(frozen=True)
class Curves:
    """Of one run, so far.

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


def read(folder: Path) -> Curves:
    """Read those in the record in ``folder``, while the run goes on or later."""
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
