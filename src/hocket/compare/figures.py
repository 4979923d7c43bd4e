"""Which pictures a comparison has, in the order in which they are looked at; one without data is left out."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import TYPE_CHECKING

from hocket.compare import amounts, axes, bars, curves, summary, times, workers
from hocket.compare.bars import Panel
from hocket.compare.canvas import Colours, Picture
from hocket.compare.results import Comparison, Entry, Spread
from hocket.compare.style import PARTS, Looks, short

if TYPE_CHECKING:
    from matplotlib.figure import Figure


_FEW = 6  # panels of staleness that may be large
Make = Callable[[Comparison, Looks], list[Picture]]


def pictures(comparison: Comparison) -> list[Picture]:
    """All that there is something to show of."""
    looks = Looks(comparison)
    lines = _made("metrics", curves.pictures, comparison, looks)
    target = comparison.target
    first = 2 if target and target.metric in comparison.metrics else 0
    return [
        *_made("time", times.pictures, comparison, looks),
        *lines[:first],
        *_made("shares", _shares, comparison, looks),
        *_made("sent", _sent, comparison, looks),
        *_made("workers", workers.pictures, comparison, looks),
        *_made("staleness", _staleness, comparison, looks),
        *_made("noise-scale", _noise, comparison, looks),
        *lines[first:],
    ]


def _made(name: str, make: Make, comparison: Comparison, looks: Looks) -> list[Picture]:
    """What ``make`` makes; where it fails, a picture that tells so when it is to be drawn, beside all others."""
    try:
        return make(comparison, looks)
    except Exception as error:
        cause = error

        def draw(figure: Figure, colours: Colours) -> None:
            raise cause

        return [Picture(name, name, "", 0, draw)]


def _sent(comparison: Comparison, looks: Looks) -> list[Picture]:
    entries = [entry for entry in comparison.entries if entry.good]
    sent = [entry.sent if summary.knows_sent(entry) else None for entry in entries]
    each = [entry.sent_per_sample if summary.knows_sent(entry) else None for entry in entries]
    if not any(spread and spread.highest for spread in sent):
        return []
    panels = []
    for label, spreads in (("sent", sent), ("sent per sample", each)):
        if any(spreads):
            unit, name = amounts.unit_of_bytes(max(spread.highest for spread in spreads if spread))
            panels.append(Panel(f"{label} ({name})", spreads, _size, ["not known"] * len(entries), unit))
    until = " until the target" if comparison.target else ""
    caption = f"What all workers handed to exchanges{until}: what a slow network would have to carry."
    if any(summary.shares_memory(entry) for entry in entries):
        caption += (
            " 0 B: the workers of that strategy hand nothing over, but read and write the same shared memory, which a"
            " network has not."
        )
    return [bars.picture("sent", "bytes sent", caption, entries, looks, panels)]


def _size(spread: Spread) -> str:
    return amounts.size(spread.median)


def _noise(comparison: Comparison, looks: Looks) -> list[Picture]:
    found = [(entry, spread) for entry in comparison.entries if (spread := noise_scale(entry))]
    if not found:
        return []
    caption = (
        "The batch, of all workers together, up to which more samples make a step better nearly in proportion"
        " (McCandlish et al. 2018); beyond it, more workers help less and less."
    )
    entries = [entry for entry, _ in found]
    panel = Panel(
        "batch (samples)", [spread for _, spread in found], lambda s: amounts.plain(s.median), [""] * len(found)
    )
    return [bars.picture("noise-scale", "gradient noise scale", caption, entries, looks, [panel])]


def noise_scale(entry: Entry) -> Spread | None:
    """Samples; None where none was measured."""
    values = [result.gradients.get("noise scale") for result in entry.good]
    return Spread.of([float(v) for v in values if isinstance(v, (int, float)) and math.isfinite(v) and v > 0])


def _shares(comparison: Comparison, _: Looks) -> list[Picture]:
    entries = [entry for entry in comparison.entries if entry.shares]
    if not entries:
        return []

    def draw(figure: Figure, colours: Colours) -> None:
        plot = figure.add_subplot()
        for part, hatch in PARTS.items():
            lefts = [
                100 * sum(entry.shares.get(other, 0.0) for other in list(PARTS)[: list(PARTS).index(part)])
                for entry in entries
            ]
            plot.barh(
                range(len(entries)),
                [100 * entry.shares.get(part, 0.0) for entry in entries],
                left=lefts,
                height=0.42,
                color=colours[part],
                edgecolor=colours["ink"],
                linewidth=0.6,
                hatch=hatch,
                label=part,
            )
        for row, entry in enumerate(entries):
            text = summary.shares(entry)
            plot.annotate(short(entry.name, 30), (0, row - 0.28), va="bottom")
            plot.annotate(text, (100, row - 0.28), va="bottom", ha="right")
        bars.frame(plot, len(entries))
        plot.set_xlim(0, 100)
        plot.set_xlabel("share of the training time (%)")
        axes.legend(figure, plot)

    height = bars.height(len(entries)) + axes.legend_height(PARTS)
    caption = (
        "Where the time of all workers goes: much waiting says that some are slower than others, much communication"
        " that exchanges are too large or too many."
    )
    return [Picture("shares", "compute, communication and waiting", caption, height, draw)]


def _staleness(comparison: Comparison, looks: Looks) -> list[Picture]:
    entries = [entry for entry in comparison.entries if any(entry.staleness.values()) and entry.workers > 1]
    if not entries:
        return []

    def draw(figure: Figure, colours: Colours) -> None:
        plots = figure.subplots(len(entries), 1, sharex=True, sharey=True, squeeze=False)
        for number, entry in enumerate(entries):
            plot = plots[number][0]
            total = sum(entry.staleness.values())
            heights = [100 * count / total for count in entry.staleness.values()]
            mean = sum(value * count for value, count in entry.staleness.items()) / total
            look = looks.of(entry)
            drawn = plot.bar(
                list(entry.staleness),
                heights,
                width=0.8,
                facecolor=colours[look.tone],
                hatch=look.hatch,
                edgecolor=colours["paper"],
                linewidth=0,
            )
            for staleness, patch in zip(entry.staleness, drawn.patches, strict=True):
                patch.set_gid(f"bar-{number}-{staleness}")
            plot.set_title(f"{short(entry.name, 34)}: mean {amounts.plain(mean, 2)}", loc="left")
            plot.grid(False, axis="x")
            plot.set_ylim(bottom=0)
            axes.numbers(plot.yaxis, ticks=3 if len(entries) <= _FEW else 2)
        axes.numbers(plots[-1][0].xaxis, whole=True, ticks=8)
        figure.supylabel("pushes (%)", fontsize=plots[-1][0].xaxis.label.get_fontsize())
        plots[-1][0].set_xlabel("staleness (updates between pull and push)")

    caption = "How many updates of others were made to the parameters while a worker computed its gradient from them."
    return [
        Picture(
            "staleness", "staleness of pushes", caption, 60 + (115 if len(entries) <= _FEW else 80) * len(entries), draw
        )
    ]
