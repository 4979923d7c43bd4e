"""What the processes of a job write: from bytes to lines on the screen and in their logs."""

from __future__ import annotations

from collections.abc import Iterable

from hocket.launch.crew import Member
from hocket.launch.output import Stream
from hocket.launch.screen import Logs, Screen


class Words:
    """All that workers and servers of one job say, on both of their streams."""

    def __init__(self, members: Iterable[Member], screen: Screen, logs: Logs) -> None:
        self._screen, self._logs = screen, logs
        self._streams = {(m, error): Stream(holds_tracebacks=error) for m in members for error in (False, True)}

    def take(self, member: Member, data: bytes, *, error: bool) -> None:
        """Show the lines that ``data`` completes."""
        stream = self._streams[member, error]
        self._show(member, error, stream.feed(data))
        if member.number == 0 and not member.is_server:
            self._screen.status(stream.status)

    def release(self) -> None:
        """Show the tracebacks of those who live on, after a moment."""
        for (member, error), stream in self._streams.items():
            self._show(member, error, stream.release())

    def finish(self, member: Member) -> None:
        """Show the last lines of one that has ended; keep back the traceback with which it failed."""
        for error in (False, True):
            self._show(member, error, self._streams[member, error].finish())
        held = self._streams[member, True].take_held()
        for line in held:
            self._logs.write(member, line)
        if member.returncode == 0 or member.is_lost:
            self._show(member, True, held, log=False)

    def traceback(self, member: Member) -> list[str]:
        """The last traceback that it has written."""
        return self._streams[member, True].traceback

    def _show(self, member: Member, error: bool, lines: list[str], *, log: bool = True) -> None:
        for line in lines:
            if log:
                self._logs.write(member, line)
            self._screen.line(member, line, error=error)
