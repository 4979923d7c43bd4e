"""Shows how far a comparison is: a live line on a terminal, else one line at the begin and the end of each run."""

from __future__ import annotations

import sys
import time
from typing import TYPE_CHECKING, Any

from hocket.lab.compare.plan import Planned, Way
from hocket.lab.compare.results import Goal, Result
from hocket.observe.progress import clock
from hocket.observe.show import number, span

if TYPE_CHECKING:
    from rich.console import RenderableType


class TimeLeft:
    """How long the runs that are left will take, from those that are done."""

    def __init__(self) -> None:
        self._took: dict[Way, list[float]] = {}

    def add(self, way: Way, seconds: float) -> None:
        """A run of this kind has taken so long, from start to end."""
        self._took.setdefault(way, []).append(seconds)

    def of(self, way: Way) -> float | None:
        """A run of this kind: as the others of its kind, else as all on the average; None before the first."""
        known = self._took.get(way) or [seconds for each in self._took.values() for seconds in each]
        return sum(known) / len(known) if known else None

    def left(self, runs: list[Planned], spent: float = 0.0) -> float | None:
        """Seconds for all of ``runs``, of which the first has had ``spent`` already."""
        each = [self.of(run.way) for run in runs]
        known = [seconds for seconds in each if seconds is not None]
        if len(known) < len(each):
            return None
        return max(0.0, known[0] - spent) + sum(known[1:]) if known else 0.0


class PlainDisplay:
    """Shows a comparison as lines on stderr.

    Attributes:
        estimate: Estimates the time that is left.
    """

    def __init__(self) -> None:
        self.estimate = TimeLeft()
        self._runs: list[Planned] = []
        self._total, self._begin, self._repeats = 0, 0.0, 1

    def begin(self, runs: list[Planned], total: int, repeats: int) -> None:
        """The first of ``runs``, which are left of ``total``, begins."""
        self._runs, self._total, self._repeats, self._begin = runs, total, repeats, time.monotonic()
        self._show_begin()

    def progress(self, text: str) -> None:
        """How far it is."""

    def end(self, result: Result, target: Goal | None) -> None:
        """A run has ended."""
        left = self.estimate.left(self._runs[1:])
        rest = f"; about {clock(left)} left" if left is not None and left >= 1 else ""
        self.say(f"hocket: {self._head}: {summary(result, target)}{rest}")

    def say(self, line: str) -> None:
        """Anything else."""
        print(line, file=sys.stderr, flush=True)

    def close(self) -> None:
        """Nothing more is shown."""

    @property
    def _head(self) -> str:
        """``run 3 of 13, mirrored on 2, repeat 2``."""
        run = self._runs[0]
        again = f", repeat {run.repeat + 1}" if self._repeats > 1 else ""
        return f"run {self._total - len(self._runs) + 1} of {self._total}, {run.way.name}{again}"

    def _show_begin(self) -> None:
        self.say(f"hocket: {self._head} …")


class TerminalDisplay(PlainDisplay):
    """A bar over all runs, what the one at work does, and the time left; ends of runs scroll above it."""

    def __init__(self) -> None:
        super().__init__()
        from rich.console import Console
        from rich.live import Live

        self._console = Console(stderr=True, highlight=False)
        self._text = ""
        self._live: Any = Live(get_renderable=self._render, console=self._console, refresh_per_second=4, transient=True)
        self._live.start()

    def progress(self, text: str) -> None:
        self._text = text

    def say(self, line: str) -> None:
        from rich.text import Text

        self._console.print(Text(line), soft_wrap=True)

    def close(self) -> None:
        self._live.stop()

    def _show_begin(self) -> None:
        self._text = ""

    def _render(self) -> RenderableType:
        from rich.progress_bar import ProgressBar
        from rich.table import Table
        from rich.text import Text

        if not self._runs:
            return Text("")
        spent = time.monotonic() - self._begin
        expected, left = self.estimate.of(self._runs[0].way), self.estimate.left(self._runs, spent)
        done = self._total - len(self._runs) + (min(0.99, spent / expected) if expected else 0.0)
        parts = [self._head, f"{clock(left)} left" if left is not None else clock(spent), self._text]
        grid = Table.grid(padding=(0, 1))
        bar = ProgressBar(total=self._total, completed=done, width=min(24, max(5, self._console.width // 5)))
        grid.add_row(bar, Text(", ".join(part for part in parts if part), no_wrap=True, overflow="ellipsis"))
        return grid


def open_display() -> PlainDisplay:
    """The one that fits where stderr goes."""
    return TerminalDisplay() if sys.stderr.isatty() else PlainDisplay()


def summary(result: Result, target: Goal | None) -> str:
    """A run in a few words."""
    if result.failure:
        return f"failed: {result.failure}"
    parts = []
    if target is not None and result.reached is not None:
        parts.append(f"{target.metric} {number(result.reached.value)} after {span(result.reached.seconds)}")
    elif target is not None:
        last = result.curves.get(target.metric)
        came = f"{number(last[-1].value)}, " if last else ""
        parts.append(f"{target.metric} {came}not reached in {span(result.seconds)}")
    else:
        parts += [f"{name} {number(curve[-1].value)}" for name, curve in list(result.curves.items())[:2]]
        parts.append(span(result.seconds))
    if result.speed is not None:
        parts.append(f"{result.speed:,.0f} samples/s")
    return ", ".join(parts)
