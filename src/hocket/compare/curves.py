"""Pictures of what the script has reported, against time and against samples."""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from hocket.compare import amounts, axes, medians
from hocket.compare.canvas import Colours, Picture
from hocket.compare.results import Comparison, Entry, Point, Target
from hocket.compare.style import Look, Looks, short

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure
    from matplotlib.lines import Line2D

_MARKS = 6  # markers on one curve
_AXES = {"time": "time since the training began", "samples": "samples, of all workers"}


@dataclass(frozen=True)
class Line:
    """One strategy's: its name and look, a curve for each repeat, and where it reached the target, if it did."""

    label: str
    look: Look
    curves: list[list[Point]]
    reached: Point | None


def pictures(comparison: Comparison, looks: Looks) -> list[Picture]:
    """Two for each metric."""
    shown = best_of_each(comparison)
    found: list[Picture] = []
    for number, metric in enumerate(comparison.metrics):
        lines = [
            Line(label, looks.of(entry), curves, _reached(entry) if comparison.target and number == 0 else None)
            for entry, label in zip(shown, names(shown), strict=True)
            if (curves := _finite(entry, metric))
        ]
        target = comparison.target if comparison.target and comparison.target.metric == metric else None
        counts = {entry.workers for entry in shown if entry.workers > 1}
        on = f", {counts.pop()} workers" if len(counts) == 1 else ""
        name = f"metric-{number}-{_slug(metric)}"
        known = ["time", *(["samples"] if any(medians.have_samples(line.curves) for line in lines) else [])]
        found += [_picture(name, metric, on, against, lines, target) for against in known if lines]
    return found


def best_of_each(comparison: Comparison) -> list[Entry]:
    """One worker, and each strategy on those workers that were first at the target, or else on the most."""
    best: dict[str, Entry] = {}
    for entry in comparison.entries:
        if entry.workers > 1 and entry.good:
            time, other = entry.time_to_target, best.get(entry.strategy)
            least = other.time_to_target if other else None
            if other is None or (time.median < least.median if time and least else least is None):
                best[entry.strategy] = entry
    baseline = [comparison.baseline] if comparison.baseline and comparison.baseline.good else []
    return [*baseline, *best.values()]


def names(entries: Sequence[Entry]) -> list[str]:
    """What a legend calls them: without the workers where all but the baseline have as many."""
    same = len({entry.workers for entry in entries if entry.workers > 1}) == 1
    return [short(entry.strategy if same and entry.workers > 1 else entry.name, 40) for entry in entries]


def _reached(entry: Entry) -> Point | None:
    """The medians of time and of samples."""
    points = [run.reached for run in entry.reached if run.reached]
    if not points:
        return None
    samples = round(statistics.median(point.samples for point in points))
    return Point(statistics.median(point.seconds for point in points), samples, points[0].value)


def _finite(entry: Entry, metric: str) -> list[list[Point]]:
    curves = [[p for p in run.curves.get(metric, []) if math.isfinite(p.value)] for run in entry.good]
    return [curve for curve in curves if curve]


def _picture(name: str, metric: str, on: str, against: str, lines: Sequence[Line], target: Target | None) -> Picture:
    caption = (
        "Steeper is better: this is what the user waits for."
        if against == "time"
        else "How much is learned from each sample, however fast samples are computed."
    )
    if any(len(line.curves) > 1 for line in lines):
        spread = "thin lines are the repeats" if against == "time" else "bands their spread"
        caption += f" Thick lines are medians of the repeats, {spread}."
    if target is not None and any(line.reached for line in lines):
        caption += " Large markers: where the target is reached."
    return Picture(
        f"{name}-{against}",
        f"{amounts.line(metric)} against {against}{on}",
        caption,
        270 + axes.legend_height(line.label for line in lines),
        lambda figure, colours: _draw(figure, colours, metric, against, lines, target),
        leads=against == "time",
    )


def _draw(
    figure: Figure, colours: Colours, metric: str, against: str, lines: Sequence[Line], target: Target | None
) -> None:
    plot = figure.add_subplot()
    values = [point.value for line in lines for curve in line.curves for point in curve]
    ends = [_x(curve[-1], against) for line in lines for curve in line.curves]
    scale, unit = axes.unit_of_seconds(ends) if against == "time" else (1.0, "")
    for number, line in enumerate(lines):
        _line(plot, colours, line, number / len(lines), against, scale).set_gid(f"curve-{number}")
    if target is not None:
        _target(plot, colours, target)
        for line in lines:
            if line.reached is not None:
                at = _x(line.reached, against) / scale
                face, edge = colours[line.look.tone], colours["paper"]
                plot.plot(at, target.value, line.look.marker, color=face, ms=9, mec=edge, mew=1, zorder=4)
    far = axes.far_apart(values)
    if far:
        plot.set_yscale("log")
    axes.numbers(plot.yaxis, far)
    if axes.far_apart(ends):
        plot.set_xscale("log")
        axes.numbers(plot.xaxis, logarithmic=True)
    else:
        plot.set_xlim(left=0)
        axes.numbers(plot.xaxis)
    plot.set_xlabel(f"{_AXES[against]} ({unit})" if unit else _AXES[against])
    plot.set_ylabel(short(metric, 30))
    axes.legend(figure, plot)


def _line(plot: Axes, colours: Colours, line: Line, shift: float, against: str, scale: float) -> Line2D:
    """The median with its markers, ``shift`` of their distance later than others, and what shows the spread."""
    colour, several = colours[line.look.tone], len(line.curves) > 1
    if against == "time":
        rows = [(seconds / scale, value) for seconds, value in medians.against_time(line.curves)]
        for curve in line.curves if several else []:
            each = [(point.seconds / scale, point.value) for point in curve]
            plot.plot(*zip(*each, strict=True), color=colour, alpha=0.4, lw=0.8)
    else:
        found = medians.against_samples(line.curves)
        rows = [(row[0], row[1]) for row in found]
        if several:
            xs, lowest, highest = [row[0] for row in found], [row[2] for row in found], [row[3] for row in found]
            plot.fill_between(xs, lowest, highest, color=colour, alpha=0.16, lw=0)
    every = max(1, len(rows) // _MARKS)
    (drawn,) = plot.plot(
        *zip(*rows, strict=True),
        color=colour,
        marker=line.look.marker,
        markevery=(int(shift * every), every),
        label=line.label,
    )
    if line.look.dashes:
        drawn.set_dashes(line.look.dashes)
    return drawn


def _target(plot: Axes, colours: Colours, target: Target) -> None:
    """Its name stands where no curve has been yet: at the left, on the side of what is good enough."""
    plot.axhline(target.value, color=colours["ink"], lw=1, ls=(0, (4, 3)), gid="target")
    plot.annotate(
        f"target {amounts.given(target.value)}",
        (0, target.value),
        xycoords=("axes fraction", "data"),
        xytext=(3, 3 if target.rises else -3),
        textcoords="offset points",
        va="bottom" if target.rises else "top",
        bbox={"facecolor": colours["paper"], "edgecolor": "none", "pad": 0.5},
    )
    plot.margins(y=0.12)


def _x(point: Point, against: str) -> float:
    return point.seconds if against == "time" else float(point.samples)


def _slug(metric: str) -> str:
    """``metric`` as a part of a file's name."""
    plain = "".join(letter if letter.isascii() and letter.isalnum() else "-" for letter in metric.lower()).strip("-")
    return plain[:40] or "metric"
