"""What a reader of a comparison should know before believing it, in sentences."""

from __future__ import annotations

from hocket.compare import amounts, target
from hocket.compare.results import Comparison, Result


def gather(found: Comparison) -> list[str]:
    """From the results that there are."""
    good = [result for entry in found.entries for result in entry.good]
    if not good:
        return []
    return [
        *_what_is_known(found, good),
        *_threads(found),
        *_cores(found, good),
        *_target(found),
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
    baseline = found.baseline
    alone = {
        int(result.told["threads"]) for result in (baseline.good if baseline else []) if result.told.get("threads")
    }
    others: dict[int, set[int]] = {}
    for entry in found.entries:
        for result in entry.good:
            if result.workers > 1 and result.told.get("threads"):
                others.setdefault(result.workers, set()).add(result.told["threads"])
    cores = _count_cores(found)
    if not alone:
        return []
    if all(threads == alone for threads in others.values()):
        few = cores is not None and min(alone) < cores
        return [f"One worker used {min(alone)} of the {cores} cores, as each of several did."] if few else []
    one = _threads_of(min(alone)) + (" (all cores, as python train.py has)" if min(alone) == cores else "")
    words = [f"{workers} workers had {_threads_of(min(threads))} each" for workers, threads in sorted(others.items())]
    return [
        f"One worker had {one}, {', '.join(words)}: speed-ups are over one worker with other threads, and "
        "no laws of scaling can be read from them; --threads 1 compares like with like."
    ]


def _cores(found: Comparison, good: list[Result]) -> list[str]:
    """Where all run on this machine, hosts of a rig among them."""
    cores, network = _count_cores(found), found.about.get("network", "one host")
    is_here = network == "one host" or "of a rig" in network
    if cores is None or not is_here or any("cuda" in str(result.told.get("device")) for result in good):
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


def _count_cores(found: Comparison) -> int | None:
    text = found.about.get("cores", "")
    return int(text) if text.isdecimal() else None


def _threads_of(count: int) -> str:
    return f"{count} thread{'s' if count > 1 else ''}"


def _target(found: Comparison) -> list[str]:
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
