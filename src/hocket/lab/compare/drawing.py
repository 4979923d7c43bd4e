"""Pictures become SVG for the page, with text as text and colours from its style sheet, or PNG; by matplotlib."""

from __future__ import annotations

import io
import math
import re
import warnings
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from html import escape
from typing import TYPE_CHECKING, Any

from hocket.errors import UsageError
from hocket.lab.compare import amounts
from hocket.lab.compare.looks import LIGHT, VARIABLES, short
from hocket.lab.compare.picture import LETTER, WIDTH, Axis, Panel, Picture, legend_columns

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

SOFTWARE = "hocket compare"  # in every PNG, by which its own are known
_PIXELS = 96  # an inch
_TITLE = 24  # pixels; in the page the title is a heading of its own
_FONT = 10  # points, which is 13.3 pixels, and 11 on a narrow phone
_NAME = -0.26  # how far above the middle of a bar its name ends, in rows
Colours = Mapping[str, str]


def check() -> None:
    """Raises UsageError where there is nothing to draw with."""
    try:
        import matplotlib  # noqa: F401
    except ImportError:
        raise UsageError("plots need matplotlib, which is not installed: pip install 'hocket[report]'") from None


def svg(picture: Picture) -> str:
    """An ``<svg>`` element that may stand beside others in one document."""
    file = io.StringIO()
    with _drawn(picture, VARIABLES) as figure:
        figure.savefig(file, format="svg", transparent=True, metadata={"Date": None})
    return _for_a_page(file.getvalue(), picture)


def png(picture: Picture) -> bytes:
    """A file with the picture in light colours, two dots for each pixel."""
    file = io.BytesIO()
    with _drawn(picture, LIGHT, title=True) as figure:
        figure.savefig(file, format="png", dpi=2 * _PIXELS, metadata={"Title": picture.title, "Software": SOFTWARE})
    return file.getvalue()


def why_not(picture: Picture, error: Exception) -> str:
    """One line about a picture that could not be drawn."""
    cause = amounts.line(str(error)) or "no reason given"
    return f"the picture {picture.name} could not be drawn ({type(error).__name__}: {cause})"


@contextmanager
def _drawn(picture: Picture, colours: Colours, title: bool = False) -> Iterator[Figure]:
    import matplotlib as mpl
    from matplotlib.figure import Figure

    if picture.failure is not None:
        raise picture.failure
    with mpl.rc_context(), warnings.catch_warnings():
        warnings.simplefilter("ignore")  # a letter that the font has not is a box; a terminal is no place to say so
        mpl.rcdefaults()  # not what the user has set up for pictures of their own
        mpl.rcParams.update(_settings(picture.name, colours))
        height = picture.pixels + (_TITLE if title else 0)
        figure = Figure(figsize=(WIDTH / _PIXELS, height / _PIXELS), dpi=_PIXELS, layout="constrained")
        _draw(figure, picture, colours)
        if title:
            figure.suptitle(short(picture.title, 55), fontsize=_FONT + 0.5, fontweight="bold", x=0.02, ha="left")
        yield figure


def _settings(name: str, colours: Colours) -> dict[Any, Any]:
    ink, soft = colours["ink"], colours["soft"]
    parts = ("font.size", "axes.titlesize", "axes.labelsize", "xtick.labelsize", "ytick.labelsize", "legend.fontsize")
    inked = ("text.color", "axes.labelcolor", "axes.titlecolor", "xtick.labelcolor", "ytick.labelcolor")
    return {
        **dict.fromkeys(parts, _FONT),
        **dict.fromkeys(inked, ink),
        **dict.fromkeys(("axes.edgecolor", "xtick.color", "ytick.color"), soft),
        **dict.fromkeys(("axes.spines.top", "axes.spines.right", "legend.frameon", "text.parse_math"), False),
        "svg.fonttype": "none",
        "svg.hashsalt": name,  # the same data give the same file
        "font.family": ["DejaVu Sans"],  # comes with matplotlib
        "legend.handlelength": 2.6,
        "legend.columnspacing": 1.2,
        "legend.labelspacing": 0.35,
        "figure.facecolor": colours["paper"],
        "axes.facecolor": "none",
        "axes.grid": True,
        "axes.axisbelow": True,
        "grid.color": colours["grid"],
        "grid.linewidth": 0.8,
        "hatch.linewidth": 0.8,
        "figure.constrained_layout.w_pad": 0.05,
        "figure.constrained_layout.h_pad": 0.05,
    }


