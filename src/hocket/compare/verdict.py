"""The answer in a sentence or two: which strategy was fastest, by how much, and whether that could be chance."""

from __future__ import annotations

from collections.abc import Callable

from hocket.compare import amounts
from hocket.compare.results import Comparison, Entry, Spread, Target


def of(comparison: Comparison) -> str:
    """By time to the target, or by throughput where there is none."""
    if not any(entry.good for entry in comparison.entries):
        return "Every run failed." if any(entry.failure for entry in comparison.entries) else "No run has ended yet."
    said = _by_target(comparison, comparison.target) if comparison.target else _by_speed(comparison)
    more = f" {comparison.missing} runs are still to be made." if comparison.missing > 1 else ""
    more = " One run is still to be made." if comparison.missing == 1 else more
    return said + more


def called(entry: Entry) -> str:
    """``mirrored on 4 workers``."""
    return "one worker" if entry.workers == 1 else f"{entry.strategy} on {entry.workers} workers"


def winner(comparison: Comparison) -> Entry | None:
    """Of all but the baseline; what reached the target in each repeat comes before what did so now and then."""
    if comparison.target is None:
        fast = [entry for entry in comparison.entries if entry.workers > 1 and entry.speed]
        return max(fast, key=lambda entry: _median(entry.speed), default=None)
    timed = [entry for entry in comparison.entries if entry.workers > 1 and entry.time_to_target]
    always = [entry for entry in timed if _always(entry)]
    return min(always or timed, key=lambda entry: _median(entry.time_to_target), default=None)


def _always(entry: Entry) -> bool:
    return len(entry.reached) == len(entry.results)


def _by_target(comparison: Comparison, target: Target) -> str:
    goal = f"{target.metric} {amounts.metric(target.value)}"
    best = winner(comparison)
    baseline = comparison.baseline
    one = baseline.time_to_target if baseline else None
    if best is None and one is None:
        return f"No run reached {goal}.{_nearest(comparison, target)}"
    if best is None and one is not None:
        return f"Only one worker reached {goal}: {amounts.seconds(one.median)}."
    assert best is not None and best.time_to_target is not None
    time = best.time_to_target
    sometimes = "" if _always(best) else f" (in {len(best.reached)} of {len(best.results)} repeats)"
    if one is None:
        alone = "one worker did not reach it" if baseline and baseline.good else "there is no time of one worker"
        first = f"{called(best)} reached {goal} first{sometimes}: {amounts.seconds(time.median)}; {alone}."
    elif time.median >= one.median:
        first = (
            f"Nothing beat one worker, which reached {goal} in {amounts.seconds(one.median)}; the best of the others,"
            f" {called(best)}{sometimes}, took {amounts.seconds(time.median)}."
        )
    else:
        first = (
            f"{called(best)} reached {goal} first{sometimes}: {amounts.seconds(time.median)},"
            f" {_times(one.median / time.median)} one worker ({amounts.seconds(one.median)})."
        )
    always = [entry for entry in comparison.entries if entry.workers > 1 and _always(entry)]
    return first + _doubt(best, comparison, always, lambda entry: entry.time_to_target, amounts.seconds)


def _by_speed(comparison: Comparison) -> str:
    best = winner(comparison)
    one = comparison.baseline.speed if comparison.baseline else None
    if best is None:
        alone = f" One worker made {_speed(one.median)}." if one else ""
        return f"There is no speed of more than one worker to compare.{alone}"
    assert best.speed is not None
    if one and one.median >= best.speed.median:
        first = (
            f"Nothing beat one worker, which made {_speed(one.median)}; the best of the others, {called(best)}, made"
            f" {_speed(best.speed.median)}."
        )
    else:
        faster = f", {_times(best.speed.median / one.median)} one worker ({_speed(one.median)})" if one else ""
        first = f"{called(best)} is fastest: {_speed(best.speed.median)}{faster}."
    first += _doubt(
        best, comparison, [e for e in comparison.entries if e.workers > 1], lambda entry: entry.speed, amounts.plain
    )
    if not comparison.metrics:
        return first  # a note says that this is all that is known
    return f"{first} No target was given: --until {comparison.metrics[0]}=VALUE compares the time to it."


def _doubt(
    best: Entry,
    comparison: Comparison,
    others: list[Entry],
    value: Callable[[Entry], Spread | None],
    text: Callable[[float], str],
) -> str:
    """Who else may be as good, where there are repeats enough to tell."""
    own, baseline = value(best), comparison.baseline
    if own is None:
        return ""
    if max(len(entry.good) for entry in comparison.entries) == 1:
        return ""  # a note says so
    one = value(baseline) if baseline else None
    if one and _overlap(own, one):
        both = f"{text(own.lowest)} to {text(own.highest)} and {text(one.lowest)} to {text(one.highest)}"
        return f" Their repeats overlap ({both}), so this may be chance."
    equal = [called(o) for o in others if o is not best and (spread := value(o)) and _overlap(own, spread)]
    if not equal:
        return ""
    listed = equal[0] if len(equal) == 1 else f"{', '.join(equal[:-1])} and {equal[-1]}"
    return f" Within the spread of the repeats {listed} {'is' if len(equal) == 1 else 'are'} as good."


def _nearest(comparison: Comparison, target: Target) -> str:
    """Who came nearest."""
    values = [(spread.median, e) for e in comparison.entries if (spread := e.last(target.metric))]
    if not values:
        return ""
    value, entry = (max if target.rises else min)(values, key=lambda pair: pair[0])
    return f" The nearest at its end was {called(entry)}: {amounts.metric(value)}."


def _overlap(a: Spread, b: Spread) -> bool:
    return a.lowest <= b.highest and b.lowest <= a.highest


def _median(spread: Spread | None) -> float:
    assert spread is not None
    return spread.median


def _times(value: float) -> str:
    return f"{amounts.plain(value, 2)} times as fast as"


def _speed(value: float) -> str:
    return f"{amounts.plain(value)} samples/s"
