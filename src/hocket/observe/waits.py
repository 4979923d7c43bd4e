"""What a timeline says in numbers: shares of each rank, what was hidden, who waited for whom, and gaps."""

from __future__ import annotations

import statistics
from collections import defaultdict
from dataclasses import dataclass

from hocket.observe.trace import Process, Span, Trace
from hocket.spans import COMPUTE, DATA, EXCHANGE, FRAME, MEETING, SCRIPT, WAIT

_SHARES = {COMPUTE: "computing", EXCHANGE: "exchanging", WAIT: "waiting", DATA: "getting batches"}
_LATE = " is late"

Interval = tuple[float, float]


@dataclass(frozen=True)
class Gap:
    """Time in which a timeline says nothing of what a rank did.

    Attributes:
        rank: Whose.
        begin: Seconds since the beginning of the timeline.
        seconds: How long.
        after: What it did last before; ``before`` likewise.
    """

    rank: int
    begin: float
    seconds: float
    after: str
    before: str


def shares(process: Process) -> dict[str, float]:
    """Seconds of each kind, of the time between the first batch and the last; ``other`` is the script's own code."""
    begin, end = training(process)
    found = dict.fromkeys(_SHARES.values(), 0.0)
    for span in process.spans(SCRIPT):
        if span.kind in _SHARES and span.begin >= begin and span.end <= end:
            found[_SHARES[span.kind]] += span.own
    found["other"] = max(0.0, end - begin - sum(found.values()))
    return found


def training(process: Process) -> Interval:
    """From the beginning of the first batch to the end of the last."""
    frames = [span for span in process.spans(SCRIPT) if span.kind == FRAME]
    every = frames or list(process.spans(SCRIPT))
    return (min(s.begin for s in every), max(s.end for s in every)) if every else (0.0, 0.0)


def hidden(process: Process) -> tuple[float, float]:
    """Seconds in which tensors travelled beside the script, and how many of these it computed meanwhile."""
    beside = [span for name in process.tracks if name != SCRIPT for span in process.spans(name)]
    travelling = union([(span.begin, span.end) for span in beside if span.kind == EXCHANGE])
    computing = union([piece for span in process.spans(SCRIPT) if span.kind == COMPUTE for piece in _pieces(span)])
    return _length(travelling), _length(_both(travelling, computing))


def waits(trace: Trace) -> dict[tuple[str, str], float]:
    """Seconds that one process has waited for another, by their names, the longest first."""
    found: defaultdict[tuple[str, str], float] = defaultdict(float)
    meetings: dict[tuple[str, int], list[tuple[Process, Span]]] = {}
    for process in trace.ranks:
        for span in process.spans():
            if span.name == MEETING:
                meetings.setdefault((process.host, span.number), []).append((process, span))
            elif span.name.endswith(_LATE):
                found[process.name, span.name.removesuffix(_LATE)] += span.seconds
    for met in meetings.values():
        last, arrival = max(met, key=lambda each: each[1].begin)
        for process, span in met:
            if process is not last:
                found[process.name, last.name] += max(0.0, min(arrival.begin, span.end) - span.begin)
    for process in trace.processes:
        for span in process.spans():
            if process.role == "server" and span.kind == WAIT:
                found[span.name.removesuffix(" waits for others"), f"other ranks at {process.name}"] += span.seconds
    return dict(sorted(found.items(), key=lambda item: -item[1]))


def slowest(trace: Trace) -> dict[str, float]:
    """Median seconds that each rank computes in a batch, the slowest first."""
    found = {}
    for process in trace.ranks:
        batches = [span for span in process.spans(SCRIPT) if span.kind == FRAME]
        busy = [sum(s.own for s in batch.walk() if s.kind == COMPUTE) for batch in batches]
        if busy:
            found[process.name] = statistics.median(busy)
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
    """The same time without overlaps, in order."""
    merged: list[Interval] = []
    for begin, end in sorted(intervals):
        if merged and begin <= merged[-1][1]:
            merged[-1] = (merged[-1][0], max(merged[-1][1], end))
        elif end > begin:
            merged.append((begin, end))
    return merged


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


def _length(intervals: list[Interval]) -> float:
    return sum(end - begin for begin, end in intervals)
