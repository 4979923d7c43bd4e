"""The summary as a table: a row for each strategy on so many workers, a column for each number that somebody has."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

from hocket.compare import amounts
from hocket.compare.results import Comparison, Entry, Spread
from hocket.compare.style import PARTS

NOTHING = "–"


@dataclass(frozen=True)
class Column:
    """One column: ``title``, what it means, and whether it stands with numbers (at the right)."""

    title: str
    about: str
    number: bool = True


@dataclass(frozen=True)
class Table:
    """Columns, and for each entry of the comparison a row with a text for each of them, in one line or two."""

    columns: list[Column]
    rows: list[list[str]]


def of(comparison: Comparison) -> Table:
    """Without columns in which nothing is known."""
    columns = [(column, [text(entry) for entry in comparison.entries]) for column, text in _columns(comparison)]
    kept = [(column, texts) for column, texts in columns if any(text != NOTHING for text in texts)]
    rows = [list(row) for row in zip(*(texts for _, texts in kept), strict=True)] if comparison.entries else []
    return Table([column for column, _ in kept], rows)


def speed_up(comparison: Comparison, entry: Entry) -> float | None:
    """Samples a second over those of one worker."""
    one = comparison.baseline.speed if comparison.baseline else None
    return entry.speed.median / one.median if entry.speed and one and one.median else None


def faster(comparison: Comparison, entry: Entry) -> float | None:
    """How many times as fast as one worker it was at the target."""
    one, own = comparison.baseline.time_to_target if comparison.baseline else None, entry.time_to_target
    return one.median / own.median if own and own.median and one else None


def _columns(comparison: Comparison) -> list[tuple[Column, Callable[[Entry], str]]]:
    def time(entry: Entry) -> str:
        if entry.failure:
            return "failed"
        if comparison.target is None:
            return NOTHING
        if entry.time_to_target is None:
            return "not reached" if entry.good else NOTHING
        part = f" ({len(entry.reached)} of {len(entry.results)})" if len(entry.reached) < len(entry.results) else ""
        return amounts.seconds(entry.time_to_target.median) + part + _spread(entry.time_to_target)

    def efficiency(entry: Entry) -> str:
        value = speed_up(comparison, entry)
        return NOTHING if value is None else amounts.share(value / entry.workers)

    def times(value: float | None) -> str:
        return NOTHING if value is None else amounts.times(value)

    found: list[tuple[Column, Callable[[Entry], str]]] = [
        (Column("strategy", "what is exchanged, and when", False), _name),
        (Column("workers", "processes that run the script, below it those beside them"), _processes),
        (Column("time to target", "the median, below it the fastest and the slowest repeat"), time),
        (Column("= one pass", "seconds for one pass over the data"), lambda e: _maybe(e.seconds_per_pass, "s")),
        (Column("× passes", "over the data, until the target"), lambda e: _maybe(e.passes, "")),
        (Column("times as fast", "as one worker, to the target"), lambda e: times(faster(comparison, e))),
        (Column("samples/s", "of all workers"), lambda e: amounts.plain(e.speed.median) if e.speed else NOTHING),
        (Column("speed-up", "samples a second over one worker's"), lambda e: times(speed_up(comparison, e))),
        (Column("efficiency", "speed-up for each worker"), efficiency),
        (Column("compute · communication · waiting", "shares of the training time of all workers"), _shares),
        (Column("sent", "bytes that all workers handed to exchanges"), _sent),
        (Column("staleness", "mean (and most) updates between pull and push"), _staleness),
    ]
    for metric in comparison.metrics:
        found.append((Column(f"final {metric}", "the median of the repeats' last values"), _last(metric)))
    return found


def _name(entry: Entry) -> str:
    return "one worker" if entry.workers == 1 else entry.strategy


def _processes(entry: Entry) -> str:
    servers = f"\n+ {entry.servers} server{'s' if entry.servers > 1 else ''}" if entry.servers else ""
    return f"{entry.workers}{servers}"


def _maybe(value: float | None, unit: str) -> str:
    return NOTHING if value is None else amounts.seconds(value) if unit == "s" else amounts.plain(value, zeros=True)


def _spread(spread: Spread) -> str:
    """On a line of its own, if there is any."""
    if spread.lowest == spread.highest:
        return ""
    low, high = amounts.seconds(spread.lowest), amounts.seconds(spread.highest)
    same = low.rpartition(" ")[2] == high.rpartition(" ")[2] and low.count(" ") == high.count(" ") == 1
    return "" if low == high else f"\n{low.rpartition(' ')[0] if same else low}–{high}"


def _shares(entry: Entry) -> str:
    if not entry.shares:
        return NOTHING
    return " · ".join(f"{100 * entry.shares.get(part, 0.0):.0f}" for part in PARTS) + " %"


def _sent(entry: Entry) -> str:
    return amounts.size(entry.sent.median) if entry.sent else NOTHING


def _staleness(entry: Entry) -> str:
    counts = entry.staleness
    if not counts:
        return NOTHING
    mean = sum(staleness * count for staleness, count in counts.items()) / max(1, sum(counts.values()))
    return f"{amounts.plain(mean, 2)} ({max(counts)})"


def _last(metric: str) -> Callable[[Entry], str]:
    def text(entry: Entry) -> str:
        values = [run.curves[metric][-1].value for run in entry.good if run.curves.get(metric)]
        spread = Spread.of([value for value in values if math.isfinite(value)])
        wrong = sum(not math.isfinite(value) for value in values)
        if spread is None:
            return "NaN" if wrong else NOTHING
        return amounts.metric(spread.median) + (f" ({wrong} NaN)" if wrong else "")

    return text
