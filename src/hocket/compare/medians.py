"""The curve in the middle of those of several repeats, which report at other times and end at other places."""

from __future__ import annotations

import bisect
import statistics
from collections.abc import Callable, Sequence

from hocket.compare.results import Point

Curves = Sequence[Sequence[Point]]


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
        return [(point.seconds, point.value) for point in sorted(curves, key=len)[-1]]
    found = []
    for samples in sorted({p.samples for curve in curves for p in curve if begin <= p.samples <= end}):
        seconds = [_at(curve, samples, lambda point: point.seconds) for curve in curves]
        values = [_at(curve, samples, lambda point: point.value) for curve in curves]
        found.append((statistics.median(seconds), statistics.median(values)))
    last = [statistics.median(curve[-1].seconds for curve in curves), statistics.median(c[-1].value for c in curves)]
    return [*found, (last[0], last[1])]


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
