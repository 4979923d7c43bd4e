"""Which pictures a comparison has, in the order in which they are looked at, and their files.

A picture without data is left out.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from pathlib import Path

from hocket.errors import UsageError
from hocket.lab.compare import amounts, comparison_folder, drawing, metric_pictures, scaling_pictures, summary
from hocket.lab.compare.looks import PARTS, Looks, short
from hocket.lab.compare.picture import Axis, Bar, Panel, Picture, PlottedLine, Segment, far_apart, unit_of_seconds
from hocket.lab.compare.results import Comparison, Contender, Spread

_FEW = 6  # panels of staleness that may be large
_HEAD = 1024  # bytes of a PNG in which it says what made it
Make = Callable[[Comparison, Looks], list[Picture]]
Text = Callable[[Spread], str]


def pictures(comparison: Comparison) -> list[Picture]:
    """All that there is something to show of."""
    looks = Looks(comparison)
    lines = _made("metrics", metric_pictures.pictures, comparison, looks)
    target = comparison.target
    first = 2 if target and target.metric in comparison.metrics else 0
    return [
        *_made("time", _times, comparison, looks),
        *lines[:first],
        *_made("shares", _shares, comparison, looks),
        *_made("sent", _sent, comparison, looks),
        *_made("workers", scaling_pictures.pictures, comparison, looks),
        *_made("staleness", _staleness, comparison, looks),
        *_made("noise-scale", _noise, comparison, looks),
        *lines[first:],
    ]


def write(comparison: Comparison, folder: Path) -> list[Path]:
    """Writes all pictures of ``comparison`` as PNG files into ``folder``, which is made if it is not there.

    Those of an earlier report that are no more are removed.

    Raises:
        UsageError: matplotlib is missing, the folder cannot be written to, or a picture could not be drawn, which is
            then not there while all others are.
    """
    drawing.check()
    paths, undrawn = [], []
    try:
        folder.mkdir(parents=True, exist_ok=True)
        for picture in pictures(comparison):
            try:
                content = drawing.png(picture)
            except Exception as error:  # whatever it is, the others are still worth having
                undrawn.append(drawing.why_not(picture, error))
                continue
            paths.append(folder / f"{picture.name}.png")
            comparison_folder.replace_file(paths[-1], content)
        for old in set(folder.glob("*.png")) - set(paths):
            if _is_ours(old):
                old.unlink()
    except OSError as error:
        raise UsageError(f"cannot write plots to {folder}: {error.strerror or error}; name another folder") from error
    if undrawn:
        raise UsageError(f"{'; '.join(undrawn)}; all others are in {folder}")
    return paths


def _is_ours(path: Path) -> bool:
    """What else lies in the folder stays."""
    if not path.is_file():
        return False
    with path.open("rb") as file:
        return f"Software\0{drawing.SOFTWARE}".encode() in file.read(_HEAD)


def _made(name: str, make: Make, comparison: Comparison, looks: Looks) -> list[Picture]:
    """What ``make`` makes; where it fails, a picture that tells so when it is to be drawn, beside all others."""
    try:
        return make(comparison, looks)
    except Exception as error:
        return [Picture(name, name, failure=error)]


def _bars(
    label: str, entries: Sequence[Contender], looks: Looks, values: Sequence[Spread | None], text: Text,
    missing: Sequence[str], unit: float = 1.0,
) -> Panel:  # fmt: skip
    """A row for each contender: the median with whiskers and its ``text``, or why it is missing."""
    bars = []
    for entry, value, why in zip(entries, values, missing, strict=True):
        look, name = looks.of(entry), short(entry.name, 49)
        if value is None:
            bars.append(Bar(name, text=why))
        else:
            part, scaled = Segment(value.median / unit, look.tone, look.hatch), value.over(unit)
            bars.append(Bar(name, (part,), text(value), scaled.lowest, scaled.highest))
    far = far_apart(each for bar in bars if bar.parts for each in (bar.lowest, bar.highest))
    return Panel(Axis(label, far=far), bars=tuple(bars))


def _times(comparison: Comparison, looks: Looks) -> list[Picture]:
    """What was fastest, by the best that is known: time to the target, samples a second, or time alone."""
    if any(entry.time_to_target for entry in comparison.entries):
        return _time_to_target(comparison, looks)
    entries = comparison.entries
    why = ["failed" if entry.failure else "not known" if entry.good else "no run yet" for entry in entries]
    if any(entry.speed for entry in entries):
        speeds = [entry.speed for entry in entries]
        panel = _bars("samples a second", entries, looks, speeds, _against_one(comparison, speeds, amounts.plain), why)
        caption = "Longer is faster; this says nothing about how much is learned from a sample."
        return [Picture("throughput", "samples a second, of all workers", caption, (panel,))]
    times = [summary.whole_time(entry) for entry in entries]
    if not any(times):
        return []
    unit, name = _unit(times)
    text = _against_one(comparison, times, amounts.seconds, falls=True)
    caption = "Shorter is faster, if each run did the same work; × is how many times as fast as one worker."
    panel = _bars(f"time ({name})", entries, looks, times, text, why, unit)
    return [Picture("time", "time of the whole run", caption, (panel,))]


def _time_to_target(comparison: Comparison, looks: Looks) -> list[Picture]:
    target, entries = comparison.target, comparison.entries
    goal = f"{amounts.line(target.metric)} {amounts.given(target.value)}" if target else "the target"
    times = [entry.time_to_target for entry in entries]
    unit, name = _unit(times)
    why = ["failed" if entry.failure else "not reached" if entry.good else "no run yet" for entry in entries]
    text = _against_one(comparison, times, amounts.seconds, falls=True)
    caption = (
        "Shorter is better; whiskers reach from the fastest repeat to the slowest, × is how many times as fast as one"
        " worker."
    )
    panel = _bars(f"time ({name})", entries, looks, times, text, why, unit)
    found = [Picture("time-to-target", f"time to {goal}", caption, (panel,))]
    each = [_around(entry.seconds_per_pass, [r.seconds_per_pass for r in entry.reached]) for entry in entries]
    passes = [_around(entry.passes, [r.passes for r in entry.reached]) for entry in entries]
    if any(each):
        unit, name = _unit(each)
        nothing = ["–"] * len(entries)
        one = _bars(f"one pass ({name})", entries, looks, each, lambda s: amounts.seconds(s.median), nothing, unit)
        count = _bars(
            "passes over the data", entries, looks, passes, lambda s: amounts.plain(s.median, zeros=True), nothing
        )
        caption = (
            "Which of the two a strategy improves: left, how fast it goes through the data; right, how often it has to."
        )
        found.append(Picture("passes", "time per pass × passes", caption, (one, count), columns=2))
    return found


def _against_one(
    comparison: Comparison, values: Sequence[Spread | None], text: Callable[[float], str], *, falls: bool = False
) -> Text:
    """What is written after a bar: the value, and how many times as fast as one worker that is."""
    one = values[0] if comparison.baseline is comparison.entries[0] else None  # one worker is the first

    def said(spread: Spread) -> str:
        if one is None or spread is one or not (one.median and spread.median):
            return text(spread.median)
        times = one.median / spread.median if falls else spread.median / one.median
        return f"{text(spread.median)}, {amounts.times(times)}"

    return said


def _unit(spreads: Sequence[Spread | None]) -> tuple[float, str]:
    return unit_of_seconds(value for spread in spreads if spread for value in (spread.lowest, spread.highest))


def _around(value: float | None, others: Sequence[float | None]) -> Spread | None:
    spread = Spread.of(others)
    return Spread(value, spread.lowest, spread.highest) if spread and value is not None else None


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
            why, text = ["not known"] * len(entries), lambda spread: amounts.size(spread.median)
            panels.append(_bars(f"{label} ({name})", entries, looks, spreads, text, why, unit))
    until = " until the target" if comparison.target else ""
    caption = f"What all workers handed to exchanges{until}: what a slow network would have to carry."
    if any(summary.shares_memory(entry) for entry in entries):
        caption += (
            " 0 B: the workers of that strategy hand nothing over, but read and write the same shared memory, which a"
            " network has not."
        )
    return [Picture("sent", "bytes sent", caption, tuple(panels), columns=len(panels))]


def _noise(comparison: Comparison, looks: Looks) -> list[Picture]:
    found = [(entry, spread) for entry in comparison.entries if (spread := noise_scale(entry))]
    if not found:
        return []
    caption = (
        "The batch, of all workers together, up to which more samples make a step better nearly in proportion"
        " (McCandlish et al. 2018); beyond it, more workers help less and less."
    )
    entries, spreads = zip(*found, strict=True)
    panel = _bars("batch (samples)", entries, looks, spreads, lambda s: amounts.plain(s.median), [""] * len(found))
    return [Picture("noise-scale", "gradient noise scale", caption, (panel,))]


def noise_scale(entry: Contender) -> Spread | None:
    """Samples; None where none was measured."""
    values = [result.gradients.get("noise scale") for result in entry.good]
    return Spread.of([float(v) for v in values if isinstance(v, (int, float)) and math.isfinite(v) and v > 0])


def _shares(comparison: Comparison, _: Looks) -> list[Picture]:
    bars = tuple(
        Bar(
            f"{short(entry.name, 30)}: {summary.shares(entry)}",
            tuple(Segment(100 * entry.shares.get(part, 0.0), part, hatch, part) for part, hatch in PARTS.items()),
        )
        for entry in comparison.entries
        if entry.shares
    )
    caption = (
        "Where the time of all workers goes: much waiting says that some are slower than others, much communication"
        " that exchanges are too large or too many."
    )
    panel = Panel(Axis("share of the training time (%)", most=100), bars=bars)
    return [Picture("shares", "compute, communication and waiting", caption, (panel,))] if bars else []


def _staleness(comparison: Comparison, looks: Looks) -> list[Picture]:
    entries = [entry for entry in comparison.entries if any(entry.staleness.values()) and entry.workers > 1]
    few, panels = len(entries) <= _FEW, []
    for number, entry in enumerate(entries):
        total = sum(entry.staleness.values())
        mean = sum(value * count for value, count in entry.staleness.items()) / total
        look, points = looks.of(entry), [(value, 100 * count / total) for value, count in entry.staleness.items()]
        panels.append(
            Panel(
                Axis("staleness (updates between pull and push)", zero=False, count=8),
                Axis("pushes (%)", count=3 if few else 2),
                (PlottedLine(points, look.tone, columns=look.hatch, name=f"bar-{number}"),),
                title=f"{short(entry.name, 34)}: mean {amounts.plain(mean, 2)}",
            )
        )
    caption = "How many updates of others were made to the parameters while a worker computed its gradient from them."
    height = 60 + (115 if few else 80) * len(entries)
    return [Picture("staleness", "staleness of pushes", caption, tuple(panels), height=height)] if panels else []
