"""A comparison as a table in the terminal."""

from __future__ import annotations

import dataclasses
import sys
from typing import TYPE_CHECKING

from hocket.compare import verdict
from hocket.compare.results import Comparison, Entry, Spread
from hocket.observe.served import size
from hocket.observe.show import number

if TYPE_CHECKING:
    from rich.table import Table

_WIDTH = 100  # columns where there is no terminal
_MOST_METRICS = 2
_NAME = 25  # columns that a name has at least, if it needs them


def show(found: Comparison) -> None:
    """Print the table, what failed, and the notes, to stdout."""
    from rich.console import Console

    console = Console(width=None if sys.stdout.isatty() else _WIDTH, highlight=False)
    if any(entry.good for entry in found.entries):
        console.print(build(found))
    if found.entries:
        console.print(verdict.of(dataclasses.replace(found, missing=0)), soft_wrap=True, markup=False)
    for line in lines(found):
        console.print(line, soft_wrap=True, markup=False)


def build(found: Comparison) -> Table:
    """The table; where there are several repeats, medians, and beneath each what the repeats differ by."""
    from rich import box
    from rich.table import Table

    metrics = found.metrics[: 1 if found.target else _MOST_METRICS]
    head = ["samples/s", *([_target_title(found)] if found.target else ["time"]), *metrics]
    made = Table(title=_title(found), title_justify="left", padding=(0, 1, 0, 0), box=box.SIMPLE_HEAD)
    names = min(_NAME, max((len(_name(entry)) for entry in found.entries if entry.good), default=0))
    made.add_column("", min_width=names, overflow="fold")
    for title in [*head, "compute/\ncomm./wait", "sent"]:
        made.add_column(title, justify="right", no_wrap=True)
    for entry in found.entries:
        if entry.good:
            middle = [_target(entry) if found.target else _time(entry), *(_metric(entry, name) for name in metrics)]
            made.add_row(_name(entry), _speed(entry, found.baseline), *middle, _shares(entry), _sent(entry))
    return made


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
    return f"{found.target.metric} {sign} {found.target.value:g}\ns/pass × passes = s"


def _name(entry: Entry) -> str:
    more = f"{entry.servers} server{'s' if entry.servers > 1 else ''}" if entry.staleness else ""
    return f"{entry.name}, {more}" if more else entry.name


def _speed(entry: Entry, baseline: Entry | None) -> str:
    speed = entry.speed
    if speed is None:
        return "–"
    alone = baseline.speed if baseline is not None else None
    ratio = f" {speed.median / alone.median:.2f}×" if alone is not None and entry is not baseline else ""
    return f"{speed.median:,.0f}{ratio}{_differs(speed)}"


def _target(entry: Entry) -> str:
    took = entry.time_to_target
    if took is None:
        return "not reached"
    each, passes, missed = entry.seconds_per_pass, entry.passes, len(entry.good) - len(entry.reached)
    factors = f"{each:.2f} × {passes:.1f} = " if each is not None and passes is not None else ""
    rest = f"\n{missed} of {len(entry.good)} did not" if missed else ""
    return f"{factors}{took.median:.1f}{_differs(took)}{rest}"


def _time(entry: Entry) -> str:
    spread = Spread.of([result.seconds for result in entry.good])
    return f"{spread.median:.1f} s{_differs(spread)}" if spread is not None else "–"


def _metric(entry: Entry, name: str) -> str:
    """At the end; where the run was ended at the target, that is there."""
    spread = entry.last(name)
    if spread is None:
        return "–"
    most = max(spread.highest - spread.median, spread.median - spread.lowest)
    return f"{number(spread.median)}\n±{most:.2g}" if most > 0 else number(spread.median)


def _shares(entry: Entry) -> str:
    known = [f"{entry.shares.get(kind, 0.0) * 100:.0f}" for kind in ("compute", "communication", "waiting")]
    return f"{'/'.join(known)} %" if entry.shares else "–"


def _sent(entry: Entry) -> str:
    return size(entry.sent.median) if entry.sent is not None and entry.sent.highest else "–"


def _differs(spread: Spread) -> str:
    """A second line that says how far repeats are from their median, at most."""
    if spread.lowest == spread.highest or not spread.median:
        return ""
    most = max(spread.highest - spread.median, spread.median - spread.lowest)
    return f"\n±{most / abs(spread.median):.0%}"
