"""A timeline in words and numbers, for ``hocket trace``."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

from hocket.observe import waits
from hocket.observe.trace import Span, Trace
from hocket.spans import FRAME

_MOST_RANKS, _MOST_WAITS, _MOST_NAMES = 16, 8, 14


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
