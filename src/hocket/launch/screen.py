"""Shows a job to a person: what its processes write, line by line, and on a terminal a live progress bar below.

Bytes become lines in ``OutputStream``, lines go to the screen and to the logs through ``Output``, and a screen fits
where the output goes: a terminal, a pipe, or the caller of ``hocket.launch()``.
"""

from __future__ import annotations

import contextlib
import re
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, TextIO

from hocket.launch import stdio
from hocket.launch.crew import CrewMember
from hocket.observe.progress import RunPace

if TYPE_CHECKING:
    from rich.console import Console, RenderableType

_COLOURS = ("cyan", "magenta", "green", "yellow", "blue", "red")
_PLAIN_EVERY = 10.0  # seconds between two lines of progress where there is no terminal
_MOST = 1 << 20  # bytes of a line without an end
_HOLD = 1.0  # seconds that a traceback of a worker that lives on is held back
_BEGIN = ("Traceback (most recent call last)", "Fatal Python error", "  + Exception Group Traceback")
_TORCH_PREFIX = re.compile(rb"^\[rank\d+\]: ?")  # by torch.distributed, and Hocket has its own


class Logs:
    """A file for the whole output of each process of the job; those with the same name, one after the other, share it.

    Args:
        folder: Where they are; None for no files.
        members: The processes of which there is a file even if they write nothing.
    """

    def __init__(self, folder: Path | None, members: Sequence[CrewMember]) -> None:
        self._files: dict[str, TextIO] = {}
        self._folder = folder
        if folder is not None:
            folder.mkdir(parents=True, exist_ok=True)
            for member in members:
                self._file(folder, member.name)

    def write(self, member: CrewMember, line: str) -> None:
        if self._folder is None:
            return
        try:
            file = self._file(self._folder, member.name)
            file.write(line + "\n")
            file.flush()
        except OSError as error:  # a full disk is no reason to end the job
            print(f"hocket: --log-dir: {error.strerror}; the logs stop here", file=sys.stderr, flush=True)
            self.close()

    def _file(self, folder: Path, name: str) -> TextIO:
        if name not in self._files:
            self._files[name] = (folder / f"{name.replace(' ', '-')}.log").open("w", encoding="utf-8")
        return self._files[name]

    def close(self) -> None:
        files, self._files, self._folder = self._files, {}, None
        for file in files.values():
            with contextlib.suppress(OSError):
                file.close()


class PlainScreen:
    """For pipes, files and continuous integration: nothing but lines."""

    def __init__(self) -> None:
        self._next = time.monotonic() + _PLAIN_EVERY

    def line(self, member: CrewMember, text: str, *, error: bool) -> None:
        stdio.put(f"[{_mark(member)}] {text}", error=error)

    def say(self, text: str) -> None:
        stdio.put(text, error=True)

    def status(self, text: str) -> None:
        """A line that overwrites itself is shown when it is finished."""

    def progress(self, pace: RunPace) -> None:
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
        self._pace = RunPace()
        self._live = Live(
            get_renderable=self._render,
            console=self._console,
            refresh_per_second=10,
            transient=False,
            redirect_stdout=False,
            redirect_stderr=False,
        )
        self._live.start()

    def line(self, member: CrewMember, text: str, *, error: bool) -> None:
        from rich.text import Text

        if not error and not sys.stdout.isatty():
            stdio.put(f"[{_mark(member)}] {text}")
            return
        style = _COLOURS[member.number % len(_COLOURS)] if member.is_worker else "dim"
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

    def progress(self, pace: RunPace) -> None:
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


def _mark(member: CrewMember) -> str:
    """What stands before each line of a process: the bare number for a rank."""
    return str(member.number) if member.is_worker else member.name


Screen = PlainScreen | TerminalScreen


def open_screen(report_to: Path | None = None) -> Screen:
    """The screen that fits where the output goes."""
    if report_to is not None:
        return CalledScreen(report_to)
    return TerminalScreen() if sys.stderr.isatty() else PlainScreen()


