"""The record of a run becomes a result."""

from __future__ import annotations

import math
from collections import Counter
from pathlib import Path
from statistics import fmean
from typing import Any

from hocket.lab.compare.plan import Planned
from hocket.lab.compare.results import Point, Result
from hocket.lab.compare.target import Wish
from hocket.observe import reader
from hocket.observe.reader import Curves, RecordedRun
from hocket.observe.summaries import CONSENSUS

_MOST_POINTS = 2000  # points of a curve that are kept; more cannot be told apart in a picture


def result(planned: Planned, folder: Path, wish: Wish | None, failure: str) -> Result:
    """What the record in ``folder`` says of a run that has ended.

    Args:
        planned: The run as it was planned.
        folder: The folder of the run's record.
        wish: The target that was to be reached.
        failure: Why the run failed, in a line; empty if it did not.
    """
    run, found = reader.read(folder), reader.read_curves(folder)
    began = found.began or found.first or run.fact("run", "started") or 0.0
    points = reported(found, began)
    reached, sent = _reach(points, wish), _sent(run)
    if wish is not None and reached is not None:  # a run goes on for a moment until that is noticed
        sent = _sent(run, found.metrics[wish.metric][points[wish.metric].index(reached)][3], planned.way.workers)
        points = {name: [p for p in curve if p.seconds <= reached.seconds] for name, curve in points.items()}
    start, end = run.fact("run", "started") or 0.0, _end(run, found, began)
    seconds = max([end - (found.first or began), *(curve[-1].seconds for curve in points.values() if curve)])
    samples, trained = found.seen, (found.last or 0.0) - (found.first or 0.0)
    if reached is not None and reached.samples:
        samples, trained = reached.samples, reached.seconds
    return Result(
        strategy=planned.way.strategy,
        workers=planned.way.workers,
        servers=planned.way.servers,
        repeat=planned.repeat,
        failure=failure,
        seconds=seconds,
        start_up=max(0.0, (found.first or began) - start),
        samples=samples,
        speed=samples / trained if samples and trained > 0 else None,
        pass_samples=found.pass_samples,
        shares=shares(run, seconds),
        sent=sent,
        staleness=_staleness(run),
        curves={name: thin(curve) for name, curve in points.items() if curve},
        reached=reached,
        gradients=dict(run.facts.get("gradients", {})),
        told=dict(run.facts.get("told", {})),
    )


def reported(found: Curves, began: float) -> dict[str, list[Point]]:
    """The metrics that the script has reported itself, by name; those that a strategy adds are none."""
    return {
        name: [Point(max(0.0, when - began), samples, value) for when, samples, value, _ in curve]
        for name, curve in found.metrics.items()
        if name != CONSENSUS
    }


def thin(curve: list[Point]) -> list[Point]:
    """As many points as a picture can show, the last one among them."""
    every = math.ceil(len(curve) / _MOST_POINTS)
    return curve if every <= 1 else [*curve[:-1][::every], curve[-1]]


def _end(run: RecordedRun, found: Curves, began: float) -> float:
    """By the launcher's clock; of a script without a loop of ours, the end of the run."""
    if found.last is not None:
        return found.last
    return began + run.seconds


def _reach(points: dict[str, list[Point]], wish: Wish | None) -> Point | None:
    """The first point that is good enough."""
    curve = points.get(wish.metric, []) if wish is not None else []
    target = wish.target(curve) if wish is not None else None
    if target is None:
        return None
    return next((point for point in curve if target.is_reached(point.value)), None)


def _sent(run: RecordedRun, first: int | None = None, workers: int = 1) -> int:
    """Bytes of all workers: at the end, or when rank 0 had handed over ``first``.

    What the others had handed over by then is not known; it is taken to be the same share of what they told last.
    """
    told = run.facts.get("sent", {})
    if first is None:
        return sum(told.values())
    last = told.get("rank 0")
    return round(first / last * sum(told.values())) if last else first * workers


def shares(run: RecordedRun, seconds: float) -> dict[str, float]:
    """How the training time of all ranks, each since its first batch, is shared out."""
    began = run.facts.get("began", {})
    if not began or seconds <= 0:
        return {}
    waiting, communication = [], []
    for rank, totals in run.ranks.items():
        first = began.get(f"rank {rank}")
        if first is None:
            continue
        exchanging = totals["exchanging"] - first["exchanging"]
        waited = totals["waited"] - first["waited"] + _held_up(run, rank)
        waiting.append(min(1.0, max(0.0, waited) / seconds))
        communication.append(min(1.0 - waiting[-1], max(0.0, exchanging - max(0.0, waited)) / seconds))
    if not waiting:
        return {}
    found = {"communication": fmean(communication), "waiting": fmean(waiting)}
    return {"compute": max(0.0, 1.0 - sum(found.values())), **found}


def _held_up(run: RecordedRun, rank: int) -> float:
    """Seconds that servers have let a worker wait for others; a push goes to all of them at once."""
    served = run.facts.get("served", {}).values()
    return max((_of_worker(server, rank).get("waited", 0.0) for server in served), default=0.0)


def _of_worker(server: dict[str, Any], rank: int) -> dict[str, Any]:
    found: dict[str, Any] = server.get("workers", {}).get(str(rank), {})
    return found


def _staleness(run: RecordedRun) -> dict[int, int]:
    counts: Counter[int] = Counter()
    for server in run.facts.get("served", {}).values():
        for worker in server.get("workers", {}).values():
            for late, times in worker.get("staleness", {}).items():
                counts[int(late)] += int(times)
    return dict(sorted(counts.items()))
