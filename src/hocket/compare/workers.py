"""Pictures of how many workers are worth it: speed-up, efficiency and the laws, and DistBelief's trade-off."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from hocket.compare import axes, scaling
from hocket.compare.canvas import Colours, Picture
from hocket.compare.results import Comparison, Entry, Spread
from hocket.compare.style import BASELINE, Looks, short

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

_CURVE = 60  # points of a fitted law
_TITLE = 23  # letters above a panel that has another one beside it


@dataclass(frozen=True)
class Scaling:
    """One strategy on several worker counts.

    Attributes:
        strategy: Its name.
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


def scalings(comparison: Comparison) -> list[Scaling]:
    """Of samples a second; of each strategy that ran on two worker counts or more besides one worker."""
    baseline = comparison.baseline.speed if comparison.baseline else None
    found = []
    for strategy in dict.fromkeys(entry.strategy for entry in comparison.entries if entry.workers > 1):
        entries = [entry for entry in comparison.entries if entry.strategy == strategy and entry.workers > 1]
        known = [(entry, speed) for entry in entries if (speed := entry.speed)]
        if not baseline or not baseline.median or len(known) < 2:
            continue
        one = baseline.median
        points = [(entry.workers, run.speed / one) for entry, _ in known for run in entry.good if run.speed]
        spreads = tuple(Spread(s.median / one, s.lowest / one, s.highest / one) for _, s in known)
        counts = tuple(entry.workers for entry, _ in known)
        found.append(Scaling(strategy, counts, spreads, scaling.amdahl(points), scaling.gunther(points)))
    return found


def pictures(comparison: Comparison, looks: Looks) -> list[Picture]:
    """Speed-up and efficiency where there are several worker counts, and the trade-off where there is a target."""
    found, known = [], scalings(comparison)
    if known:
        found.append(
            Picture(
                "speed-up",
                "speed-up against workers",
                "Samples a second over those of one worker: on the thin line each worker would add as much as the"
                " first. The laws are fitted to all repeats.",
                110 + 140 * math.ceil(len(known) / _columns(known)) if len(known) > 1 else 310,
                lambda figure, colours: _speed_up(figure, colours, known, looks),
                leads=True,
            )
        )
        found.append(
            Picture(
                "efficiency",
                "efficiency against workers",
                "Speed-up for each worker: 100 % means that nothing is lost by working together.",
                250 + axes.legend_height(["ideal", *(short(one.strategy, 40) for one in known)]),
                lambda figure, colours: _efficiency(figure, colours, known, looks),
                (*unlike(comparison), *_says(known, doubted=bool(unlike(comparison)))),
            )
        )
    timed = [entry for entry in comparison.entries if entry.time_to_target]
    if len({entry.workers + entry.servers for entry in timed}) > 1:
        labels = {"one worker" if entry.workers == 1 else short(entry.strategy, 40) for entry in timed}
        found.append(
            Picture(
                "processes",
                "processes against time to the target",
                "What more processes (workers and servers) buy: lower is sooner, further left is cheaper, as in the"
                " trade-off figure of Dean et al. (2012).",
                250 + axes.legend_height(labels),
                lambda figure, colours: _trade_off(figure, colours, timed, looks),
            )
        )
    return found


def unlike(comparison: Comparison) -> list[str]:
    """Why the speed-ups are not those of ever more workers of one kind, which the laws are about, in sentences."""
    found: list[str] = []
    threads: dict[int, set[int]] = {}
    for entry in comparison.entries:
        told = [result.told for result in entry.good if result.told.get("device", "cpu") == "cpu"]
        for each in told:
            if isinstance(count := each.get("threads"), int):
                threads.setdefault(entry.workers, set()).add(count)
    one, several = threads.pop(1, set()), dict(sorted(threads.items()))
    if one and any(own != one for own in several.values()):
        others = ", ".join(f"each of {workers} workers {_range(own)}" for workers, own in several.items())
        found.append(
            f"Not like with like: one worker had {_range(one)} thread{'' if one == {1} else 's'}, {others}; --threads 1"
            " compares like with like"
        )
    cores, network = comparison.about.get("cores", ""), comparison.about.get("network", "one host")
    most = max((entry.workers for entry in comparison.entries if entry.speed), default=0)
    is_here = network == "one host" or " of a rig" in network  # whose hosts share the cores of this machine
    if is_here and cores.isdecimal() and several and most > int(cores):
        shared = f"{cores} core{'s' if int(cores) > 1 else ''}"
        found.append(f"{most} workers shared {shared}: with more than {cores}, none can be as fast as the first")
    return found


def _range(counts: set[int]) -> str:
    return str(min(counts)) if len(counts) == 1 else f"{min(counts)} to {max(counts)}"


def _says(known: Sequence[Scaling], *, doubted: bool) -> tuple[str, ...]:
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


