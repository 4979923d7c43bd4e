"""What the gradients of a run say about its batch size: noise scale and diversity, from what workers added up.

The estimators are those of McCandlish et al. 2018 (appendix A.1), with one worker's share of a step as the small batch
and the whole step as the large one; docs/noise.md derives them.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from hocket.events import Gradients

_LEAST_LOOKS, _LEAST_BLOCKS = 8, 4  # fewer looks or blocks give no estimate
_SURE = 2.0  # standard errors of the bounds
_WINDOWS = 8  # parts of a run whose noise scales are kept


class Block(NamedTuple):
    """Some steps: means over looks and ranks, relative to |g|² thereabouts, so that all steps count alike.

    A loss scale cancels in this, and gradients that become small do not count less than those of the first steps.
    What they are divided by is the mean over this block and its neighbours: a single look should not weigh itself.
    """

    end: int  # the last step of the block
    looks: float
    share: float  # one worker's part of a step
    scatter: float  # variance of one sample's gradient, over all parameters
    signal: float  # |G|² of the true gradient
    own: float  # |g|²
    average: float  # |G|² of the average


@dataclass(frozen=True)
class Estimate:
    """The noise scale, and how sure it is.

    Attributes:
        scale: The noise scale; None if it is unknown.
        low: Two standard errors below the scale; if that is unknown, a lower bound.
        high: Two standard errors above the scale; infinite if unknown.
    """

    scale: float | None
    low: float
    high: float


class GradientSummary:
    """The gradients of one run; if it has several models, those of the largest that all ranks have told about."""

    def __init__(self) -> None:
        self._last: dict[int, dict[int, Gradients]] = {}  # the last record of each model and rank

    def take(self, rank: int, record: Gradients) -> None:
        """Take a record of a worker, which replaces the one before, and those of a time with other workers."""
        before = self._last.get(record.number, {})
        self._last[record.number] = {r: told for r, told in before.items() if told.workers == record.workers}
        self._last[record.number][rank] = record

    def facts(self) -> dict[str, Any]:
        """Facts for the record; empty if no strategy has seen gradients of several workers."""
        told = self._choose()
        if not told:
            return {}
        blocks, one = combine(told), told[0]
        looks = sum(block.looks for block in blocks)
        found: dict[str, Any] = {"noise scale": None}
        if looks and (len(blocks) < _LEAST_BLOCKS or looks < _LEAST_LOOKS):
            blocks = []
        if not blocks:
            says = f"only {looks:.0f} of {one.steps} steps were looked at, too few to tell a noise scale"
            return found | {"measured steps": round(looks), "steps": one.steps, "says": says}
        estimate = estimate_scale(blocks)
        share = sum(b.looks * b.share for b in blocks) / looks
        own, average = sum(b.looks * b.own for b in blocks), sum(b.looks * b.average for b in blocks)
        diversity = own / (one.workers * average) if average else None
        last = estimate_scale(blocks[-max(_LEAST_BLOCKS, len(blocks) // 4) :])
        return {
            "noise scale": estimate.scale,
            "noise scale, low": estimate.low,
            "noise scale, high": estimate.high if math.isfinite(estimate.high) else None,
            "noise scale at the end": last.scale,
            "unit": "samples" if one.knows_samples else "batches of a worker",
            "diversity": diversity,
            "samples in a step": share * one.workers if one.knows_samples else None,
            "measured steps": round(looks),
            "steps": one.steps,
            "says": say(estimate, share, one.workers, samples=one.knows_samples),
        }

    def windows(self) -> dict[str, float | None]:
        """The noise scale of each part of the run, by its last step."""
        told = self._choose()
        blocks = combine(told) if told else []
        size = max(_LEAST_BLOCKS, -(-len(blocks) // _WINDOWS))
        parts = [blocks[i : i + size] for i in range(0, len(blocks), size)]
        return {str(part[-1].end): estimate_scale(part).scale for part in parts if len(part) >= _LEAST_BLOCKS}

    def lines(self) -> list[str]:
        """The lines that are printed at the end of a run."""
        facts, told = self.facts(), self._choose()
        if facts.get("diversity") is None:
            return []
        workers = told[0].workers
        return [
            f"hocket: {facts['says']}.",
            f"hocket: gradient diversity of the workers {facts['diversity']:.2f} ({1 / workers:.2g}: all gradients are "
            f"the same, 1: at right angles), from {facts['measured steps']:,} of {facts['steps']:,} steps",
        ]

    def _choose(self) -> list[Gradients]:
        complete = [
            list(told.values()) for told in self._last.values() if len(told) == next(iter(told.values())).workers
        ]
        return max(complete, key=lambda told: (told[0].parameters, told[0].steps), default=[])


def combine(told: Sequence[Gradients]) -> list[Block]:
    """Put ranks together, block by block; blocks in which one of them has not looked are left out."""
    length, workers = max(record.length for record in told), told[0].workers
    by_rank: list[dict[int, list[float]]] = []
    for record in told:
        sums: dict[int, list[float]] = {}
        for number, values in record.blocks.items():
            wide = int(number) * record.length // length
            sums[wide] = [a + b for a, b in zip(sums.get(wide, [0.0] * len(values)), values, strict=True)]
        by_rank.append(sums)
    blocks = []
    for place in sorted(set.intersection(*(set(sums) for sums in by_rank))):
        looks = sum(sums[place][0] for sums in by_rank) / workers
        means = [[value / sums[place][0] for value in sums[place]] for sums in by_rank]
        _, share, own, average, own_share, average_share = (
            sum(column) / workers for column in zip(*means, strict=True)
        )
        scatter = (own_share - average_share) * workers / (workers - 1)
        signal = (workers * average - own) / (workers - 1)
        blocks.append(Block((place + 1) * length, looks, share, scatter, signal, own, average))
    return _level(blocks)


def _level(blocks: list[Block]) -> list[Block]:
    found = []
    for i, block in enumerate(blocks):
        near = [other.own for other in blocks[max(0, i - 1) : i + 2]]
        size = sum(near) / len(near)
        if size > 0:
            values = (block.scatter / size, block.signal / size, block.own / size, block.average / size)
            found.append(Block(*block[:3], *values))
    return found


def estimate_scale(blocks: Sequence[Block]) -> Estimate:
    """Scatter over signal, each averaged by itself; its error by leaving out one block after the other."""
    count, looks = len(blocks), sum(block.looks for block in blocks)
    scatters, signals = ([b.looks * b[i] for b in blocks] for i in (3, 4))
    scatter, signal = sum(scatters), sum(signals)
    rest = [(scatter - s, signal - g, looks - b.looks) for s, g, b in zip(scatters, signals, blocks, strict=True)]
    error = _error([g / n for _, g, n in rest]) * looks if count > 1 else math.inf
    if signal - _SURE * error <= 0 or scatter <= 0 or any(g <= 0 for _, g, _ in rest):
        ceiling = signal + _SURE * error
        least = scatter / ceiling if ceiling > 0 and scatter > 0 else 0.0
        return Estimate(None, least, math.inf)
    spread = _SURE * _error([s / g for s, g, _ in rest])
    scale = scatter / signal
    return Estimate(scale, max(0.0, scale - spread), scale + spread)


def _error(left_out: Sequence[float]) -> float:
    """The standard error by the jackknife."""
    count = len(left_out)
    mean = sum(left_out) / count
    return math.sqrt((count - 1) / count * sum((value - mean) ** 2 for value in left_out))


def say(estimate: Estimate, share: float, workers: int, *, samples: bool) -> str:
    """One sentence for a person: up to which batch size more workers help.

    Args:
        estimate: The noise scale.
        share: What one worker contributes to a step, in the same unit.
        workers: How many there were.
        samples: Whether that unit is samples, or else batches of a worker.
    """
    unit, each = ("samples", f" with {share:,.0f} samples each") if samples else ("batches of a worker", "")
    step, scale = share * workers, estimate.scale
    has = f"a step has {step:,.0f}"
    if scale is None:
        if estimate.low <= 0:
            return f"the noise scale of the gradients cannot be told ({has} {unit})"
        words = f"gradient noise scale above {number(estimate.low)} {unit} ({has}), more cannot be told"
        if estimate.low > step:
            words += f": more workers help, up to {number(estimate.low / share)}{each} at least"
        return words
    words = (
        f"gradient noise scale about {number(scale)} {unit} ({number(estimate.low)} to {number(estimate.high)}; {has})"
    )
    double = (1 + scale / (2 * step)) / (1 + scale / step)
    if scale > step:
        return (
            f"{words}: more workers help, up to about {number(scale / share)}{each}; twice as many would need "
            f"about {double:.0%} of the steps"
        )
    half = (1 + 2 * scale / step) / (1 + scale / step)
    return (
        f"{words}: more workers help little, twice as many would still need about {double:.0%} of the steps; half as "
        f"many would need about {half - 1:.0%} more steps"
    )


def number(value: float) -> str:
    """A whole number of which two digits matter, or the one before and after the point."""
    if value < 10:
        return f"{value:.1f}".removesuffix(".0")
    return f"{round(value, 1 - math.floor(math.log10(value))):,.0f}"
