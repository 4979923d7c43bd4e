"""Pictures of what the script has reported, against time and against samples, with the median of all repeats."""

from __future__ import annotations

import bisect
import math
import statistics
from collections.abc import Callable, Sequence

from hocket.lab.compare import amounts
from hocket.lab.compare.looks import Look, Looks, short
from hocket.lab.compare.picture import Axis, Panel, Picture, PlottedLine, far_apart, unit_of_seconds
from hocket.lab.compare.results import Comparison, Contender, Goal, Point

Curves = Sequence[Sequence[Point]]
Known = Sequence[tuple[Contender, Curves]]
_MARKS = 6  # markers on one curve
_AXES = {"time": "time since the training began", "samples": "samples, of all workers"}


def pictures(comparison: Comparison, looks: Looks) -> list[Picture]:
    """Two for each metric: against time, and against samples where they are known."""
    shown = best_of_each(comparison)
    counts = {each.workers for each in shown if each.workers > 1}
    on = f", {counts.pop()} workers" if len(counts) == 1 else ""
    found: list[Picture] = []
    for number, metric in enumerate(comparison.metrics):
        known = [(entry, curves) for entry in shown if (curves := _finite(entry, metric))]
        target = comparison.target if comparison.target and comparison.target.metric == metric else None
        counted = any(have_samples(curves) for _, curves in known)
        for against in ("time", "samples") if counted else ("time",) if known else ():
            found.append(
                Picture(
                    f"metric-{number}-{_slug(metric)}-{against}",
                    f"{amounts.line(metric)} against {against}{on}",
                    _caption(against, known, target),
                    (_panel(metric, against, known, target, looks),),
                    height=270,
                    leads=against == "time",
                )
            )
    return found


def best_of_each(comparison: Comparison) -> list[Contender]:
    """One worker, and each strategy on those workers that were first at the target, or else on the most."""
    best: dict[str, Contender] = {}
    for entry in comparison.entries:
        if entry.workers > 1 and entry.good:
            time, other = entry.time_to_target, best.get(entry.strategy)
            least = other.time_to_target if other else None
            if other is None or (time.median < least.median if time and least else least is None):
                best[entry.strategy] = entry
    baseline = [comparison.baseline] if comparison.baseline and comparison.baseline.good else []
    return [*baseline, *best.values()]


def against_samples(curves: Curves) -> list[tuple[float, float, float, float]]:
    """Samples, and the median, lowest and highest value of all ``curves``, wherever one of them has a point.

    From where all have begun to where half of them have ended; one that has ended keeps its last value.
    """
    begin, end = max(curve[0].samples for curve in curves), statistics.median(curve[-1].samples for curve in curves)
    found = []
    for samples in sorted({p.samples for curve in curves for p in curve if begin <= p.samples <= end} | {end}):
        values = [_at(curve, samples, lambda point: point.value) for curve in curves]
        found.append((float(samples), statistics.median(values), min(values), max(values)))
    return found


def against_time(curves: Curves) -> list[tuple[float, float]]:
    """Medians of seconds and of values after as many samples in each, and then of where each has ended.

    A repeat that was slower has the same points later: by time, there would be nothing in the middle of the two.
    """
    begin, end = max(curve[0].samples for curve in curves), min(curve[-1].samples for curve in curves)
    if not have_samples(curves):
        return [(point.seconds, point.value) for point in max(curves, key=len)]
    found = []
    for samples in sorted({p.samples for curve in curves for p in curve if begin <= p.samples <= end}):
        seconds = [_at(curve, samples, lambda point: point.seconds) for curve in curves]
        values = [_at(curve, samples, lambda point: point.value) for curve in curves]
        found.append((statistics.median(seconds), statistics.median(values)))
    last = [curve[-1] for curve in curves]
    return [*found, (statistics.median(p.seconds for p in last), statistics.median(p.value for p in last))]


def have_samples(curves: Curves) -> bool:
    """Whether it is known how many samples had been seen at each point."""
    return any(curve[-1].samples > 0 for curve in curves)


