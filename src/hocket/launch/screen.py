"""Shows the job to a person: lines of its processes, and below them, on a terminal, a live progress bar."""

from __future__ import annotations

import contextlib
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING, TextIO

from hocket.launch import streams
from hocket.launch.crew import Member
from hocket.observe.progress import Pace

if TYPE_CHECKING:
    from rich.console import Console, RenderableType

_COLOURS = ("cyan", "magenta", "green", "yellow", "blue", "red")
_PLAIN_EVERY = 10.0  # seconds between two lines of progress where there is no terminal


class Logs:
    """A file for the whole output of each worker and each server."""

    def __init__(self, folder: Path | None, size: int, servers: int = 0) -> None:
        self._files: dict[str, TextIO] = {}
        if folder is not None:
            folder.mkdir(parents=True, exist_ok=True)
            names = [*(f"rank {rank}" for rank in range(size)), *(f"server {number}" for number in range(servers))]
            for name in names:
                self._files[name] = (folder / f"{name.replace(' ', '-')}.log").open("w", encoding="utf-8")

    def write(self, member: Member, line: str) -> None:
        if not self._files:
            return
        try:
            self._files[member.name].write(line + "\n")
            self._files[member.name].flush()
        except OSError as error:  # a full disk is no reason to end the job
            print(f"hocket: --log-dir: {error.strerror}; the logs stop here", file=sys.stderr, flush=True)
            self.close()

    def close(self) -> None:
        files, self._files = self._files, {}
        for file in files.values():
            with contextlib.suppress(OSError):
                file.close()


class PlainScreen:
    """For pipes, files and continuous integration: nothing but lines."""

    def __init__(self) -> None:
        self._next = time.monotonic() + _PLAIN_EVERY

    def line(self, member: Member, text: str, *, error: bool) -> None:
        streams.put(f"[{_mark(member)}] {text}", error=error)

    def say(self, text: str) -> None:
        streams.put(text, error=True)

    def status(self, text: str) -> None:
        """A line that overwrites itself is shown when it is finished."""

    def progress(self, pace: Pace) -> None:
        if time.monotonic() > self._next:
            self._next = time.monotonic() + _PLAIN_EVERY
            self.say(f"hocket: {pace.text}")

    def report(self, lines: list[str]) -> None:
        """The last that is said of a job that failed."""
        for line in lines:
            self.say(line)

    def close(self) -> None:
        """Nothing to take down."""


class CalledScreen(PlainScreen):
    """For ``hocket.launch()``, which puts the report into the exception that it raises."""

    def __init__(self, report_to: Path) -> None:
        super().__init__()
        self._report_to = report_to

    def report(self, lines: list[str]) -> None:
        if lines:
            self._report_to.write_text("\n".join(lines), encoding="utf-8")


class TerminalScreen:
    """For a terminal: lines of the job scroll above what is live."""

    def __init__(self) -> None:
        from rich.console import Console
        from rich.live import Live

        self._console: Console = Console(stderr=True, highlight=False)
        self._status = ""
        self._pace = Pace()
        self._live = Live(
            get_renderable=self._render,
            console=self._console,
            refresh_per_second=10,
            transient=False,
            redirect_stdout=False,
            redirect_stderr=False,
        )
        self._live.start()

    def line(self, member: Member, text: str, *, error: bool) -> None:
        from rich.text import Text

        if not error and not sys.stdout.isatty():
            streams.put(f"[{_mark(member)}] {text}")
            return
        style = "dim" if member.is_server else _COLOURS[member.number % len(_COLOURS)]
        prefix = Text(f"[{_mark(member)}] ", style=style)
        self._console.print(prefix + Text.from_ansi(text), soft_wrap=True)

    def say(self, text: str) -> None:
        from rich.text import Text

        self._console.print(Text.from_ansi(text), soft_wrap=True)

    def report(self, lines: list[str]) -> None:
        for line in lines:
            self.say(line)

    def status(self, text: str) -> None:
        self._status = text

    def progress(self, pace: Pace) -> None:
        self._pace = pace

    def close(self) -> None:
        self._live.stop()

    def _render(self) -> RenderableType:
        from rich.console import Group
        from rich.progress_bar import ProgressBar
        from rich.table import Table
        from rich.text import Text

        rows: list[RenderableType] = []
        if self._status:
            rows.append(Text("[0] ", style=_COLOURS[0]) + Text.from_ansi(self._status, no_wrap=True))
        if (record := self._pace.record) is not None:
            text = Text(self._pace.text, no_wrap=True, overflow="ellipsis")
            room = min(30, self._console.width - len(text) - 1)
            if room >= 5:
                grid = Table.grid(padding=(0, 1))
                bar = ProgressBar(total=record.steps, completed=record.step, width=room, pulse=record.steps is None)
                grid.add_row(bar, text)
                rows.append(grid)
            else:  # the bar is what a narrow terminal can do without
                rows.append(text)
        return Group(*rows)


def _mark(member: Member) -> str:
    """What stands before each of its lines: a rank is only a number."""
    return member.name if member.is_server else str(member.number)


Screen = PlainScreen | TerminalScreen


def open_screen(report_to: Path | None = None) -> Screen:
    """The screen that fits where the output goes."""
    if report_to is not None:
        return CalledScreen(report_to)
    return TerminalScreen() if sys.stderr.isatty() else PlainScreen()
