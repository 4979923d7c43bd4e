"""Writes the timeline of a run while it goes on: a JSON array of trace events, one in a line.

Perfetto and Chrome read it (the "Trace Event Format"). Each process of the job is a process there, its tracks are
threads. Times are microseconds since the launcher began, by its own clock. What is written survives the launcher's
death; only the closing bracket is missing then.
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import math
import os
import stat
import time
from bisect import bisect_right
from collections.abc import Callable
from pathlib import Path
from typing import Any

from hocket.errors import RecordError, UsageError
from hocket.events import Happening, Spans
from hocket.spans import FRAME, SCRIPT

_OTHERS = {"server": 1_000_000, "coordinator": 2_000_000, "spare": 3_000_000}  # process numbers after those of ranks
_DRIFT = 5e-5  # seconds that two clocks may drift apart in one second
_SLEW = 1.0  # seconds in which a new difference is taken over


class Timeline:
    """The timeline of one run.

    ``take`` and ``mark`` raise RecordError when it cannot be written to any more; afterwards they do nothing.

    Attributes:
        path: Where it is.
        clock: How the monotonic clock of a host compares with this one's; None if they are the same.
        lost: How many spans processes had no room for.
        is_whole: Whether everything could be written so far.
    """

    def __init__(self, path: Path) -> None:
        """Make the file, in place of one that is there; a UsageError says why it cannot be made."""
        if path.suffix != ".json":
            raise UsageError(f"--timeline {path}: must end with .json, for example --timeline out.json")
        self.path, self.is_whole = path, True
        self.clock: Callable[[str], HostClock | None] = _same_clock
        self._origin = time.perf_counter_ns()
        self._tracks: dict[tuple[int, str], int] = {}
        self._lost: dict[object, int] = {}
        self._descriptor: int | None = None
        try:
            self._descriptor = _open(path)
            self._write(f"[\n{_line(name='hocket', ph='M', pid=0, args={'started': time.time()})}".encode())
        except (OSError, RecordError) as error:
            reason = error.strerror if isinstance(error, OSError) else error
            raise UsageError(f"--timeline {path}: {reason}; name a file that can be written to") from None

    @property
    def lost(self) -> int:
        return sum(self._lost.values())

    def take(self, role: str, number: int, host: str, record: Spans | Happening, source: object = None) -> None:
        """Write down what a process has done, or that something happened there just now.

        Args:
            role: ``rank``, ``server`` or ``spare``.
            number: Which one.
            host: Where it is.
            record: What it tells.
            source: What tells this process from others of the same number, before and after it.
        """
        process = number + 1 if role == "rank" else _OTHERS[role] + number
        lines: list[str] = []
        if (process, SCRIPT) not in self._tracks:
            who = {"name": f"{role} {number} on {host}", "role": role, "number": number, "host": host}
            lines.append(_line(name="process_name", ph="M", pid=process, args=who))
            lines.append(_line(name="process_sort_index", ph="M", pid=process, args={"sort_index": process}))
            self._thread(process, SCRIPT, lines)
        if isinstance(record, Spans):
            self._spans(process, host, record, lines)
            self._lost[source or process] = record.lost
        else:
            lines.append(_line(name=record.name, ph="i", s="p", pid=process, tid=1, ts=self._now()))
        self._append(lines)

    def mark(self, name: str) -> None:
        """Write down that the launcher has seen something, just now."""
        self._append([_line(name=name, ph="i", s="g", pid=0, tid=0, ts=self._now())])

    def finish(self) -> None:
        """The run has ended: complete the file. May be called twice."""
        if self._descriptor is not None:
            with contextlib.suppress(RecordError):
                self._write(b"\n]\n")
            self._close()

    def _spans(self, process: int, host: str, record: Spans, lines: list[str]) -> None:
        heads = []
        for name, track, kind in record.names:
            thread = self._thread(process, track, lines)
            shown = json.dumps(name)[:-1]
            heads.append((shown, kind == FRAME, f'"cat":"{kind}","ph":"X","pid":{process},"tid":{thread},"ts":'))
        rows, clock = iter(record.rows), self.clock(host)
        for index, since, took, which in zip(rows, rows, rows, rows, strict=True):
            shown, is_numbered, head = heads[index]
            title = f'{shown} {which}"' if is_numbered and which >= 0 else f'{shown}"'
            args = f',"args":{{"number":{which}}}' if which >= 0 else ""
            begin, end = record.base + since, record.base + since + took
            if clock is not None:
                begin, end = round(clock.here(begin / 1e9) * 1e9), round(clock.here(end / 1e9) * 1e9)
            at, length = (begin - self._origin) / 1e3, (end - begin) / 1e3
            lines.append(f'{{"name":{title},{head}{at:.3f},"dur":{length:.3f}{args}}}')

    def _thread(self, process: int, track: str, lines: list[str]) -> int:
        thread = self._tracks.get((process, track))
        if thread is None:
            thread = self._tracks[process, track] = 1 + sum(each == process for each, _ in self._tracks)
            lines.append(_line(name="thread_name", ph="M", pid=process, tid=thread, args={"name": track}))
            lines.append(_line(name="thread_sort_index", ph="M", pid=process, tid=thread, args={"sort_index": thread}))
        return thread

    def _now(self) -> float:
        return (time.perf_counter_ns() - self._origin) / 1e3

    def _append(self, lines: list[str]) -> None:
        if lines and self._descriptor is not None:
            self._write("".join(f",\n{line}" for line in lines).encode())

    def _write(self, data: bytes) -> None:
        assert self._descriptor is not None
        try:
            while data:
                data = data[os.write(self._descriptor, data) :]
        except OSError as error:
            self.is_whole = False
            self._close()
            raise RecordError(error.strerror or str(error)) from None

    def _close(self) -> None:
        if self._descriptor is not None:
            os.close(self._descriptor)
            self._descriptor = None


def _same_clock(_: str) -> None:
    return None


def _open(path: Path) -> int:
    """A file for this run alone; it stays locked until it is closed."""
    descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_NONBLOCK | os.O_CLOEXEC, 0o666)
    try:
        if not stat.S_ISREG(os.fstat(descriptor).st_mode):
            raise RecordError("it is no plain file")
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise RecordError("another run is writing it") from None
        os.ftruncate(descriptor, 0)
    except BaseException:
        os.close(descriptor)
        raise
    return descriptor


def _line(**fields: Any) -> str:
    return json.dumps(fields, separators=(",", ":"))


class HostClock:
    """How the monotonic clock of another host compares with this one's, from questions and answers.

    Its lead over this one is a function of its own time that has no jumps.

    What it said of the past it says for ever, so that what one process does in order stays in order.
    """

    def __init__(self) -> None:
        self._trip, self._when = math.inf, 0.0  # round trip and time of the quickest question so far
        self._times: list[float] = []  # times of the other clock
        self._leads: list[float] = []  # its leads at these times

    def compare(self, asked: float, there: float, answered: float) -> None:
        """An answer has come: that clock said ``there`` between ``asked`` and ``answered`` of this one.

        The quickest answers tell the most, but clocks drift, so that older ones count less and less.
        """
        trip = answered - asked
        if trip > self._trip + (answered - self._when) * _DRIFT:
            return
        self._trip, self._when = trip, answered
        lead = there - (asked + answered) / 2
        if not self._times:
            self._times, self._leads = [there], [lead]
        elif abs(lead - self.lead(there)) > trip / 2:  # else it may be the same as before
            now = max(there, self._times[-1])
            self._leads += [self.lead(now), lead]
            self._times += [now, now + _SLEW]

    def lead(self, there: float) -> float:
        """By how many seconds the other clock is ahead when it shows ``there``."""
        times, leads = self._times, self._leads
        if not times or there >= times[-1]:
            return leads[-1] if leads else 0.0
        after = bisect_right(times, there)
        if not after:
            return leads[0]
        begin, end = times[after - 1], times[after]
        share = (there - begin) / (end - begin)
        return leads[after - 1] + share * (leads[after] - leads[after - 1])

    def here(self, there: float) -> float:
        """What this clock shows when the other one shows ``there``."""
        return there - self.lead(there)