def _at(curve: Sequence[Point], samples: float, what: Callable[[Point], float]) -> float:
    """On the line between two points; before the first and after the last, what is there."""
    number = bisect.bisect_right(curve, samples, key=lambda point: point.samples)
    if number == 0 or number == len(curve):
        return what(curve[max(0, number - 1)])
    before, after = curve[number - 1], curve[number]
    part = (samples - before.samples) / (after.samples - before.samples)
    return what(before) + (what(after) - what(before)) * part


def _finite(entry: Contender, metric: str) -> list[list[Point]]:
    curves = [[p for p in run.curves.get(metric, []) if math.isfinite(p.value)] for run in entry.good]
    return [curve for curve in curves if curve]


def _caption(against: str, known: Known, target: Goal | None) -> str:
    caption = "How much is learned from each sample, however fast samples are computed."
    if against == "time":
        caption = "Steeper is better: this is what the user waits for."
    if any(len(curves) > 1 for _, curves in known):
        spread = "thin lines are the repeats" if against == "time" else "bands their spread"
        caption += f" Thick lines are medians of the repeats, {spread}."
    reached = target is not None and any(entry.reached for entry, _ in known)
    return caption + (" Large markers: where the target is reached." if reached else "")


def _panel(metric: str, against: str, known: Known, target: Goal | None, looks: Looks) -> Panel:
    is_time = against == "time"
    ends = [curve[-1].seconds if is_time else float(curve[-1].samples) for _, curves in known for curve in curves]
    scale, unit = unit_of_seconds(ends) if is_time else (1.0, "")
    same = len({entry.workers for entry, _ in known if entry.workers > 1}) == 1
    lines: list[PlottedLine] = []
    for number, (entry, curves) in enumerate(known):
        label = short(entry.strategy if same and entry.workers > 1 else entry.name, 40)
        name, shift = f"curve-{number}", number / len(known)
        lines += _lines(name, curves, looks.of(entry), label, is_time, scale, shift)
    for entry, _ in known:
        points = [run.reached for run in entry.reached if run.reached]
        if points and target is not None:
            at = statistics.median(p.seconds / scale if is_time else p.samples for p in points)
            look = looks.of(entry)
            lines.append(PlottedLine([(at, target.value)], look.tone, marker=look.marker, size=9, joined=False))
    return Panel(
        Axis(f"{_AXES[against]} ({unit})" if unit else _AXES[against], far=far_apart(ends)),
        Axis(short(metric, 30), far=far_apart(p.value for _, curves in known for c in curves for p in c), zero=False),
        tuple(lines),
        level=(target.value, f"target {amounts.given(target.value)}") if target else None,
        level_above=target is None or target.rises,  # where no curve has been yet
    )


def _lines(
    name: str, curves: Curves, look: Look, label: str, is_time: bool, scale: float, shift: float
) -> list[PlottedLine]:
    """What shows the spread, then the median with its markers, ``shift`` of their distance later than others."""
    found: list[PlottedLine] = []
    spread: list[tuple[float, float]] = []
    if is_time:
        rows = [(seconds / scale, value) for seconds, value in against_time(curves)]
        for curve in curves if len(curves) > 1 else ():
            points = [(point.seconds / scale, point.value) for point in curve]
            found.append(PlottedLine(points, look.tone, width=0.8, alpha=0.4))
    else:
        medians = against_samples(curves)
        rows = [(row[0], row[1]) for row in medians]
        spread = [(row[2], row[3]) for row in medians] if len(curves) > 1 else []
    every = max(1, len(rows) // _MARKS)
    marked = (int(shift * every), every)
    median = PlottedLine(rows, look.tone, label, look.marker, look.dashes, spread, band=True, marked=marked, name=name)
    return [*found, median]


def _slug(metric: str) -> str:
    """``metric`` as a part of a file's name."""
    plain = "".join(letter if letter.isascii() and letter.isalnum() else "-" for letter in metric.lower()).strip("-")
    return plain[:40] or "metric"
