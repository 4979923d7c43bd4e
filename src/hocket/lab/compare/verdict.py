"""The answer: which strategy won, by how much, whether that could be chance, and what to know before believing it."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

from hocket.lab.compare import amounts, summary, target
from hocket.lab.compare.results import Comparison, Contender, Goal, Result, Spread

_EQUAL = 0.005  # relative difference below which values count as equal


@dataclass(frozen=True)
class Measure:
    """A measure by which strategies are compared.

    Attributes:
        value: Gives a contender's spread over its repeats; None where it is not known.
        text: Writes a value with its unit.
        rises: Whether more is better.
        did: The verb for a value: ``took`` or ``made``.
    """

    value: Callable[[Contender], Spread | None]
    text: Callable[[float], str]
    rises: bool
    did: str

    def times(self, own: Spread, other: Spread) -> float:
        """How many times as good as ``other`` ``own`` is."""
        better, worse = (own, other) if self.rises else (other, own)
        return better.median / worse.median if worse.median else math.inf

    def best(self, entries: list[Contender]) -> Contender | None:
        """The best of the contenders whose value is known."""
        known = [(spread.median, entry) for entry in entries if (spread := self.value(entry))]
        return (max if self.rises else min)(known, key=lambda pair: pair[0])[1] if known else None


_TO_TARGET = Measure(lambda entry: entry.time_to_target, amounts.seconds, rises=False, did="took")
_SPEED = Measure(lambda entry: entry.speed, lambda value: f"{amounts.plain(value)} samples/s", rises=True, did="made")
_TIME = Measure(summary.whole_time, amounts.seconds, rises=False, did="took")


def of(comparison: Comparison) -> str:
    """By time to the target, or by throughput where there is none, or by time alone."""
    if not any(entry.good for entry in comparison.entries):
        return "Every run failed." if any(entry.failure for entry in comparison.entries) else "No run has ended yet."
    said = _by_target(comparison, comparison.target) if comparison.target else _without_target(comparison)
    more = f" {comparison.missing} runs are still to be made." if comparison.missing > 1 else ""
    more = " One run is still to be made." if comparison.missing == 1 else more
    return said + more


def called(entry: Contender) -> str:
    """``mirrored on 4 workers``."""
    return "one worker" if entry.workers == 1 else f"{amounts.line(entry.strategy)} on {entry.workers} workers"


def winner(comparison: Comparison) -> Contender | None:
    """The best but the baseline; contenders that reached the target in every repeat come before all others."""
    others = [entry for entry in comparison.entries if entry.workers > 1]
    if comparison.target is None:
        return _measure(comparison).best(others)
    timed = [entry for entry in others if entry.time_to_target]
    return _TO_TARGET.best([entry for entry in timed if _always(entry)] or timed)


def _measure(comparison: Comparison) -> Measure:
    return _TIME if summary.is_time_alone(comparison) else _SPEED


def _always(entry: Contender) -> bool:
    return len(entry.reached) == len(entry.results)


def _often(entry: Contender) -> str:
    return f"in {len(entry.reached)} of {len(entry.results)} repeats"


def _by_target(comparison: Comparison, target: Goal) -> str:
    goal = f"{amounts.line(target.metric)} {amounts.given(target.value)}"
    best, baseline = winner(comparison), comparison.baseline
    one = baseline.time_to_target if baseline else None
    if best is None:
        if baseline is None or one is None:
            return f"No run reached {goal}.{_nearest(comparison, target)}"
        sometimes = "" if _always(baseline) else f" ({_often(baseline)})"
        return f"Only one worker reached {goal}{sometimes}: {amounts.seconds(one.median)}."
    assert best.time_to_target is not None
    name, time = called(best), best.time_to_target
    took = amounts.seconds(time.median)
    sometimes = "" if _always(best) else f" ({_often(best)})"
    always = [entry for entry in comparison.entries if entry.workers > 1 and _always(entry)]
    if baseline is None or one is None:
        alone = "one worker did not reach it" if baseline and baseline.good else "there is no time of one worker"
        return f"{name} reached {goal} first{sometimes}: {took}; {alone}." + _doubt(best, None, always, _TO_TARGET)
    alone = amounts.seconds(one.median)
    if _always(best) and not _always(baseline):
        first = f"{name} reached {goal} in every repeat: {took}; one worker did so {_often(baseline)} ({alone})."
        return first + _doubt(best, None, always, _TO_TARGET)
    if _always(baseline) and not _always(best):
        return (
            f"Nothing beat one worker, which reached {goal} in every repeat: {alone}; the best of the others, {name},"
            f" did so {_often(best)} ({took})."
        )
    times = _TO_TARGET.times(time, one)
    if abs(times - 1) < _EQUAL:
        first = f"{name} reached {goal}{sometimes} as fast as one worker: {took}."
        return first + _doubt(best, None, always, _TO_TARGET)
    if times < 1:
        first = (
            f"Nothing beat one worker, which reached {goal} in {alone}; the best of the others, {name}{sometimes}, took"
            f" {took}."
        )
    else:
        first = f"{name} reached {goal} first{sometimes}: {took}, {_times(times)} one worker ({alone})."
    return first + _doubt(best, baseline, always, _TO_TARGET)


def _without_target(comparison: Comparison) -> str:
    first = _by(_measure(comparison), comparison)
    if comparison.wanted:
        return (
            f"{first} No run has reported a value by which --until {amounts.line(comparison.wanted)} could be judged."
        )
    if not comparison.metrics:
        return first  # a note says that this is all that is known
    return f"{first} No target was given: --until {amounts.line(comparison.metrics[0])}=VALUE compares the time to it."


def _by(measure: Measure, comparison: Comparison) -> str:
    best, baseline = winner(comparison), comparison.baseline
    one, text = measure.value(baseline) if baseline else None, measure.text
    own = measure.value(best) if best else None
    if best is None or own is None:
        alone = f" One worker {measure.did} {text(one.median)}." if one else ""
        return f"There is no run of more than one worker to compare.{alone}"
    others = [entry for entry in comparison.entries if entry.workers > 1]
    if one is None:
        return f"{called(best)} is fastest: {text(own.median)}." + _doubt(best, None, others, measure)
    times = measure.times(own, one)
    if abs(times - 1) < _EQUAL:
        first = f"{called(best)} is as fast as one worker: {text(own.median)}."
        return first + _doubt(best, None, others, measure)
    if times < 1:
        first = (
            f"Nothing beat one worker, which {measure.did} {text(one.median)}; the best of the others, {called(best)},"
            f" {measure.did} {text(own.median)}."
        )
    else:
        first = f"{called(best)} is fastest: {text(own.median)}, {_times(times)} one worker ({text(one.median)})."
    return first + _doubt(best, baseline, others, measure)


def _doubt(best: Contender, baseline: Contender | None, others: list[Contender], measure: Measure) -> str:
    """Who else may be as good, where there are repeats enough to tell (if not, a note says so).

    Args:
        best: The contender that may not be the best.
        baseline: None where it is known already how the two compare.
        others: The contenders that may be as good, and ``best``.
        measure: The measure by which they are compared.
    """
    own, one = measure.value(best), measure.value(baseline) if baseline else None
    if own is None or max(len(entry.good) for entry in (best, *others, *([baseline] if baseline else []))) == 1:
        return ""
    if one and _overlap(own, one):
        own_range, its = (f"{measure.text(s.lowest)} to {measure.text(s.highest)}" for s in (own, one))
        return f" Their repeats overlap ({own_range} and {its}), so this may be chance."
    equal = [called(o) for o in others if o is not best and (spread := measure.value(o)) and _overlap(own, spread)]
    if not equal:
        return ""
    listed = equal[0] if len(equal) == 1 else f"{', '.join(equal[:-1])} and {equal[-1]}"
    return f" Within the spread of the repeats {listed} {'is' if len(equal) == 1 else 'are'} as good."


def _nearest(comparison: Comparison, target: Goal) -> str:
    """Who came nearest; what has gone to NaN or to infinity is nowhere near."""
    values = []
    for entry in comparison.entries:
        last = [run.curves[target.metric][-1].value for run in entry.good if run.curves.get(target.metric)]
        if spread := Spread.of([value for value in last if math.isfinite(value)]):
            values.append((spread.median, entry))
    if not values:
        return ""
    value, entry = (max if target.rises else min)(values, key=lambda pair: pair[0])
    return f" The nearest at its end was {called(entry)}: {amounts.metric(value)}."


def _overlap(a: Spread, b: Spread) -> bool:
    return a.lowest <= b.highest and b.lowest <= a.highest


def _times(value: float) -> str:
    """Three digits where two would say that nothing has changed."""
    return f"{amounts.plain(value, 3 if value < 1.1 else 2)} times as fast as"


def notes(found: Comparison) -> list[str]:
    """From the results that there are."""
    good = [result for entry in found.entries for result in entry.good]
    if not good:
        return []
    return [
        *_what_is_known(found, good),
        *_threads(found),
        *_cores(found, good),
        *_missed_target(found),
        *_moment(good),
        *_sent(found),
    ]


def _what_is_known(found: Comparison, good: list[Result]) -> list[str]:
    said = []
    if not any(result.speed for result in good):
        said.append(
            "The script has no training loop over a loader from hocket.distribute(), so only the time of whole runs is "
            "known."
        )
    elif not found.metrics:
        said.append("The script reports no metrics (hocket.report), so strategies are compared by samples per second.")
    return said


def _threads(found: Comparison) -> list[str]:
    """Workers that share the cores with others have fewer threads than one alone."""
    threads, cores = found.threads, found.about.get("cores", "")
    alone = threads.pop(1, set())
    if not alone:
        return []
    least = min(alone)
    if all(own == alone for own in threads.values()):
        few = cores.isdecimal() and least < int(cores)
        return [f"One worker used {least} of the {cores} cores, as each of several did."] if few else []
    one = _threads_of(least) + (" (all cores, as python train.py has)" if str(least) == cores else "")
    words = [f"{workers} workers had {_threads_of(min(own))} each" for workers, own in threads.items()]
    return [
        f"One worker had {one}, {', '.join(words)}: speed-ups are over one worker with other threads, and "
        "no laws of scaling can be read from them; --threads 1 compares like with like."
    ]


def _cores(found: Comparison, good: list[Result]) -> list[str]:
    cores = found.shared_cores
    if cores is None or any("cuda" in str(result.told.get("device")) for result in good):
        return []
    crowds = sorted({result.workers for result in good if result.workers > max(1, cores)})
    if not crowds:
        return []
    counts = " and ".join([", ".join(map(str, crowds[:-1])), str(crowds[-1])] if crowds[1:] else [str(crowds[0])])
    shared = f"{cores} core{'s' if cores > 1 else ''}"
    return [
        f"{counts} workers shared {shared}: more workers than cores are not faster, whatever the strategy, so their "
        "speed-ups say nothing of machines that have the cores."
    ]


def _threads_of(count: int) -> str:
    return f"{count} thread{'s' if count > 1 else ''}"


def _missed_target(found: Comparison) -> list[str]:
    if found.target is None:
        if not found.wanted:
            return []
        metric = target.parse(found.wanted).metric
        return [f"{found.wanted} was not reached: no value of {metric} that was reported is a number."]
    missed = [entry.name for entry in found.entries if entry.good and not any(r.reached for r in entry.good)]
    goal = f"{found.target.metric} {amounts.given(found.target.value)}"
    return [f"{goal} was not reached by {', '.join(missed)}."] if missed else []


def _moment(good: list[Result]) -> list[str]:
    """What a row has that is not of the moment at which the target was reached."""
    if not any(result.reached and (result.shares or result.staleness) for result in good):
        return []
    return [
        "Times, samples/s, passes, metrics and bytes sent are those at the target; shares of compute, communication "
        "and waiting, staleness and samples a step are those of whole runs, which go on for a moment after it."
    ]


def _sent(found: Comparison) -> list[str]:
    """Nothing is sent where nothing has to be, which is not the same as not knowing."""
    silent = [entry for entry in found.entries if entry.good and not any(result.sent for result in entry.good)]
    wild = [entry.name for entry in silent if entry.strategy.startswith("hogwild")]
    if not wild:
        return []
    return [f"{', '.join(wild)}: 0 B are sent, for workers write to one copy of the parameters in shared memory."]
