"""A part of a timeline as a picture: a row for each track, colours by what was done."""

from __future__ import annotations

from pathlib import Path

from hocket.errors import UsageError
from hocket.observe import waits
from hocket.observe.trace import Span, Trace
from hocket.spans import COMPUTE, DATA, EXCHANGE, FRAME, SCRIPT, SERVE, WAIT

_COLOURS = {  # of Okabe and Ito, which the colour-blind can tell apart
    "forward": "#56B4E9", "backward": "#0072B2", "update": "#009E73",
    COMPUTE: "#999999", EXCHANGE: "#E69F00", WAIT: "#D55E00", DATA: "#CC79A7", SERVE: "#009E73",
}  # fmt: skip
_WORDS = {
    COMPUTE: "other work", EXCHANGE: "exchange", WAIT: "waiting", DATA: "getting a batch", SERVE: "a server's update",
}  # fmt: skip
_MOST_ROWS = 24


def draw(trace: Trace, path: Path, begin: float | None = None, seconds: float | None = None) -> None:
    """Write a PNG; without a place, three batches in the middle are drawn.

    Raises:
        UsageError: matplotlib is missing, there is nothing to draw, or the file cannot be written.
    """
    try:
        import matplotlib as mpl
        from matplotlib.figure import Figure
        from matplotlib.patches import Patch
    except ImportError:
        raise UsageError("drawing needs matplotlib: pip install 'hocket[report]', or leave out --png") from None
    start, end = _window(trace, begin, seconds)
    rows = [
        (process.name if track == SCRIPT else f"{process.name}\n{track}", _inside(outer, start, end))
        for process in trace.processes
        for track, outer in process.tracks.items()
    ]
    rows = [row for row in rows if row[1]][:_MOST_ROWS]
    if not rows:
        raise UsageError(f"there is nothing between {start:.3f} s and {end:.3f} s: choose other --from and --seconds")
    with mpl.rc_context({"font.size": 9, "hatch.linewidth": 0.6}):
        figure = Figure(figsize=(10, 0.9 + 0.42 * len(rows)), layout="constrained", dpi=120)
        axes = figure.subplots()
        used: dict[str, str] = {}
        for y, (_, spans) in enumerate(rows):
            for depth in sorted({depth for depth, _ in spans}):  # outer before inner, so that inner ones are on top
                bars: dict[tuple[str, str, bool], list[tuple[float, float]]] = {}
                for span in (each for at, each in spans if at == depth):
                    left, right = max(span.begin, start), min(span.end, end)
                    bars.setdefault((*_look(span), span.kind == WAIT), []).append(
                        ((left - start) * 1e3, (right - left) * 1e3)
                    )
                for (word, colour, waits_), ranges in bars.items():
                    used.setdefault(word, colour)
                    axes.broken_barh(
                        ranges, (y - 0.4, 0.8), facecolor=colour, edgecolor="white", linewidth=0.3,
                        hatch="////" if waits_ else None,
                    )  # fmt: skip
        axes.set_yticks(range(len(rows)), [name for name, _ in rows])
        axes.set_ylim(len(rows) - 0.5, -0.5)
        axes.set_xlim(0, (end - start) * 1e3)
        axes.set_xlabel(f"milliseconds since {start:.3f} s")
        axes.spines[["top", "right", "left"]].set_visible(False)
        axes.tick_params(left=False)
        keys = [Patch(color=colour, label=word) for word, colour in used.items()]
        figure.legend(handles=keys, loc="outside upper center", ncols=len(keys), frameon=False)
        try:
            figure.savefig(path)
        except (OSError, ValueError) as error:
            raise UsageError(f"--png {path}: {error}; name a .png file that can be written") from None


def _inside(spans: list[Span], begin: float, end: float, depth: int = 0) -> list[tuple[int, Span]]:
    """Those between two times, with how deep they are inside of others."""
    found = []
    for span in spans:
        if span.end > begin and span.begin < end:
            found += [(depth, span)] if span.kind != FRAME else []
            found += _inside(span.inner, begin, end, depth + 1)
    return found


def _look(span: Span) -> tuple[str, str]:
    if span.name in ("forward", "backward", "update"):
        return span.name, _COLOURS[span.name]
    return _WORDS.get(span.kind, span.kind), _COLOURS.get(span.kind, "#999999")


def _window(trace: Trace, begin: float | None, seconds: float | None) -> tuple[float, float]:
    """From when to when, in seconds."""
    ranks = trace.ranks
    if not ranks or not ranks[0].script:
        raise UsageError("there is nothing to draw: the timeline has no spans of rank 0")
    first, last = waits.training(ranks[0])
    batches = [span for span in ranks[0].spans(SCRIPT) if span.kind == FRAME]
    if begin is None:
        after = batches[len(batches) // 2 :]
        begin = after[0].begin if after else first
    if seconds is None:
        three = [span for span in batches if span.begin >= begin][:3]
        seconds = (three[-1].end if three else last) - begin
    latest = max(span.end for rank in ranks for span in rank.script)
    return begin, min(begin + max(seconds, 1e-6), max(latest, begin + 1e-6))
