"""A comparison as a table in the terminal."""

from __future__ import annotations

import dataclasses
import functools
import sys
from typing import TYPE_CHECKING

from hocket.lab.compare import amounts, verdict
from hocket.lab.compare.results import Comparison, Contender, Spread
from hocket.lab.compare.summary import TableColumn
from hocket.observe.show import number
from hocket.observe.summaries import size

if TYPE_CHECKING:
    from rich.table import Table

_WIDTH = 100  # columns where there is no terminal
_MOST_METRICS = 2
_NAMES = (25, 16, 10)  # columns that names have at least, if they need them: the more, the better they read
_LONGEST = 24  # characters of a metric's name
_MANY = 1e7  # from here on a number of samples has an exponent


def show(found: Comparison) -> None:
    """Print the table, what failed, and the notes, to stdout."""
    from rich.console import Console

    console = Console(width=None if sys.stdout.isatty() else _WIDTH, highlight=False)
    if any(entry.good for entry in found.entries):
        made, without = fit(found, console.width)
        console.print(made)
        if without:
            console.print(f"Too narrow here for: {', '.join(without)}.", soft_wrap=True, markup=False)
    if found.entries:
        console.print(verdict.of(dataclasses.replace(found, missing=0)), soft_wrap=True, markup=False)
    for line in lines(found):
        console.print(line, soft_wrap=True, markup=False)


def fit(found: Comparison, width: int) -> tuple[Table, list[str]]:
    """The table with as many columns as there is room for, and the titles of the others; names are always there.

    Where there are several repeats, it has medians, and beneath each what the repeats differ by.
    """
    kept = columns(found)
    everything = list(kept)
    while True:
        for names in _NAMES:
            made, needs = _build(found, kept, names)
            if needs <= width:
                return made, [amounts.line(column.title) for column in everything if column not in kept]
        if len(kept) == 1:  # it is what the others are for, and wraps
            return _build(found, kept, 1)[0], [amounts.line(c.title) for c in everything if c not in kept]
        kept.remove(min(kept, key=lambda column: column.weight))


def columns(found: Comparison) -> list[TableColumn]:
    """All that there are, from left to right."""
    speed = TableColumn("samples/s", lambda entry: _speed(entry, found.baseline), weight=8)
    time = TableColumn("time", _time, weight=7)
    if found.target:
        time = TableColumn(_target_title(found), _target, weight=9)
    names = found.metrics[: 1 if found.target else _MOST_METRICS]
    metrics = [
        TableColumn(shortened(name), functools.partial(_metric, name=name), weight=6 - 4 * number)
        for number, name in enumerate(names)
    ]
    shares = TableColumn("compute/\ncomm./wait", _shares, weight=4)
    return [speed, time, *metrics, shares, TableColumn("sent", _sent, weight=3)]


def shortened(name: str) -> str:
    """The name of a metric, in one line that fits a table."""
    name = amounts.line(name)
    return name if len(name) <= _LONGEST else f"{name[: _LONGEST - 1]}…"


def _build(found: Comparison, kept: list[TableColumn], names: int) -> tuple[Table, int]:
    """The table, and how many columns of the terminal it needs."""
    from rich import box
    from rich.cells import cell_len
    from rich.table import Table
    from rich.text import Text

    good = [entry for entry in found.entries if entry.good]
    title = Text(amounts.line(_title(found)), style="italic")  # a Text is taken as it is: [ is no markup in it
    made = Table(title=title, title_justify="left", padding=(0, 1, 0, 0), box=box.SIMPLE_HEAD)
    longest = max((cell_len(_name(entry)) for entry in good), default=0)
    made.add_column("", min_width=min(names, longest), overflow="fold")
    needs = 2 + min(names, longest) + 1
    for column in kept:
        texts = [column.title, *(column.text(entry) for entry in good)]
        needs += max(cell_len(line) for text in texts for line in text.split("\n")) + 2
        made.add_column(Text(column.title), justify="right", no_wrap=names > 1, overflow="fold")
    for entry in good:
        made.add_row(Text(_name(entry)), *(Text(column.text(entry)) for column in kept))
    return made, needs


