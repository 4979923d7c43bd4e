"""Axes: units, ticks that people read, and logarithms where values are far apart."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING

from hocket.compare import amounts
from hocket.compare.canvas import LETTER, WIDTH

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.axis import Axis
    from matplotlib.figure import Figure

_HANDLE = 62  # pixels beside the words of a legend's column
_FAR = 100  # the largest and the smallest value so far apart need a logarithmic axis


def unit_of_seconds(values: Iterable[float]) -> tuple[float, str]:
    """That of an axis for all of ``values``."""
    found = list(values)
    return (1.0, "s") if far_apart(found) else amounts.unit_of_seconds(max(found, default=1.0))


def far_apart(values: Iterable[float]) -> bool:
    """Whether positive ``values`` span more than two decades; a value below zero forbids it."""
    known = [value for value in values if math.isfinite(value) and value != 0]
    return bool(known) and min(known) > 0 and max(known) > _FAR * min(known)


def numbers(axis: Axis, logarithmic: bool = False, whole: bool = False, ticks: int = 5) -> None:
    """Ticks of ``axis`` as plain numbers: 0.95, 20 k, 1.5 M."""
    from matplotlib.ticker import FuncFormatter, LogLocator, MaxNLocator, NullFormatter

    axis.set_major_formatter(FuncFormatter(lambda value, _: tick(value)))
    if logarithmic:
        axis.set_major_locator(LogLocator(numticks=ticks + 1))
        axis.set_minor_formatter(NullFormatter())
    else:
        axis.set_major_locator(MaxNLocator(ticks, integer=whole, steps=[1, 2, 2.5, 5, 10]))


def tick(value: float) -> str:
    """A number beside an axis."""
    for power, unit in ((1e9, " G"), (1e6, " M"), (1e4, " k")):
        if abs(value) >= power * 0.999:
            return f"{amounts.plain(value / (1e3 if power == 1e4 else power), 4)}{unit}"
    return amounts.plain(value, 4)


def worker_counts(axes: Axes, counts: Iterable[int], gap: float = 0.06) -> None:
    """A tick for each count on the x axis that is not within ``gap`` of its length of another one."""
    found = sorted(set(counts))
    room = 0.08 * max(1, found[-1] - found[0])
    axes.set_xlim(found[0] - room, found[-1] + room)
    kept = found[-1:]
    for count in reversed(found[:-1]):
        if kept[0] - count >= gap * (found[-1] - found[0]):
            kept.insert(0, count)
    axes.set_xticks(kept, [str(count) for count in kept])


def legend(figure: Figure, axes: Axes) -> None:
    """Below everything, where it covers no data, in as many columns as fit."""
    handles, labels = axes.get_legend_handles_labels()
    if handles:
        figure.legend(handles, labels, loc="outside lower center", ncols=_columns(labels))


def legend_height(labels: Iterable[str]) -> float:
    """The pixels that ``legend`` needs."""
    found = list(labels)
    return 10 + 19 * math.ceil(len(found) / _columns(found))


def _columns(labels: Sequence[str]) -> int:
    for columns in (3, 2):
        rows = math.ceil(len(labels) / columns)
        longest = [max(map(len, labels[first : first + rows])) for first in range(0, len(labels), rows)]
        if sum(LETTER * most + _HANDLE for most in longest) <= WIDTH:
            return len(longest)
    return 1
