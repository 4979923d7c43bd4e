"""A picture becomes SVG for the page, with text as text and colours from the style sheet, or PNG."""

from __future__ import annotations

import io
import re
import warnings
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from html import escape
from typing import TYPE_CHECKING, Any

from hocket.compare import amounts
from hocket.compare.style import LIGHT, VARIABLES, short
from hocket.errors import UsageError

if TYPE_CHECKING:
    from matplotlib.figure import Figure

WIDTH = 400  # pixels: two beside each other on a desk, one on a phone
_PIXELS = 96  # an inch
_TITLE = 24  # pixels; in the page the title is a heading of its own
_FONT = 10  # points, which is 13.3 pixels, and 11 on a narrow phone
LETTER = 6.9  # pixels of one, on the average
SOFTWARE = "hocket compare"  # in every PNG, by which its own are known
Colours = Mapping[str, str]


@dataclass(frozen=True)
class Picture:
    """One picture, not yet drawn.

    Attributes:
        name: Its file name without the ending, and the beginning of its ids in the page.
        title: What it shows.
        caption: One sentence that says how to read it.
        height: In pixels.
        draw: Draws it in these colours, by tone.
        says: What follows from it, in sentences.
        leads: Whether it stands at the left, with the next one beside it.
    """

    name: str
    title: str
    caption: str
    height: float
    draw: Callable[[Figure, Colours], None]
    says: tuple[str, ...] = ()
    leads: bool = False


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

    with mpl.rc_context(), warnings.catch_warnings():
        warnings.simplefilter("ignore")  # a letter that the font has not is a box; a terminal is no place to say so
        mpl.rcdefaults()  # not what the user has set up for pictures of their own
        mpl.rcParams.update(_settings(picture.name, colours))
        height = picture.height + (_TITLE if title else 0)
        figure = Figure(figsize=(WIDTH / _PIXELS, height / _PIXELS), dpi=_PIXELS, layout="constrained")
        picture.draw(figure, colours)
        if title:
            figure.suptitle(short(picture.title, 55), fontsize=_FONT + 0.5, fontweight="bold", x=0.02, ha="left")
        yield figure


def _settings(name: str, colours: Colours) -> dict[Any, Any]:
    ink, soft, grid = colours["ink"], colours["soft"], colours["grid"]
    return {
        "text.parse_math": False,  # names of metrics and strategies are text, whatever is in them
        "svg.fonttype": "none",
        "svg.hashsalt": name,  # the same data give the same file
        "font.family": ["DejaVu Sans"],  # comes with matplotlib
        "font.size": _FONT,
        "axes.titlesize": _FONT,
        "axes.labelsize": _FONT,
        "xtick.labelsize": _FONT,
        "ytick.labelsize": _FONT,
        "legend.fontsize": _FONT,
        "legend.frameon": False,
        "legend.handlelength": 2.6,
        "legend.columnspacing": 1.2,
        "legend.labelspacing": 0.35,
        "figure.facecolor": colours["paper"],
        "axes.facecolor": "none",
        "text.color": ink,
        "axes.labelcolor": ink,
        "axes.titlecolor": ink,
        "axes.edgecolor": soft,
        "xtick.color": soft,
        "ytick.color": soft,
        "xtick.labelcolor": ink,
        "ytick.labelcolor": ink,
        "axes.spines.top": False,
        "axes.spines.right": False,
        "axes.grid": True,
        "axes.axisbelow": True,
        "grid.color": grid,
        "grid.linewidth": 0.8,
        "lines.linewidth": 1.8,
        "lines.markersize": 4.5,
        "hatch.linewidth": 0.8,
        "figure.constrained_layout.w_pad": 0.05,
        "figure.constrained_layout.h_pad": 0.05,
    }


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
        f' height="{picture.height:g}" viewBox="0 0 {WIDTH * 0.75:g} {picture.height * 0.75:g}">'
        f'<title id="{picture.name}-title">{escape(picture.title)}</title>'
        f'<desc id="{picture.name}-about">{escape(picture.caption)}</desc>'
    )
    return opening + text[text.index(">") + 1 :]