def lines(found: Comparison) -> list[str]:
    """What is said beneath the table: failures with their reasons, what is missing, and notes."""
    said = []
    for entry in found.entries:
        bad = [result for result in entry.results if result.failure]
        if bad:
            times = f" ({len(bad)} of {len(entry.results)})" if entry.good else ""
            said.append(f"{entry.name} failed{times}: {bad[0].failure}")
    if found.missing:
        said.append(
            f"{found.missing} run{'s are' if found.missing > 1 else ' is'} missing: the same command makes them."
        )
    return said + list(found.notes)


def _title(found: Comparison) -> str:
    about = [found.about[key] for key in ("cores", "cpu", "network") if found.about.get(key)]
    again = f", medians of {found.repeats} runs" if found.repeats > 1 else ""
    where = f"{about[0]} cores, {', '.join(about[1:])}" if about else ""
    return f"{' '.join([found.script, *found.arguments])}: {where}{again}"


def _target_title(found: Comparison) -> str:
    assert found.target is not None
    sign = "≥" if found.target.rises else "≤"
    return f"{shortened(found.target.metric)} {sign} {amounts.given(found.target.value)}\ns/pass × passes = s"


def _name(entry: Contender) -> str:
    more = f"{entry.servers} server{'s' if entry.servers > 1 else ''}" if entry.staleness else ""
    return f"{entry.name}, {more}" if more else entry.name


def _speed(entry: Contender, baseline: Contender | None) -> str:
    speed = entry.speed
    if speed is None:
        return "–"
    alone = baseline.speed if baseline is not None else None
    ratio = f" {speed.median / alone.median:.2f}×" if alone is not None and entry is not baseline else ""
    text = f"{speed.median:,.0f}" if 100 <= speed.median < _MANY else amounts.plain(speed.median)
    return f"{text}{ratio}{_differs(speed)}"


def _target(entry: Contender) -> str:
    took = entry.time_to_target
    if took is None:
        return "not reached"
    each, passes, missed = entry.seconds_per_pass, entry.passes, len(entry.good) - len(entry.reached)
    factors = f"{each:.2f} × {passes:.1f} = " if each is not None and passes is not None else ""
    rest = f"\n{missed} of {len(entry.good)} did not" if missed else ""
    return f"{factors}{took.median:.1f}{_differs(took)}{rest}"


def _time(entry: Contender) -> str:
    spread = Spread.of([result.seconds for result in entry.good])
    return f"{spread.median:.1f} s{_differs(spread)}" if spread is not None else "–"


def _metric(entry: Contender, name: str) -> str:
    """At the end; where the run was ended at the target, that is there."""
    spread = entry.last(name)
    if spread is None:
        return "–"
    most = max(spread.highest - spread.median, spread.median - spread.lowest)
    return f"{number(spread.median)}\n±{most:.2g}" if most > 0 else number(spread.median)


def _shares(entry: Contender) -> str:
    if not entry.shares:
        return "–"
    parts = [entry.shares.get(kind, 0.0) for kind in ("compute", "communication", "waiting")]
    return f"{'/'.join(map(str, amounts.percents(parts)))} %"


def _sent(entry: Contender) -> str:
    if entry.workers == 1 and not any(result.sent for result in entry.good):
        return "–"  # there is nobody to send to
    return size(entry.sent.median) if entry.sent is not None else "–"


def _differs(spread: Spread) -> str:
    """A second line that says how far repeats are from their median, at most."""
    if spread.lowest == spread.highest or not spread.median:
        return ""
    most = max(spread.highest - spread.median, spread.median - spread.lowest)
    return f"\n±{most / abs(spread.median):.0%}"
