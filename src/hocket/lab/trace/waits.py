"""What a timeline says in numbers: shares of each rank, what was hidden, who waited for whom, and gaps."""

from __future__ import annotations

import re
import statistics
from bisect import bisect_left
from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass

from hocket.lab.trace.trace_file import Process, Span, Trace
from hocket.spans import COMPUTE, DATA, EXCHANGE, FRAME, MEETING, SCRIPT, WAIT, WAIT_FOR

_SHARES = {COMPUTE: "computing", EXCHANGE: "exchanging", WAIT: "waiting", DATA: "getting batches"}
_FOR_ONE = re.compile(rf"{WAIT_FOR} (rank \d+)")
_AT_SERVER = re.compile(r"(rank \d+) waits for (rank \d+)")

Interval = tuple[float, float]


@dataclass(frozen=True)
class Gap:
    """Time in which a timeline says nothing of what a rank did.

    Attributes:
        rank: The rank.
        begin: Seconds since the beginning of the timeline.
        seconds: How long the gap is.
        after: The name of the span before the gap.
        before: The name of the span after the gap.
    """

    rank: int
    begin: float
    seconds: float
    after: str
    before: str


def shares(trace: Trace, process: Process) -> dict[str, float]:
    """Seconds of each kind, of the time between the first batch and the last; ``other`` is the script's own code."""
    window = training(process)
    found = dict.fromkeys(_SHARES.values(), 0.0)
    pieces: list[Interval] = []  # of exchanges
    for span in process.spans(SCRIPT):
        if span.kind in _SHARES and span.end > window[0] and span.begin < window[1]:
            own = _both(_pieces(span), [window])
            found[_SHARES[span.kind]] += _length(own)
            pieces += own if span.kind == EXCHANGE else []
    held = _length(_both(union(pieces), _held(trace, process)))
    found["exchanging"] -= held
    found["waiting"] += held
    found["other"] = max(0.0, window[1] - window[0] - sum(found.values()))
    return found


def training(process: Process) -> Interval:
    """From the beginning of the first batch to the end of the last; without batches, of what was computed."""
    spans = list(process.spans(SCRIPT))
    frames = [span for span in spans if span.kind == FRAME] or [span for span in spans if span.kind == COMPUTE] or spans
    return (min(s.begin for s in frames), max(s.end for s in frames)) if frames else (0.0, 0.0)


def hidden(trace: Trace, process: Process) -> tuple[float, float]:
    """Seconds in which tensors travelled beside the script, and how many of these it computed meanwhile."""
    beside = [span for name in process.tracks if name != SCRIPT for span in process.spans(name)]
    travelling = union([(span.begin, span.end) for span in beside if span.kind == EXCHANGE])
    travelling = _without(travelling, _held(trace, process))
    computing = union([piece for span in process.spans(SCRIPT) if span.kind == COMPUTE for piece in _pieces(span)])
    return _length(travelling), _length(_both(travelling, computing))


def waits(trace: Trace) -> dict[tuple[str, str], float]:
    """Seconds of its training that one rank has waited for another, by their names, the longest first."""
    windows = {process.name: training(process) for process in trace.ranks}
    found: defaultdict[tuple[str, str], list[Interval]] = defaultdict(list)
    meetings: dict[tuple[str, int], list[tuple[Process, Span]]] = {}
    for process in trace.ranks:
        for span in process.spans():
            if span.name == MEETING:
                meetings.setdefault((process.host, span.number), []).append((process, span))
            elif one := _FOR_ONE.fullmatch(span.name):
                found[process.name, one[1]].append((span.begin, span.end))
    for met in meetings.values():
        last, arrival = max(met, key=lambda each: each[1].begin)
        for process, span in met:
            if process is not last:
                found[process.name, last.name].append((span.begin, min(arrival.begin, span.end)))
    for who, whom, span in _at_servers(trace):
        found[who, whom].append((span.begin, span.end))  # of several servers at the same time, once
    seconds = {
        (who, whom): _length(_both(union(intervals), [windows[who]]))
        for (who, whom), intervals in found.items()
        if who in windows
    }
    return dict(sorted(seconds.items(), key=lambda item: -item[1]))