class Output:
    """Everything that the processes of one job write: shown on the screen, and kept in their logs."""

    def __init__(self, screen: Screen, logs: Logs) -> None:
        self._screen, self._logs = screen, logs
        self._streams: dict[tuple[CrewMember, bool], OutputStream] = {}

    def take(self, member: CrewMember, data: bytes, *, error: bool) -> None:
        """Show the lines that ``data`` completes."""
        stream = self._stream(member, error)
        self._show(member, error, stream.feed(data))
        if member.number == 0 and member.is_worker:  # its progress bar, if it draws one
            self._screen.status(stream.status)

    def release(self) -> None:
        """Show the tracebacks of processes that live on, after a moment."""
        for (member, error), stream in self._streams.items():
            self._show(member, error, stream.release())

    def finish(self, member: CrewMember) -> None:
        """Show the last lines of a process that has ended; keep back the traceback with which it failed."""
        for error in (False, True):
            self._show(member, error, self._stream(member, error).finish())
        held = self._stream(member, True).take_held()
        for line in held:
            self._logs.write(member, line)
        if member.returncode == 0 or member.is_lost:
            self._show(member, True, held, log=False)

    def traceback(self, member: CrewMember) -> list[str]:
        """The last traceback that ``member`` has written."""
        return self._stream(member, True).traceback

    def _stream(self, member: CrewMember, error: bool) -> OutputStream:
        if (member, error) not in self._streams:
            self._streams[member, error] = OutputStream(holds_tracebacks=error)
        return self._streams[member, error]

    def _show(self, member: CrewMember, error: bool, lines: list[str], *, log: bool = True) -> None:
        for line in lines:
            if log:
                self._logs.write(member, line)
            self._screen.line(member, line, error=error)


class OutputStream:
    """One output stream of one process, as lines: tracebacks are held back until it is clear what they mean."""

    def __init__(self, *, holds_tracebacks: bool) -> None:
        self._rest = b""
        self._holds = holds_tracebacks
        self._held: list[str] = []
        self._released: list[str] = []
        self._since = 0.0
        self.status = ""  # an unfinished line that the worker overwrites: a progress bar

    def feed(self, data: bytes) -> list[str]:
        """Take in bytes; return the lines that are to be shown now."""
        *lines, self._rest = (self._rest + data).split(b"\n")
        if b"\r" in self._rest:
            self._rest = self._rest[max(0, self._rest.rstrip(b"\r").rfind(b"\r")) :]
        if len(self._rest) > _MOST:
            lines.append(self._rest)
            self._rest = b""
        self.status = _visible(self._rest)
        return [line for raw in lines for line in self._show(_visible(raw))]

    def release(self) -> list[str]:
        """Lines of a traceback that need not be held back any longer: the worker lives on."""
        if self._held and time.monotonic() - self._since > _HOLD:
            self._released, self._held = self._held, []
            return self._released
        return []

    def take_held(self) -> list[str]:
        """Lines that are still held back, at the worker's end; ``traceback`` remembers them."""
        held, self._held = self._held, []
        self._released = held or self._released
        return held

    @property
    def traceback(self) -> list[str]:
        """The last traceback that the worker has written, held back or already shown."""
        return self._held or self._released

    def finish(self) -> list[str]:
        """At the worker's end: the last lines to be shown, without a traceback that is held back."""
        return self.feed(b"\n") if self._rest.strip() else []

    def _show(self, line: str) -> list[str]:
        if self._holds and not self._held and line.startswith(_BEGIN):
            self._since = time.monotonic()
            self._held.append(line)
            return []
        if self._held:
            self._held.append(line)
            return []
        return [line]


def _visible(raw: bytes) -> str:
    """What remains on a screen of a line that overwrites itself."""
    shown = raw.rstrip(b"\r").rsplit(b"\r", 1)[-1]
    return _TORCH_PREFIX.sub(b"", shown).decode(errors="replace")
