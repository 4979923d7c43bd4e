"""Pictures of what was fastest: time to the target, what it is made of, or else samples a second or time alone."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from hocket.compare import amounts, axes, bars, summary
from hocket.compare.bars import Panel
from hocket.compare.canvas import Picture
from hocket.compare.results import Comparison, Entry, Spread
from hocket.compare.style import Looks


def pictures(comparison: Comparison, looks: Looks) -> list[Picture]:
    """By the best that is known."""
    if any(entry.time_to_target for entry in comparison.entries):
        return _time_to_target(comparison, looks)
    if any(entry.speed for entry in comparison.entries):
        return _throughput(comparison, looks)
    return _whole_time(comparison, looks)


def _time_to_target(comparison: Comparison, looks: Looks) -> list[Picture]:
    target, entries = comparison.target, comparison.entries
    goal = f"{amounts.line(target.metric)} {amounts.given(target.value)}" if target else "the target"
    times = [entry.time_to_target for entry in entries]
    unit, name = _unit(times)
    why = [_why_not(entry) for entry in entries]
    found = [
        bars.picture(
            "time-to-target",
            f"time to {goal}",
            "Shorter is better; whiskers reach from the fastest repeat to the slowest, × is how many times as fast as"
            " one worker.",
            entries,
            looks,
            [Panel(f"time ({name})", times, _faster(comparison, times), why, unit)],
        )
    ]
    per_pass = [_around(entry.seconds_per_pass, [r.seconds_per_pass for r in entry.reached]) for entry in entries]
    passes = [_around(entry.passes, [r.passes for r in entry.reached]) for entry in entries]
    if any(per_pass):
        small, small_name = _unit(per_pass)
        nothing = ["–"] * len(entries)
        found.append(
            bars.picture(
                "passes",
                "time per pass × passes",
                "Which of the two a strategy improves: left, how fast it goes through the data; right, how often it has"
                " to.",
                entries,
                looks,
                [
                    Panel(
                        f"one pass ({small_name})",
                        per_pass,
                        lambda s: amounts.seconds(s.median),
                        nothing,
                        small,
                    ),
                    Panel("passes over the data", passes, lambda s: amounts.plain(s.median, zeros=True), nothing),
                ],
            )
        )
    return found


def _whole_time(comparison: Comparison, looks: Looks) -> list[Picture]:
    """Where nothing else is known."""
    entries = comparison.entries
    times = [summary.whole_time(entry) for entry in entries]
    if not any(times):
        return []
    unit, name = _unit(times)
    panel = Panel(f"time ({name})", times, _faster(comparison, times), _why_no_number(entries), unit)
    caption = "Shorter is faster, if each run did the same work; × is how many times as fast as one worker."
    return [bars.picture("time", "time of the whole run", caption, entries, looks, [panel])]


def _faster(comparison: Comparison, times: Sequence[Spread | None]) -> Callable[[Spread], str]:
    """What is written after a bar of time."""
    one = times[0] if comparison.baseline is comparison.entries[0] else None  # one worker is the first

    def said(spread: Spread) -> str:
        faster = f", {amounts.times(one.median / spread.median)}" if one and spread.median and spread is not one else ""
        return f"{amounts.seconds(spread.median)}{faster}"

    return said


def _unit(spreads: Sequence[Spread | None]) -> tuple[float, str]:
    return axes.unit_of_seconds(value for spread in spreads if spread for value in (spread.lowest, spread.highest))


def _around(value: float | None, others: Sequence[float | None]) -> Spread | None:
    spread = Spread.of(others)
    return Spread(value, spread.lowest, spread.highest) if spread and value is not None else None


def _why_not(entry: Entry) -> str:
    if entry.failure:
        return "failed"
    return "not reached" if entry.good else "no run yet"


def _why_no_number(entries: Sequence[Entry]) -> list[str]:
    return ["failed" if entry.failure else "not known" if entry.good else "no run yet" for entry in entries]


def _throughput(comparison: Comparison, looks: Looks) -> list[Picture]:
    entries = comparison.entries
    speeds = [entry.speed for entry in entries]
    one = speeds[0] if comparison.baseline is entries[0] else None

    def said(spread: Spread) -> str:
        faster = f", {amounts.times(spread.median / one.median)}" if one and one.median and spread is not one else ""
        return f"{amounts.plain(spread.median)}{faster}"

    caption = "Longer is faster; this says nothing about how much is learned from a sample."
    panel = Panel("samples a second", speeds, said, _why_no_number(entries))
    return [bars.picture("throughput", "samples a second, of all workers", caption, entries, looks, [panel])]
