"""What a reader of a comparison should know before believing it, in sentences."""

from __future__ import annotations

from hocket.compare import amounts
from hocket.compare.results import Comparison, Result


def gather(found: Comparison) -> list[str]:
    """From the results that there are."""
    good = [result for entry in found.entries for result in entry.good]
    if not good:
        return []
    return [*_what_is_known(found, good), *_threads(found), *_target(found)]


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
    cores = found.about.get("cores", "")
    if alone and all(threads == alone for threads in others.values()) and cores.isdecimal() and min(alone) < int(cores):
        return [f"One worker used {min(alone)} of the {cores} cores, as each of several did."]
    if not alone or all(threads == alone for threads in others.values()):
        return []
    one = _threads_of(min(alone))
    words = [f"{workers} workers had {_threads_of(min(threads))} each" for workers, threads in sorted(others.items())]
    return [
        f"One worker had {one} (all cores, as python train.py has), {', '.join(words)}: --threads 1 makes them alike."
    ]


def _threads_of(count: int) -> str:
    return f"{count} thread{'s' if count > 1 else ''}"


def _target(found: Comparison) -> list[str]:
    if found.target is None:
        return []
    missed = [entry.name for entry in found.entries if entry.good and not any(r.reached for r in entry.good)]
    goal = f"{found.target.metric} {amounts.given(found.target.value)}"
    return [f"{goal} was not reached by {', '.join(missed)}."] if missed else []