def slowest(trace: Trace) -> dict[str, float]:
    """Median seconds that a batch takes each rank, waiting and exchanging left out; the slowest first."""
    found = {}
    for process in trace.ranks:
        held = _held(trace, process)
        idle = union([p for s in process.spans(SCRIPT) if s.kind in (WAIT, EXCHANGE) for p in _pieces(s)] + held)
        batches = [(span.begin, span.end) for span in process.spans(SCRIPT) if span.kind == FRAME]
        if batches:
            found[process.name] = statistics.median(
                end - begin - _length(_both([(begin, end)], _near(idle, begin, end))) for begin, end in batches
            )
    return dict(sorted(found.items(), key=lambda item: -item[1]))


def gaps(trace: Trace, most: int = 5) -> list[Gap]:
    """The longest times of which nothing is known, during the training."""
    found = []
    for process in trace.ranks:
        begin, end = training(process)
        leaves = [s for s in process.spans(SCRIPT) if s.kind != FRAME and s.end > begin and s.begin < end]
        at, after = begin, "the beginning"
        for span in sorted(leaves, key=lambda each: each.begin):
            if span.begin > at:
                found.append(Gap(process.number, at, span.begin - at, after, span.name))
            if span.end > at:
                at, after = span.end, span.name
        if end > at:
            found.append(Gap(process.number, at, end - at, after, "the end"))
    return sorted(found, key=lambda gap: -gap.seconds)[:most]


def union(intervals: list[Interval]) -> list[Interval]:
    """The time of the given intervals, without overlaps, in order."""
    merged: list[Interval] = []
    for begin, end in sorted(intervals):
        if merged and begin <= merged[-1][1]:
            merged[-1] = (merged[-1][0], max(merged[-1][1], end))
        elif end > begin:
            merged.append((begin, end))
    return merged


def _at_servers(trace: Trace) -> Iterator[tuple[str, str, Span]]:
    """Who was held back by a server, for whom, and when."""
    for process in trace.processes:
        if process.role == "server":
            for span in process.spans():
                if match := _AT_SERVER.match(span.name):
                    yield match[1], match[2], span


def _held(trace: Trace, process: Process) -> list[Interval]:
    """When servers held a rank back."""
    return union([(span.begin, span.end) for who, _, span in _at_servers(trace) if who == process.name])


def _near(intervals: list[Interval], begin: float, end: float) -> list[Interval]:
    """Those, of some in order, that a time may overlap with."""
    return intervals[max(0, bisect_left(intervals, (begin,)) - 1) : bisect_left(intervals, (end,))]


def _pieces(span: Span) -> list[Interval]:
    """The parts of a span that are not within others."""
    pieces, at = [], span.begin
    for inner in span.inner:
        if inner.begin > at:
            pieces.append((at, inner.begin))
        at = max(at, inner.end)
    if span.end > at:
        pieces.append((at, span.end))
    return pieces


def _both(first: list[Interval], second: list[Interval]) -> list[Interval]:
    found, i, j = [], 0, 0
    while i < len(first) and j < len(second):
        begin, end = max(first[i][0], second[j][0]), min(first[i][1], second[j][1])
        if end > begin:
            found.append((begin, end))
        if first[i][1] < second[j][1]:
            i += 1
        else:
            j += 1
    return found


def _without(first: list[Interval], second: list[Interval]) -> list[Interval]:
    """What is in the first, and not in the second; both in order."""
    found = []
    for begin, end in first:
        at = begin
        for start, stop in _near(second, begin, end):
            if start > at:
                found.append((at, min(start, end)))
            at = max(at, stop)
        if end > at:
            found.append((at, end))
    return found


def _length(intervals: list[Interval]) -> float:
    return sum(end - begin for begin, end in intervals)
