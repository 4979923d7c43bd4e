"""The summary as a table: a row for each strategy on so many workers, a column for each number that somebody has."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

from hocket.lab.compare import amounts
from hocket.lab.compare.looks import PARTS
from hocket.lab.compare.results import Comparison, Contender, Spread

NOTHING = "–"


@dataclass(frozen=True)
class TableColumn:
    """One column of a table.

    Attributes:
        title: The title above the column.
        text: Gives the text for a contender, in one line or two.
        about: What the column means.
        is_text: Whether the text is aligned to the left, as names are.
        weight: Where there is no room for all columns, those that weigh least are left out first.
    """

    title: str
    text: Callable[[Contender], str]
    about: str = ""
    is_text: bool = False
    weight: int = 0


def of(comparison: Comparison) -> tuple[list[TableColumn], list[list[str]]]:
    """Columns in which something is known, and for each contender the texts in them."""
    columns = [(column, [column.text(entry) for entry in comparison.entries]) for column in _columns(comparison)]
    kept = [(column, texts) for column, texts in columns if any(text != NOTHING for text in texts)]
    rows = [list(row) for row in zip(*(texts for _, texts in kept), strict=True)] if comparison.entries else []
    return [column for column, _ in kept], rows


def speed_up(comparison: Comparison, entry: Contender) -> float | None:
    """Samples a second over those of one worker."""
    one = comparison.baseline.speed if comparison.baseline else None
    return entry.speed.median / one.median if entry.speed and one and one.median else None


def faster(comparison: Comparison, entry: Contender) -> float | None:
    """How many times as fast as one worker it was at the target, or at the end where only that is known."""
    time = whole_time if is_time_alone(comparison) else _time_to_target
    one, own = time(comparison.baseline) if comparison.baseline else None, time(entry)
    return one.median / own.median if own and own.median and one else None


def is_time_alone(comparison: Comparison) -> bool:
    """Whether nothing is known but how long each run took: no target, and no training loop of ours."""
    return comparison.target is None and not any(entry.speed for entry in comparison.entries)


def whole_time(entry: Contender) -> Spread | None:
    """Seconds of whole runs."""
    return Spread.of([result.seconds for result in entry.good if result.seconds > 0])


def knows_sent(entry: Contender) -> bool:
    """Whether its bytes were counted: a script that distributes nothing tells nothing."""
    return bool(entry.good) and (entry.workers == 1 or any(result.sent or result.told for result in entry.good))


def shares_memory(entry: Contender) -> bool:
    """Whether its workers handed nothing over because they have the same memory."""
    told = [str(result.told.get("communication", "")) for result in entry.good]
    return entry.workers > 1 and not any(r.sent for r in entry.good) and any("shared memory" in way for way in told)


def shares(entry: Contender) -> str:
    """``88 · 3 · 9 %``: compute, communication, waiting."""
    return " · ".join(map(str, amounts.percents([entry.shares.get(part, 0.0) for part in PARTS]))) + " %"


def step_samples(entry: Contender) -> float | None:
    """Samples in a step of the optimizer, of all workers, where that was measured."""
    known = [result.gradients for result in entry.good if result.gradients.get("unit", "samples") == "samples"]
    values = [gradients.get("samples in a step") for gradients in known]
    spread = Spread.of([float(value) for value in values if isinstance(value, (int, float)) and value > 0])
    return spread.median if spread else None


def _time_to_target(entry: Contender) -> Spread | None:
    return entry.time_to_target


def _columns(comparison: Comparison) -> list[TableColumn]:
    def time(entry: Contender) -> str:
        if comparison.target is None:
            return NOTHING
        if entry.failure:
            return "failed"
        if entry.time_to_target is None:
            return "not reached" if entry.good else NOTHING
        part = f" ({len(entry.reached)} of {len(entry.results)})" if len(entry.reached) < len(entry.results) else ""
        return amounts.seconds(entry.time_to_target.median) + part + _spread(entry.time_to_target)

    def whole(entry: Contender) -> str:
        spread = whole_time(entry)
        if comparison.target is None and entry.failure:
            return "failed"
        if comparison.target is not None or spread is None:
            return NOTHING
        return amounts.seconds(spread.median) + _spread(spread)

    steps = [step_samples(entry) for entry in comparison.entries]
    sizes = [size for size in steps if size]
    # A batch at the end of a pass is smaller, so that means are never quite the same.
    differ = bool(sizes) and max(sizes) > 1.2 * min(sizes)

    def step(entry: Contender) -> str:
        size = step_samples(entry)
        return amounts.plain(size) if differ and size else NOTHING

    def efficiency(entry: Contender) -> str:
        value = speed_up(comparison, entry)
        return NOTHING if value is None else amounts.share(value / entry.workers)

    def times(value: float | None) -> str:
        return NOTHING if value is None else amounts.times(value)

    counted = any(knows_sent(entry) for entry in comparison.entries if entry.workers > 1)

    def sent(entry: Contender) -> str:
        return _sent(entry) if counted else NOTHING

    until = " until the target" if comparison.target else ""
    goal = "end" if is_time_alone(comparison) else "target"
    found = [
        TableColumn("strategy", _name, "what is exchanged, and when", is_text=True),
        TableColumn("workers", _processes, "processes that run the script, below it those beside them"),
        TableColumn("time to target", time, "the median, below it the fastest and the slowest repeat"),
        TableColumn("time", whole, "of the whole run: the median, below it the fastest and the slowest repeat"),
        TableColumn("= one pass", lambda e: _maybe(e.seconds_per_pass, "s"), "seconds for one pass over the data"),
        TableColumn("× passes", lambda e: _maybe(e.passes, ""), "over the data, until the target"),
        TableColumn("times as fast", lambda e: times(faster(comparison, e)), f"as one worker, to the {goal}"),
        TableColumn("samples/s", lambda e: amounts.plain(e.speed.median) if e.speed else NOTHING, "of all workers"),
        TableColumn("speed-up", lambda e: times(speed_up(comparison, e)), "samples a second over one worker's"),
        TableColumn("efficiency", efficiency, "speed-up for each worker"),
        TableColumn("samples a step", step, "of all workers, in one step of the optimizer"),
        TableColumn("compute · communication · waiting", _shares, "shares of the training time of all workers"),
        TableColumn("sent", sent, f"bytes that all workers handed to exchanges{until}"),
        TableColumn("staleness", _staleness, "mean (and most) updates between pull and push"),
    ]
    for metric in comparison.metrics:
        title = f"final {amounts.line(metric)}"
        found.append(TableColumn(title, _last(metric), "the median of the repeats' last values"))
    return found


def _name(entry: Contender) -> str:
    return "one worker" if entry.workers == 1 else entry.strategy


def _processes(entry: Contender) -> str:
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


def _shares(entry: Contender) -> str:
    return shares(entry) if entry.shares else NOTHING


def _sent(entry: Contender) -> str:
    if entry.sent is None or not knows_sent(entry):
        return NOTHING
    return amounts.size(entry.sent.median) + ("\nshared memory" if shares_memory(entry) else "")


def _staleness(entry: Contender) -> str:
    counts = entry.staleness
    if not counts:
        return NOTHING
    mean = sum(staleness * count for staleness, count in counts.items()) / max(1, sum(counts.values()))
    return f"{amounts.plain(mean, 2)} ({max(counts)})"


def _last(metric: str) -> Callable[[Contender], str]:
    def text(entry: Contender) -> str:
        values = [run.curves[metric][-1].value for run in entry.good if run.curves.get(metric)]
        spread = Spread.of([value for value in values if math.isfinite(value)])
        wrong = sum(not math.isfinite(value) for value in values)
        if spread is None:
            return "NaN" if wrong else NOTHING
        return amounts.metric(spread.median) + (f" ({wrong} NaN)" if wrong else "")

    return text
