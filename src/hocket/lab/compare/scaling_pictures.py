"""Pictures of how many workers are worth it: speed-up, efficiency and the laws, and DistBelief's trade-off."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from hocket.lab.compare import scaling
from hocket.lab.compare.looks import BASELINE, Looks, short
from hocket.lab.compare.picture import Axis, Panel, Picture, PlottedLine, far_apart, unit_of_seconds
from hocket.lab.compare.results import Comparison, Spread

_CURVE = 60  # points of a fitted law
_TITLE = 23  # letters above a panel that has another one beside it


@dataclass(frozen=True)
class ScalingCurve:
    """One strategy on several worker counts.

    Attributes:
        strategy: The name of the strategy.
        counts: Workers, ascending, without one.
        speed_ups: Over one worker's median, for each.
        amdahl: The laws, if there are counts enough.
        gunther: The other.
    """

    strategy: str
    counts: tuple[int, ...]
    speed_ups: tuple[Spread, ...]
    amdahl: scaling.Law | None
    gunther: scaling.Law | None


def scalings(comparison: Comparison) -> list[ScalingCurve]:
    """The scaling of samples a second, for strategies that ran on two worker counts or more besides one worker."""
    baseline = comparison.baseline.speed if comparison.baseline else None
    found = []
    for strategy in dict.fromkeys(entry.strategy for entry in comparison.entries if entry.workers > 1):
        entries = [entry for entry in comparison.entries if entry.strategy == strategy and entry.workers > 1]
        known = [(entry, speed) for entry in entries if (speed := entry.speed)]
        if not baseline or not baseline.median or len(known) < 2:
            continue
        one = baseline.median
        points = [(entry.workers, run.speed / one) for entry, _ in known for run in entry.good if run.speed]
        spreads = tuple(speed.over(one) for _, speed in known)
        counts = tuple(entry.workers for entry, _ in known)
        found.append(ScalingCurve(strategy, counts, spreads, scaling.amdahl(points), scaling.gunther(points)))
    return found


def pictures(comparison: Comparison, looks: Looks) -> list[Picture]:
    """Speed-up and efficiency where there are several worker counts, and the trade-off where there is a target."""
    known = scalings(comparison)
    return [*(_speed_up_and_efficiency(comparison, known, looks) if known else []), *_trade_off(comparison, looks)]


def _speed_up_and_efficiency(comparison: Comparison, known: Sequence[ScalingCurve], looks: Looks) -> list[Picture]:
    columns = 2 if len(known) > 1 and max(len(one.strategy) for one in known) <= _TITLE else 1  # long names need room
    doubts = unlike(comparison)
    counts = (1, *(count for one in known for count in one.counts))
    highest = max(spread.highest for one in known for spread in one.speed_ups)
    top = max(highest * 1.1, min(max(counts), highest * 1.4))
    ideal = PlottedLine([(count, 100.0) for count in (1, max(counts))], "soft", "ideal", width=1)
    percents = [ideal, *(_measured(one, 100.0, looks, short(one.strategy, 40), joined=True) for one in known)]
    most = max([105.0, *(1.05 * high for line in percents for _, high in line.spread)])
    return [
        Picture(
            "speed-up",
            "speed-up against workers",
            "Samples a second over those of one worker: on the thin line each worker would add as much as the first."
            " The laws are fitted to all repeats.",
            tuple(_speed_up(one, counts, top, looks, columns) for one in known),
            columns,
            (65 + 140 * -(-len(known) // columns)) if len(known) > 1 else 270,
            leads=True,
        ),
        Picture(
            "efficiency",
            "efficiency against workers",
            "Speed-up for each worker: 100 % means that nothing is lost by working together.",
            (Panel(Axis("workers", counts), Axis("efficiency (%)", most=most), tuple(percents)),),
            says=(*doubts, *_says(known, doubted=bool(doubts))),
        ),
    ]


def _speed_up(one: ScalingCurve, counts: tuple[int, ...], top: float, looks: Looks, columns: int) -> Panel:
    most = max(counts)
    xs = [1 + (most - 1) * step / _CURVE for step in range(_CURVE + 1)]
    lines = [PlottedLine([(1, 1), (most, most)], "soft", "ideal", width=1)]
    # Where the two are the same, both are still seen: a broad pale line below, a thin one with gaps on it.
    if one.gunther is not None:
        points = [(x, one.gunther.speed_up(x)) for x in xs]
        lines.append(PlottedLine(points, looks.of_strategy(one.strategy).tone, "Gunther's law", width=5, alpha=0.4))
    if one.amdahl is not None:
        points = [(x, one.amdahl.speed_up(x)) for x in xs]
        lines.append(PlottedLine(points, "ink", "Amdahl's law", dashes=(5, 2), width=1.2))
    lines.append(_measured(one, 1.0, looks, "measured", joined=False))
    title = short(one.strategy, _TITLE if columns > 1 else 46)
    return Panel(Axis("workers", counts, count=2), Axis("speed-up (×)", most=top, count=4), tuple(lines), title=title)


def _measured(one: ScalingCurve, at_one: float, looks: Looks, label: str, *, joined: bool) -> PlottedLine:
    """Speed-ups with whiskers, or with 100 for one worker, the per cent of what would be ideal."""
    look = looks.of_strategy(one.strategy)
    each = [1 / at_one if not joined else count / at_one for count in one.counts]
    spreads = [Spread(at_one, at_one, at_one), *(s.over(unit) for s, unit in zip(one.speed_ups, each, strict=True))]
    return PlottedLine(
        [(count, spread.median) for count, spread in zip((1, *one.counts), spreads, strict=True)],
        look.tone,
        label,
        look.marker,
        look.dashes,
        [(spread.lowest, spread.highest) for spread in spreads],
        joined=joined,
        size=5,
    )


def _trade_off(comparison: Comparison, looks: Looks) -> list[Picture]:
    timed = [(entry, time) for entry in comparison.entries if (time := entry.time_to_target)]
    counts = tuple(entry.workers + entry.servers for entry, _ in timed)
    if len(set(counts)) < 2:
        return []
    scale, unit = unit_of_seconds(value for _, time in timed for value in (time.lowest, time.highest))
    lines = []
    for strategy in dict.fromkeys("" if entry.workers == 1 else entry.strategy for entry, _ in timed):
        look = looks.of_strategy(strategy) if strategy else BASELINE
        own = [(e, s.over(scale)) for e, s in timed if strategy == ("" if e.workers == 1 else e.strategy)]
        points = [(e.workers + e.servers, spread.median) for e, spread in own]
        spread = [(spread.lowest, spread.highest) for _, spread in own]
        label = short(strategy, 40) or "one worker"
        lines.append(PlottedLine(points, look.tone, label, look.marker, look.dashes, spread, size=5.5))
    alone = comparison.baseline.time_to_target if comparison.baseline else None
    panel = Panel(
        Axis("processes: workers and servers", counts),
        Axis(f"time to target ({unit})", far=far_apart(time.median for _, time in timed)),
        tuple(lines),
        level=(alone.median / scale, "") if alone else None,
    )
    caption = (
        "What more processes (workers and servers) buy: lower is sooner, further left is cheaper, as in the trade-off"
        " figure of Dean et al. (2012)."
    )
    return [Picture("processes", "processes against time to the target", caption, (panel,))]


def unlike(comparison: Comparison) -> list[str]:
    """Why the speed-ups are not those of ever more workers of one kind, which the laws are about, in sentences."""
    found: list[str] = []
    several, cores = comparison.threads, comparison.shared_cores
    one = several.pop(1, set())
    if one and any(own != one for own in several.values()):
        others = ", ".join(f"each of {workers} workers {_range(own)}" for workers, own in several.items())
        found.append(
            f"Not like with like: one worker had {_range(one)} thread{'' if one == {1} else 's'}, {others}; --threads 1"
            " compares like with like"
        )
    most = max((entry.workers for entry in comparison.entries if entry.speed), default=0)
    if cores is not None and several and most > cores:
        shared = f"{cores} core{'s' if cores > 1 else ''}"
        found.append(f"{most} workers shared {shared}: with more than {cores}, none can be as fast as the first")
    return found


def _range(counts: set[int]) -> str:
    return str(min(counts)) if len(counts) == 1 else f"{min(counts)} to {max(counts)}"


def _says(known: Sequence[ScalingCurve], *, doubted: bool) -> tuple[str, ...]:
    """What the laws say of each strategy, and how far to trust them."""
    found = []
    if doubted:
        found.append("So the laws, below, tell about this machine, not how much of the work is serial")
    for one in known:
        if one.amdahl is None or one.gunther is None:
            continue
        amdahl = "by Amdahl's law, taken at its word, " if doubted else "by Amdahl's law, "
        gunther = f"; by Gunther's, {one.gunther.says()}" if one.gunther.settling > 0 else ""
        found.append(f"{one.strategy}: {amdahl}{one.amdahl.says()}{gunther}")
    if any(len(one.counts) == 2 for one in known):
        found.append("Two worker counts are few to tell a law by: a third would show whether it holds")
    return tuple(found)