def _draw(figure: Figure, picture: Picture, colours: Colours) -> None:
    panels, columns = picture.panels, picture.columns
    rows, bars = math.ceil(len(panels) / columns), bool(panels[0].bars)
    plots = figure.subplots(rows, columns, sharex=not bars, sharey=True, squeeze=False)
    for number, panel in enumerate(panels):
        plot, below = plots[number // columns][number % columns], number + columns >= len(panels)
        if bars:
            _bars(plot, panel, colours, (WIDTH - 30) / columns - 10, number)
            plot.spines["left"].set_visible(number == 0)  # names may reach over the others
        else:
            _lines(plot, panel, colours)
            _axis(plot, "y", panel.y)
            _axis(plot, "x", panel.x)
            plot.xaxis.set_tick_params(labelbottom=below)
        if panel.title:
            plot.set_title(panel.title, loc="left")
        if number // columns == rows - 1:
            plot.set_xlabel(panel.x.label)
        if number % columns == 0 and (columns > 1 or rows == 1):
            plot.set_ylabel(panel.y.label)
    if rows > 1 and columns == 1:
        figure.supylabel(panels[0].y.label, fontsize=_FONT)
    for number in range(len(panels), rows * columns):
        plots[number // columns][number % columns].set_visible(False)
    handles = dict(zip(*reversed(plots[0][0].get_legend_handles_labels()), strict=True))  # each label once
    if handles:  # below everything, where it covers no data
        ncols = legend_columns(list(handles))
        figure.legend([*handles.values()], [*handles], loc="outside lower center", ncols=ncols)


def _lines(plot: Axes, panel: Panel, colours: Colours) -> None:
    paper = colours["paper"]
    for line in panel.lines:
        colour, (xs, ys) = colours[line.tone], zip(*line.points, strict=True)
        if line.columns is not None:
            drawn = plot.bar(xs, ys, 0.8, facecolor=colour, hatch=line.columns, edgecolor=paper, linewidth=0)
            for number, patch in enumerate(drawn.patches):
                patch.set_gid(f"{line.name}-{number}")
            plot.grid(False, axis="x")
            continue
        if line.band and line.spread:
            lowest, highest = zip(*line.spread, strict=True)
            plot.fill_between(xs, lowest, highest, color=colour, alpha=0.16, lw=0)
        elif line.spread:
            ends = [[y - low for y, (low, _) in zip(ys, line.spread, strict=True)],
                    [high - y for y, (_, high) in zip(ys, line.spread, strict=True)]]  # fmt: skip
            plot.errorbar(xs, ys, ends, fmt="none", ecolor=colour, capsize=3, elinewidth=1.2, zorder=3)
        (curve,) = plot.plot(
            xs, ys, color=colour, lw=line.width, ls="-" if line.joined else "none", alpha=line.alpha,
            marker=line.marker or None, ms=line.size, mec=paper if line.size > 6 else colour, markevery=line.marked,
            label=line.label or None, zorder=3 if line.marker else 2, gid=line.name or None,
        )  # fmt: skip
        if line.dashes and line.joined:
            curve.set_dashes(line.dashes)
    if panel.level is not None:
        value, text = panel.level
        above = panel.level_above
        plot.axhline(value, color=colours["ink"], lw=1, ls=(0, (4, 3)), gid="level")
        if text:
            plot.annotate(
                text, (0, value), xycoords=("axes fraction", "data"), xytext=(3, 3 if above else -3),
                textcoords="offset points", va="bottom" if above else "top",
                bbox={"facecolor": paper, "edgecolor": "none", "pad": 0.5},
            )  # fmt: skip
            plot.margins(y=0.12)


def _bars(plot: Axes, panel: Panel, colours: Colours, width: float, number: int) -> None:
    """Rows from top to bottom. Names stand above the bars of the first panel, and may reach over the others."""
    far, left = panel.x.far, 0.0
    if far:
        plot.set_xscale("log")
        least = min(bar.lowest for bar in panel.bars if bar.parts and bar.lowest > 0)
        left = 10 ** math.floor(math.log10(least) - 0.2)
    end = left
    for row, bar in enumerate(panel.bars):
        at = left
        for place, part in enumerate(bar.parts):
            begin, at = at, max(at, part.length if far else at + part.length)
            if at > begin:
                edge, line = (colours["ink"], 0.6) if part.label else (colours["paper"], 0)
                plot.barh(
                    row, at - begin, left=begin, height=0.38, facecolor=colours[part.tone], hatch=part.hatch,
                    edgecolor=edge, linewidth=line, label=part.label or None, gid=f"bar-{number}-{row}-{place}",
                )  # fmt: skip
        if bar.highest > bar.lowest:
            ends = [[bar.length - bar.lowest], [bar.highest - bar.length]]
            plot.errorbar(bar.length, row, xerr=ends, color=colours["ink"], capsize=3, elinewidth=1.2)
        at = max(at, bar.highest)
        plot.annotate(bar.text, (at, row), xytext=(4, 0), textcoords="offset points", va="center").set_in_layout(False)
        room = max(0.25, 1 - (LETTER * len(bar.text) + 10) / width)  # the part of the axis that is left for the bar
        end = max(end, left * (at / left) ** (1 / room) if far else at / room)
        if number == 0:
            plot.annotate(
                bar.name, (0, row + _NAME), xycoords=("axes fraction", "data"), xytext=(2, 0),
                textcoords="offset points", va="bottom",
            ).set_in_layout(False)  # fmt: skip
    plot.set_xlim(left, panel.x.most or (end if end > left else left + 1))
    plot.set_ylim(len(panel.bars) - 1 + 0.35, -0.85)
    plot.set_yticks([])
    plot.grid(False)
    _ticks(plot, "x", far, 5 if width > 250 else 3)


def _axis(plot: Axes, which: str, axis: Axis) -> None:
    limits = getattr(plot, f"set_{which}lim")
    if axis.ticks:
        _counts(plot, axis)
        return
    if axis.far:
        getattr(plot, f"set_{which}scale")("log")
    elif axis.most is not None or axis.zero:
        limits(0, axis.most)
    _ticks(plot, which, axis.far, axis.count)


def _counts(plot: Axes, axis: Axis) -> None:
    """A tick for each on the x axis that is not too near to the one after it."""
    found = sorted(set(axis.ticks))
    length = max(1, found[-1] - found[0])
    plot.set_xlim(found[0] - 0.08 * length, found[-1] + 0.08 * length)
    kept = found[-1:]
    for count in reversed(found[:-1]):
        if kept[0] - count >= length / (3 * axis.count):
            kept.insert(0, count)
    plot.set_xticks(kept, [str(count) for count in kept])


def _ticks(plot: Axes, which: str, far: bool, count: int) -> None:
    """Plain numbers: 0.95, 20 k, 1.5 M."""
    from matplotlib.ticker import FuncFormatter, LogLocator, MaxNLocator, NullFormatter

    axis = getattr(plot, f"{which}axis")
    axis.set_major_formatter(FuncFormatter(lambda value, _: _number(value)))
    if far:
        axis.set_major_locator(LogLocator(numticks=count + 1))
        axis.set_minor_formatter(NullFormatter())
    else:
        axis.set_major_locator(MaxNLocator(count, integer=count > 5, steps=[1, 2, 2.5, 5, 10]))


def _number(value: float) -> str:
    for least, power, unit in ((1e9, 1e9, " G"), (1e6, 1e6, " M"), (1e4, 1e3, " k")):
        if abs(value) >= least * 0.999:
            return f"{amounts.plain(value / power, 4)}{unit}"
    return amounts.plain(value, 4)


def _for_a_page(text: str, picture: Picture) -> str:
    """Without what belongs to a file of its own; ids begin with the picture's name; placeholders become variables."""
    text = text[text.index("<svg") :]
    text = re.sub(r"<metadata>.*?</metadata>", "", text, flags=re.DOTALL)
    text = re.sub(r"<!--.*?-->\n?", "", text, flags=re.DOTALL)
    text = re.sub(r'\bid="', f'id="{picture.name}-', text)
    text = re.sub(r'(url\(#|href="#)', rf"\g<1>{picture.name}-", text)
    for name, colour in VARIABLES.items():
        text = text.replace(colour, f"var(--{name})")
    # The page's own letters: others are hardly ever wider than those that matplotlib has counted with.
    text = re.sub(r" ?font-family: [^;\"]+;?", "", text)
    text = re.sub(r"font: ([\d.]+px) [^;\"]+", r"font-size: \1", text)
    opening = (
        f'<svg class="plot" role="img" aria-labelledby="{picture.name}-title {picture.name}-about" width="{WIDTH}"'
        f' height="{picture.pixels:g}" viewBox="0 0 {WIDTH * 0.75:g} {picture.pixels * 0.75:g}">'
        f'<title id="{picture.name}-title">{escape(picture.title)}</title>'
        f'<desc id="{picture.name}-about">{escape(picture.caption)}</desc>'
    )
    return opening + text[text.index(">") + 1 :]
