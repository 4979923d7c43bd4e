"""A timeline as people see it: in words, as numbers, and as a picture with a row for each track."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

from hocket.errors import UsageError
from hocket.lab.trace import waits
from hocket.lab.trace.trace_file import Span, Trace
from hocket.spans import COMPUTE, DATA, EXCHANGE, FRAME, SCRIPT, SERVE, WAIT

_MOST_RANKS, _MOST_WAITS, _MOST_NAMES = 16, 8, 14
_COLOURS = {  # of Okabe and Ito, which the colour-blind can tell apart
    "forward": "#56B4E9", "backward": "#0072B2", "update": "#009E73",
    COMPUTE: "#999999", EXCHANGE: "#E69F00", WAIT: "#D55E00", DATA: "#CC79A7", SERVE: "#009E73",
}  # fmt: skip
_WORDS = {
    COMPUTE: "other work", EXCHANGE: "exchange", WAIT: "waiting", DATA: "getting a batch", SERVE: "a server's update",
}  # fmt: skip
_MOST_ROWS = 24


def numbers(trace: Trace) -> dict[str, Any]:
    """All that ``lines`` says, as plain data; times in seconds."""
    ranks = {}
    for process in trace.ranks:
        travelling, covered = waits.hidden(trace, process)
        begin, end = waits.training(process)
        ranks[process.name] = {
            "host": process.host,
            "training": end - begin,
            "shares": waits.shares(trace, process),
            "communication beside the script": travelling,
            "of which hidden": covered,
        }
    return {
        "repaired": trace.was_cut,
        "events": len(trace.events),
        "ranks": ranks,
        "waits": [{"who": who, "for": whom, "seconds": s} for (who, whom), s in waits.waits(trace).items()],
        "work in a batch": waits.slowest(trace),
        "gaps": [vars(gap) for gap in waits.gaps(trace)],
        "spans": {
            name: {"count": len(found), "seconds": sum(found), "longest": max(found)} for name, found in _by_name(trace)
        },
    }


def lines(trace: Trace, file: Path) -> Iterator[str]:
    """What a person is told."""
    spans = [span for process in trace.processes for span in process.spans()]
    if not spans:
        yield f"{file}: there are no spans in it. Does the script call hocket.init()?"
        return
    begin, end = min(span.begin for span in spans), max(span.end for span in spans)
    ranks, servers = len(trace.ranks), len(trace.processes) - len(trace.ranks)
    crew = f"{ranks} rank{_s(ranks)}" + (f", {servers} server{_s(servers)}" if servers else "")
    yield f"{file}: {crew}, {time(end - begin)}, {len(spans):,} spans"
    yield from _shares(trace)
    yield from _hidden(trace)
    yield from _waits(trace)
    yield from _slowest(trace)
    yield from _gaps(trace)
    yield from _names(trace)


def time(seconds: float) -> str:
    """``12.3 s``, ``4.56 ms`` or ``78.9 µs``."""
    if abs(seconds) >= 1:
        return f"{seconds:,.1f} s"
    return f"{seconds * 1e3:.2f} ms" if abs(seconds) >= 1e-3 else f"{seconds * 1e6:.1f} µs"


def _shares(trace: Trace) -> Iterator[str]:
    yield ""
    yield "Where the time of training went"
    for process in trace.ranks[:_MOST_RANKS]:
        begin, end = waits.training(process)
        found = waits.shares(trace, process)
        whole = max(end - begin, 1e-9)
        parts = ", ".join(f"{seconds / whole:.0%} {word}" for word, seconds in found.items())
        yield f"  {process.name:<9} {time(end - begin):>9}: {parts}"
    if len(trace.ranks) > _MOST_RANKS:
        yield f"  and {len(trace.ranks) - _MOST_RANKS} more ranks (--json has them)"


def _hidden(trace: Trace) -> Iterator[str]:
    found = [waits.hidden(trace, process) for process in trace.ranks]
    travelling, covered = sum(each[0] for each in found), sum(each[1] for each in found)
    yield ""
    yield "What was hidden"
    if travelling:
        whole = time(travelling)
        yield f"  {covered / travelling:.0%} of the {whole} in which tensors travelled (all ranks together)"
    else:
        yield "  Nothing: no tensors travelled beside the computation."


def _waits(trace: Trace) -> Iterator[str]:
    found = {pair: seconds for pair, seconds in waits.waits(trace).items() if seconds >= 1e-3}
    yield ""
    yield "Who waited for whom"
    for (who, whom), seconds in list(found.items())[:_MOST_WAITS]:
        yield f"  {who} waited {time(seconds)} for {whom}"
    if not found:
        yield "  Nobody, for as much as a millisecond."


def _slowest(trace: Trace) -> Iterator[str]:
    found = waits.slowest(trace)
    if len(found) < 2:
        return
    names = list(found)
    first, last = names[0], names[-1]
    yield ""
    yield "The slowest rank"
    ratio = found[first] / found[last] if found[last] else 1.0
    equal = "; they are about equally fast" if ratio < 1.05 else ""
    yield (
        f"  {first} works {time(found[first])} for a batch (median), {last} {time(found[last])}: {ratio:.2f}×{equal}"
    )


def _gaps(trace: Trace) -> Iterator[str]:
    found = waits.gaps(trace)
    if found:
        yield ""
        yield "The largest gaps: the script's own code, or what no span tells"
    for gap in found:
        yield f"  rank {gap.rank}, at {gap.begin:.3f} s: {time(gap.seconds)} between {gap.after!r} and {gap.before!r}"


def _names(trace: Trace) -> Iterator[str]:
    yield ""
    yield f"  {'span':<52} {'count':>8} {'total':>10} {'mean':>10} {'longest':>10}"
    for name, found in _by_name(trace)[:_MOST_NAMES]:
        total = sum(found)
        mean, longest = time(total / len(found)), time(max(found))
        yield f"  {name[:52]:<52} {len(found):>8,} {time(total):>10} {mean:>10} {longest:>10}"


def _by_name(trace: Trace) -> list[tuple[str, list[float]]]:
    """The lengths of all spans by name, the most time first; batches are one kind."""
    found: dict[str, list[float]] = {}
    for process in trace.processes:
        for span in process.spans():
            found.setdefault(_plain(span), []).append(span.seconds)
    return sorted(found.items(), key=lambda item: -sum(item[1]))


def _plain(span: Span) -> str:
    return span.name.rpartition(" ")[0] if span.kind == FRAME else span.name


def _s(count: int) -> str:
    return "" if count == 1 else "s"


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
