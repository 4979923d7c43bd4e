"""What a picture of a comparison is: panels of lines or bars, as data; ``drawing`` draws it."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from hocket.lab.compare import amounts

WIDTH = 400  # pixels: two beside each other on a desk, one on a phone
LETTER = 6.9  # pixels of one, on the average
_HANDLE = 62  # pixels beside the words of a legend's column
_ROW, _AROUND = 38, 66  # pixels for each row of bars, and for axis and title
_FAR = 100  # the largest and the smallest value so far apart need a logarithmic axis


@dataclass(frozen=True)
class Axis:
    """One axis of a panel.

    Attributes:
        label: What it shows, with the unit.
        ticks: Whole numbers that have a tick each, where there is room; without them, ticks are where they read well.
        far: Whether it is logarithmic.
        most: Its end, if that is given; it begins at 0 then.
        zero: Whether it begins at 0 otherwise, unless it is logarithmic.
        count: About how many ticks it has.
    """

    label: str = ""
    ticks: tuple[int, ...] = ()
    far: bool = False
    most: float | None = None
    zero: bool = True
    count: int = 5


@dataclass(frozen=True)
class PlottedLine:
    """Points that are joined, marked, or both.

    Attributes:
        points: x and y of each.
        tone: The name of its colour.
        label: In the legend; empty for a line that is not there.
        marker: The shape of each point, as matplotlib knows it; empty for none.
        dashes: Lengths of dash and gap, in turns; none for a line without gaps.
        spread: The lowest and the highest y of each point: whiskers, or with ``band`` a pale band.
        marked: Which points have the marker: the first, and every so many after it.
        columns: The pattern of columns that stand in place of a line, if they do.
        name: The end of its id in the page.
    """

    points: Sequence[tuple[float, float]]
    tone: str
    label: str = ""
    marker: str = ""
    dashes: tuple[float, ...] = ()
    spread: Sequence[tuple[float, float]] = ()
    band: bool = False
    joined: bool = True
    width: float = 1.8
    size: float = 4.5
    alpha: float = 1.0
    marked: tuple[int, int] = (0, 1)
    columns: str | None = None
    name: str = ""


@dataclass(frozen=True)
class Segment:
    """A part of a bar: how long it is, its colour and pattern, and what the legend calls it, if it is there."""

    length: float
    tone: str
    hatch: str = ""
    label: str = ""


@dataclass(frozen=True)
class Bar:
    """A row of a panel: a name above, a bar of parts, whiskers from ``lowest`` to ``highest``, and a text after it."""

    name: str
    parts: tuple[Segment, ...] = ()
    text: str = ""
    lowest: float = 0.0
    highest: float = 0.0

    @property
    def length(self) -> float:
        return sum(part.length for part in self.parts)


@dataclass(frozen=True)
class Panel:
    """Lines or bars over axes.

    Attributes:
        level: A y that is marked by a horizontal line with gaps, and what is written at its left end.
        level_above: Whether that stands above the line.
    """

    x: Axis
    y: Axis = Axis()
    lines: tuple[PlottedLine, ...] = ()
    bars: tuple[Bar, ...] = ()
    title: str = ""
    level: tuple[float, str] | None = None
    level_above: bool = True


@dataclass(frozen=True)
class Picture:
    """One picture, not yet drawn.

    Attributes:
        name: Its file name without the ending, and the beginning of its ids in the page.
        title: What it shows.
        caption: One sentence that says how to read it.
        panels: What is in it.
        columns: How many panels stand beside each other; those below have the same x axis.
        height: In pixels, without the legend; that of bars follows from their number.
        says: What follows from it, in sentences.
        leads: Whether it stands at the left, with the next one beside it.
        failure: Why there is none, if it could not be made.
    """

    name: str
    title: str
    caption: str = ""
    panels: tuple[Panel, ...] = ()
    columns: int = 1
    height: float = 250
    says: tuple[str, ...] = ()
    leads: bool = False
    failure: Exception | None = None

    @property
    def labels(self) -> list[str]:
        """What stands in the legend."""
        first = self.panels[0]
        labels = [line.label for line in first.lines] + [part.label for bar in first.bars for part in bar.parts]
        return list(dict.fromkeys(label for label in labels if label))

    @property
    def pixels(self) -> float:
        """The height with the legend."""
        rows = len(self.panels[0].bars)
        legend = 10 + 19 * math.ceil(len(self.labels) / legend_columns(self.labels)) if self.labels else 0
        return (_AROUND + _ROW * rows if rows else self.height) + legend


def legend_columns(labels: Sequence[str]) -> int:
    """As many as there is room for."""
    for columns in (3, 2):
        rows = math.ceil(len(labels) / columns)
        longest = [max(map(len, labels[first : first + rows])) for first in range(0, len(labels), rows)]
        if sum(LETTER * most + _HANDLE for most in longest) <= WIDTH:
            return len(longest)
    return 1


def far_apart(values: Iterable[float]) -> bool:
    """Whether positive ``values`` span more than two decades; a value below zero forbids it."""
    known = [value for value in values if math.isfinite(value) and value != 0]
    return bool(known) and min(known) > 0 and max(known) > _FAR * min(known)


def unit_of_seconds(values: Iterable[float]) -> tuple[float, str]:
    """How many seconds the unit of an axis for all of ``values`` has, and its name."""
    found = list(values)
    return (1.0, "s") if far_apart(found) else amounts.unit_of_seconds(max(found, default=1.0))
