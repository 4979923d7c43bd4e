"""Rows of bars: a name above each, the median as its length, whiskers from the lowest to the highest, and its value."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from hocket.compare import axes
from hocket.compare.canvas import LETTER, WIDTH, Colours, Picture
from hocket.compare.results import Entry, Spread
from hocket.compare.style import Looks, short

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

_ROW, _AROUND = 38, 66  # pixels for each, and for axis and title
_BAR, _NAME = 0.36, -0.26  # how thick a bar is, and how far above its middle its name ends, in rows


@dataclass(frozen=True)
class Panel:
    """One set of bars.

    Attributes:
        label: Of the axis, with its unit.
        values: One for each row; None for no bar.
        text: What is written after a bar.
        missing: What is written where there is none, for each row.
        unit: How much of the values' unit is one of the axis.
    """

    label: str
    values: Sequence[Spread | None]
    text: Callable[[Spread], str]
    missing: Sequence[str]
    unit: float = 1.0


def height(rows: int) -> float:
    """In pixels."""
    return _AROUND + _ROW * rows


def picture(
    name: str, title: str, caption: str, entries: Sequence[Entry], looks: Looks, panels: Sequence[Panel]
) -> Picture:
    """One with a row for each entry."""
    return Picture(
        name,
        title,
        caption,
        height(len(entries)),
        lambda figure, colours: draw(figure, colours, looks, entries, panels),
    )


def draw(figure: Figure, colours: Colours, looks: Looks, entries: Sequence[Entry], panels: Sequence[Panel]) -> None:
    """Panels beside each other; names stand above the bars of the first and may reach over the others."""
    plots = figure.subplots(1, len(panels), sharey=True, squeeze=False)[0]
    for number, (panel, plot) in enumerate(zip(panels, plots, strict=True)):
        plot.spines["left"].set_visible(number == 0)  # names may reach over the others
        _panel(plot, colours, looks, entries, panel, (WIDTH - 30) / len(panels) - 10, f"{number}-")
    for row, entry in enumerate(entries):
        plots[0].annotate(
            short(entry.name, 49),
            (0, row + _NAME),
            xycoords=("axes fraction", "data"),
            xytext=(2, 0),
            textcoords="offset points",
            va="bottom",
        ).set_in_layout(False)  # it may reach over the next panel


def frame(plot: Axes, rows: int) -> None:
    """Rows from top to bottom, nothing written beside them."""
    plot.set_ylim(rows - 1 + 0.35, -0.85)
    plot.set_yticks([])
    plot.grid(False)


def _panel(
    plot: Axes, colours: Colours, looks: Looks, entries: Sequence[Entry], panel: Panel, width: float, ids: str
) -> None:
    known = [spread for spread in panel.values if spread is not None]
    far = axes.far_apart(value / panel.unit for spread in known for value in (spread.lowest, spread.highest))
    if far:
        plot.set_xscale("log")
        least = min(value for spread in known if (value := spread.lowest / panel.unit) > 0)
        plot.set_xlim(left=10 ** math.floor(math.log10(least) - 0.2))
    end = plot.get_xlim()[0] if far else 0.0
    left = end
    for row, (entry, spread) in enumerate(zip(entries, panel.values, strict=True)):
        if spread is None:
            text = panel.missing[row]
        else:
            text = panel.text(spread)
            lowest, median, highest = (x / panel.unit for x in (spread.lowest, spread.median, spread.highest))
            if median > left:
                look = looks.of(entry)
                plot.barh(
                    row,
                    median - left,
                    left=left,
                    height=_BAR,
                    facecolor=colours[look.tone],
                    hatch=look.hatch,
                    edgecolor=colours["paper"],
                    linewidth=0,
                    gid=f"bar-{ids}{row}",
                )
            if highest > lowest:
                plot.errorbar(
                    median,
                    row,
                    xerr=[[median - lowest], [highest - median]],
                    color=colours["ink"],
                    capsize=3,
                    elinewidth=1.2,
                )
        at = left if spread is None else max(left, spread.highest / panel.unit)
        plot.annotate(text, (at, row), xytext=(4, 0), textcoords="offset points", va="center").set_in_layout(False)
        room = max(0.25, 1 - (LETTER * len(text) + 10) / width)  # the part of the axis that is left for the bar
        end = max(end, left * (at / left) ** (1 / room) if far else at / room)
    plot.set_xlim(left, end if end > left else left + 1)
    frame(plot, len(entries))
    axes.numbers(plot.xaxis, far, ticks=5 if width > 250 else 3)
    plot.set_xlabel(panel.label)
