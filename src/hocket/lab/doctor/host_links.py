"""What measurements between hosts say: which links are slow, which strategies they are good for, how clocks differ."""

from __future__ import annotations

import statistics
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass
from typing import Any, NamedTuple

from hocket.lab.doctor.findings import Finding, note, ok
from hocket.lab.doctor.machine_check import NTP

_MUCH = 3.0  # times slower than the best that are worth a look
_LATE = 5.0  # the same for round trips, which vary more
_SLOW = 50e6  # bytes per second below which sending all gradients at every step does not pay
_FAR = 5e-3  # seconds of a round trip above which it does not either
_UNIT = 1e-3  # seconds; round trips below it are good, however they compare
_APART = 1.0  # seconds between the clocks of two hosts that are worth a look
_GRADIENT = 40e6  # bytes that a model of 10 million parameters sends


@dataclass(frozen=True)
class HostPair:
    """What was measured between two hosts.

    Attributes:
        first: The host that asked, by name.
        second: The host that answered, by name.
        address: The address at which the first host reaches the second.
        median: Median seconds of a small round trip.
        p90: Seconds that 90 % of round trips take at most.
        there: Bytes per second from the first to the second.
        back: Bytes per second from the second to the first.
    """

    first: str
    second: str
    address: str
    median: float
    p90: float
    there: float
    back: float

    def plain(self) -> dict[str, Any]:
        return asdict(self)

    @property
    def directions(self) -> list[tuple[str, str, float]]:
        """From whom to whom, and how many bytes per second."""
        return [(self.first, self.second, self.there), (self.second, self.first, self.back)]


def judge(ways: Sequence[HostPair]) -> list[Finding]:
    """What to say about them all."""
    if not ways:
        return []
    slowest = min((way for way in ways), key=lambda way: min(way.there, way.back))
    latest = max(ways, key=lambda way: way.median)
    seen = (
        f"{len(ways)} pair{'s' if len(ways) > 1 else ''} measured, one after the other: at least "
        f"{speed(min(slowest.there, slowest.back))}, round trips of at most {milliseconds(latest.median)}"
    )
    notes = [*_outliers(ways), *_late(ways), *_unfit(ways)]
    return notes or [ok("links", seen)]


def _outliers(ways: Sequence[HostPair]) -> list[Finding]:
    """Directions much slower than the best; several of one host are one finding."""
    directions = [direction for way in ways for direction in way.directions]
    best = max(rate for *_, rate in directions)
    slow = [direction for direction in directions if direction[2] * _MUCH < best]
    found = []
    for host in _common(slow, directions):
        own = [direction for direction in slow if host in direction[:2]]
        slow = [direction for direction in slow if host not in direction[:2]]
        rate = statistics.median(rate for *_, rate in own)
        seen = f"all links of {host} are slow: {speed(rate)}, and the best elsewhere has {speed(best)}"
        found.append(note("links", seen, f"look at {host}'s cable, port and interface (ethtool), or leave it out"))
    for first, second, rate in slow:
        seen = f"{first} to {second}: {speed(rate)}, and the best has {speed(best)}"
        found.append(note("links", seen, f"look at what is between {first} and {second}, and what else uses it"))
    return found


def _common(slow: list[tuple[str, str, float]], all_of_them: list[tuple[str, str, float]]) -> list[str]:
    """Hosts that have several links, each of them slow, while those of the host at the other end are not all."""
    counts = {host: _links(slow, host) for host in dict.fromkeys(name for first, second, _ in slow
                                                                for name in (first, second))}  # fmt: skip
    return [host for host, count in counts.items() if count == _links(all_of_them, host) and count > 2]


def _links(directions: Iterable[tuple[str, str, float]], host: str) -> int:
    return sum(host in direction[:2] for direction in directions)


def _late(ways: Sequence[HostPair]) -> list[Finding]:
    best = min(way.median for way in ways)
    return [
        note("links", f"{way.first} and {way.second}: a round trip takes {milliseconds(way.median)}, and the best "
             f"{milliseconds(best)}", f"look at the way of the packets: traceroute from {way.first} to {way.address}")
        for way in ways
        if way.median > max(_LATE * best, _UNIT)
    ]  # fmt: skip


def _unfit(ways: Sequence[HostPair]) -> list[Finding]:
    """Every step of ``mirrored`` waits for the slowest link."""
    rate = min(min(way.there, way.back) for way in ways)
    latency = max(way.median for way in ways)
    remedy = "use a strategy that sends seldom: local_sgd, diloco or easgd; or put the workers onto one machine"
    if rate < _SLOW:
        seconds = 2 * _GRADIENT / max(rate, 1.0)
        return [note("strategies", f"mirrored will not pay over {speed(rate)}: the gradients of 10 million parameters "
                     f"take about {seconds:,.1f} s at every step", remedy)]  # fmt: skip
    if latency > _FAR:
        return [note("strategies", f"mirrored will not pay over round trips of {milliseconds(latency)}, for several "
                     "are needed at every step", remedy)]  # fmt: skip
    return []


def matrix(ways: Sequence[HostPair]) -> list[str]:
    """Tables in lines: bytes per second from row to column, and round trips."""
    if not ways:
        return []
    names = list(dict.fromkeys(name for way in ways for name in (way.first, way.second)))
    rates = {(first, second): f"{rate / 1e6:,.1f}" for way in ways for first, second, rate in way.directions}
    trips = {}
    for way in ways:
        text = f"{way.median * 1e3:.2f} ({way.p90 * 1e3:.2f})"
        trips[way.first, way.second] = trips[way.second, way.first] = text
    return [
        *_table("MB/s from row to column", names, rates),
        "",
        *_table("ms of a small round trip, the median (and what 90 % stay below)", names, trips),
    ]


def _table(title: str, names: Sequence[str], cells: dict[tuple[str, str], str]) -> list[str]:
    rows = [["", *names], *([row, *(cells.get((row, column), "–") for column in names)] for row in names)]
    widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]))]
    lines = []
    for row in rows:
        first = row[0].ljust(widths[0])
        lines.append("  ".join(["", first, *(cell.rjust(w) for cell, w in zip(row[1:], widths[1:], strict=True))]))
    return [title, *(line.rstrip() for line in lines)]


def speed(rate: float) -> str:
    """Bytes per second, for people."""
    return f"{rate / 1e9:,.1f} GB/s" if rate >= 1e9 else f"{rate / 1e6:,.1f} MB/s"


def milliseconds(seconds: float) -> str:
    """Seconds, for people."""
    return f"{seconds * 1e3:.2f} ms"


class Trip(NamedTuple):
    """One question for another's clock: when it was asked and answered by ours, and what theirs said."""

    asked: float
    answered: float
    theirs: float


def clock_difference(trips: Sequence[Trip]) -> tuple[float, float]:
    """By how many seconds their clock is ahead of ours, and how far from it the truth can be: half the best trip."""
    best = min(trips, key=lambda trip: trip.answered - trip.asked)
    return best.theirs - (best.asked + best.answered) / 2, (best.answered - best.asked) / 2


def judge_clock(ahead: float, uncertain: float) -> Finding:
    """What to say of a clock that is so much ahead of that of the machine on which the command runs."""
    way = "ahead of" if ahead > 0 else "behind"
    seen = f"{_seconds(abs(ahead))} {way} this machine's, ± {_seconds(uncertain)}"
    if abs(ahead) - uncertain > _APART:
        return note("clocks", f"{seen}: times in logs and records will differ", NTP)
    return ok("clocks", seen)


def _seconds(value: float) -> str:
    return f"{value:,.1f} s" if value >= 1 else f"{value * 1e3:.2f} ms"