def _speed_up(figure: Figure, colours: Colours, known: Sequence[Scaling], looks: Looks) -> None:
    columns = _columns(known)
    rows = math.ceil(len(known) / columns)
    plots = figure.subplots(rows, columns, sharex=True, sharey=True, squeeze=False)
    most = max(max(one.counts) for one in known)
    highest = max(spread.highest for one in known for spread in one.speed_ups)
    for number, one in enumerate(known):
        plot: Axes = plots[number // columns][number % columns]
        xs = [1 + (most - 1) * step / _CURVE for step in range(_CURVE + 1)]
        plot.plot(xs, xs, color=colours["soft"], lw=1, label="ideal")
        # Where the two are the same, both are still seen: a broad pale line below, a thin one with gaps on it.
        if one.gunther is not None:
            ys = [one.gunther.speed_up(x) for x in xs]
            pale = colours[looks.of_strategy(one.strategy).tone]
            plot.plot(xs, ys, color=pale, alpha=0.4, lw=5, label="Gunther's law", gid=f"gunther-{number}")
        if one.amdahl is not None:
            ys = [one.amdahl.speed_up(x) for x in xs]
            plot.plot(
                xs, ys, color=colours["ink"], lw=1.2, ls=(0, (5, 2)), label="Amdahl's law", gid=f"amdahl-{number}"
            )
        _points(plot, colours, looks, one, list(one.speed_ups), 1.0, joined=False, label="measured", ids=number)
        plot.set_title(short(one.strategy, _TITLE if columns > 1 else 46), loc="left")
        axes.worker_counts(plot, [1, *(count for each in known for count in each.counts)], gap=0.14)
        plot.set_ylim(0, max(highest * 1.1, min(most, highest * 1.4)))
        axes.numbers(plot.yaxis, ticks=4)
        plot.xaxis.set_tick_params(labelbottom=number + columns >= len(known))
        if number // columns == rows - 1:
            plot.set_xlabel("workers")
        if number % columns == 0:
            plot.set_ylabel("speed-up (×)")
    for number in range(len(known), rows * columns):
        plots[number // columns][number % columns].set_visible(False)
    axes.legend(figure, plots[0][0])


def _columns(known: Sequence[Scaling]) -> int:
    """Long names need the whole width."""
    return 2 if len(known) > 1 and max(len(one.strategy) for one in known) <= _TITLE else 1


def _efficiency(figure: Figure, colours: Colours, known: Sequence[Scaling], looks: Looks) -> None:
    plot = figure.add_subplot()
    plot.axhline(100, color=colours["soft"], lw=1, label="ideal")
    for number, one in enumerate(known):
        spreads = [
            Spread(100 * s.median / count, 100 * s.lowest / count, 100 * s.highest / count)
            for s, count in zip(one.speed_ups, one.counts, strict=True)
        ]
        _points(plot, colours, looks, one, spreads, 100.0, joined=True, label=short(one.strategy, 40), ids=number)
    axes.worker_counts(plot, [1, *(count for one in known for count in one.counts)])
    plot.set_ylim(0, max(105.0, plot.get_ylim()[1]))
    axes.numbers(plot.yaxis)
    plot.set_xlabel("workers")
    plot.set_ylabel("efficiency (%)")
    axes.legend(figure, plot)


def _points(
    plot: Axes,
    colours: Colours,
    looks: Looks,
    one: Scaling,
    spreads: list[Spread],
    at_one: float,
    joined: bool,
    label: str,
    ids: int,
) -> None:
    look = looks.of_strategy(one.strategy)
    medians = [at_one, *(spread.median for spread in spreads)]
    below = [0.0, *(spread.median - spread.lowest for spread in spreads)]
    above = [0.0, *(spread.highest - spread.median for spread in spreads)]
    drawn = plot.errorbar(
        [1, *one.counts],
        medians,
        yerr=[below, above],
        color=colours[look.tone],
        marker=look.marker,
        ls="-" if joined else "none",
        ms=5,
        capsize=3,
        elinewidth=1.2,
        label=label,
        zorder=3,
    )
    if joined and look.dashes:
        drawn.lines[0].set_dashes(look.dashes)
    drawn.lines[0].set_gid(f"points-{ids}")


def _trade_off(figure: Figure, colours: Colours, timed: Sequence[Entry], looks: Looks) -> None:
    plot = figure.add_subplot()
    times = [(entry, spread) for entry in timed if (spread := entry.time_to_target)]
    scale, unit = axes.unit_of_seconds(value for _, spread in times for value in (spread.lowest, spread.highest))
    for strategy in dict.fromkeys("" if entry.workers == 1 else entry.strategy for entry in timed):
        look = looks.of_strategy(strategy) if strategy else BASELINE
        own = [(e, s) for e, s in times if (e.workers == 1) == (not strategy) and strategy in ("", e.strategy)]
        medians = [spread.median / scale for _, spread in own]
        drawn = plot.errorbar(
            [entry.workers + entry.servers for entry, _ in own],
            medians,
            yerr=[
                [(spread.median - spread.lowest) / scale for _, spread in own],
                [(spread.highest - spread.median) / scale for _, spread in own],
            ],
            color=colours[look.tone],
            marker=look.marker,
            ms=5.5,
            capsize=3,
            elinewidth=1.2,
            label=short(strategy, 40) or "one worker",
        )
        if look.dashes:
            drawn.lines[0].set_dashes(look.dashes)
        if not strategy:
            plot.axhline(medians[0], color=colours["ink"], lw=0.8, ls=(0, (4, 3)))
    axes.worker_counts(plot, [entry.workers + entry.servers for entry, _ in times])
    far = axes.far_apart(spread.median for _, spread in times)
    if far:
        plot.set_yscale("log")
    else:
        plot.set_ylim(bottom=0)
    axes.numbers(plot.yaxis, far)
    plot.set_xlabel("processes: workers and servers")
    plot.set_ylabel(f"time to target ({unit})")
    axes.legend(figure, plot)
