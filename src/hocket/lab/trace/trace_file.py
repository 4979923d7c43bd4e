"""Reads the timeline of a run, and repairs one that was cut off."""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from hocket.errors import RecordError
from hocket.spans import SCRIPT


@dataclass
class Span:
    """Something that a process has done; times are seconds.

    Attributes:
        inner: What it did within, in order; only spans of the same track.
    """

    name: str
    kind: str
    begin: float
    end: float
    number: int = -1
    inner: list[Span] = field(default_factory=list)

    @property
    def seconds(self) -> float:
        return self.end - self.begin

    @property
    def own(self) -> float:
        """Seconds that are not those of spans within."""
        return max(0.0, self.seconds - sum(span.seconds for span in self.inner))

    def walk(self) -> Iterator[Span]:
        """This span and all within it."""
        yield self
        for span in self.inner:
            yield from span.walk()


@dataclass
class Process:
    """A rank or server.

    Attributes:
        tracks: By name, spans that are not within others, in order.
    """

    role: str
    number: int
    host: str
    tracks: dict[str, list[Span]] = field(default_factory=dict)

    @property
    def name(self) -> str:
        return f"{self.role} {self.number}"

    @property
    def script(self) -> list[Span]:
        return self.tracks.get(SCRIPT, [])

    def spans(self, track: str | None = None) -> Iterator[Span]:
        """All spans, or those of one track, outer before inner."""
        for name, spans in self.tracks.items():
            if track is None or name == track:
                for span in spans:
                    yield from span.walk()


@dataclass
class Trace:
    """A timeline.

    Attributes:
        events: As they are in the file.
        was_cut: Whether its end is missing.
        is_being_written: Whether that is so because the run goes on.
    """

    events: list[dict[str, Any]]
    processes: list[Process]
    was_cut: bool
    is_being_written: bool = False

    @property
    def ranks(self) -> list[Process]:
        return [process for process in self.processes if process.role == "rank"]


def read(path: Path) -> Trace:
    """Read the timeline in ``path``; what is whole in a file that was cut off."""
    try:
        with path.open("rb") as file:
            is_being_written = _is_locked(file.fileno())
            text = file.read().decode(errors="replace")
    except OSError as error:
        raise RecordError(f"{path}: {error.strerror}") from None
    try:
        events, was_cut = _parse(path, text)
        named = any(event.get("name") == "hocket" and event.get("ph") == "M" for event in events)
        processes = _processes(events) if named else []
    except (TypeError, ValueError, KeyError, AttributeError, RecursionError) as error:
        raise RecordError(f"{path} is damaged: {error!r}; make a new one with hocket run --timeline") from None
    if not named:
        raise RecordError(f"{path} is no timeline of Hocket: make one with hocket run --timeline {path.name}")
    return Trace(events, processes, was_cut, is_being_written and was_cut)


def repair(path: Path, trace: Trace) -> None:
    """Complete a file that was cut off, in one go: it is either as it was, or whole."""
    path = path.resolve()
    temporary = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        with temporary.open("x", encoding="utf-8") as file:
            lines = (json.dumps(event, separators=(",", ":")) for event in trace.events)
            file.write("[\n" + ",\n".join(lines) + "\n]\n")
        temporary.chmod(path.stat().st_mode & 0o777)
        temporary.replace(path)
    except OSError as error:
        with contextlib.suppress(OSError):
            temporary.unlink(missing_ok=True)
        raise RecordError(f"{path} was cut off, and cannot be repaired: {error.strerror}") from None


def _is_locked(descriptor: int) -> bool:
    """Whether a launcher holds it, to write."""
    try:
        fcntl.flock(descriptor, fcntl.LOCK_SH | fcntl.LOCK_NB)
        fcntl.flock(descriptor, fcntl.LOCK_UN)
    except BlockingIOError:
        return True
    except OSError:
        return False  # no locks there
    return False


def _parse(path: Path, text: str) -> tuple[list[dict[str, Any]], bool]:
    try:
        found = json.loads(text)
        whole = found.get("traceEvents", []) if isinstance(found, dict) else found
        if isinstance(whole, list) and all(isinstance(event, dict) for event in whole):
            return whole, False
    except ValueError:
        pass
    if not text.startswith("["):
        raise RecordError(f"{path} is no timeline: make one with hocket run --timeline {path.name}")
    events = []
    for line in text.splitlines()[1:]:
        try:
            event = json.loads(line.removesuffix(","))
        except ValueError:
            break  # nothing after it can be trusted
        if not isinstance(event, dict):
            break
        events.append(event)
    return events, True


def _processes(events: list[dict[str, Any]]) -> list[Process]:
    processes: dict[int, Process] = {}
    tracks: dict[tuple[int, int], str] = {}
    spans: dict[tuple[int, int], list[Span]] = {}
    for event in events:
        number, args = event.get("pid", 0), event.get("args", {})
        if event.get("ph") == "M" and event["name"] == "process_name":
            processes[number] = Process(str(args.get("role")), int(args.get("number", 0)), str(args.get("host")))
        elif event.get("ph") == "M" and event["name"] == "thread_name":
            tracks[number, event.get("tid", 0)] = str(args.get("name"))
        elif event.get("ph") == "X":
            begin = event["ts"] / 1e6
            end = begin + event.get("dur", 0) / 1e6
            which = (number, event.get("tid", 0))
            span = Span(event["name"], event.get("cat", ""), begin, end, args.get("number", -1))
            spans.setdefault(which, []).append(span)
    for (process, thread), found in spans.items():
        if process in processes:
            processes[process].tracks[tracks.get((process, thread), str(thread))] = _nest(found)
    return [processes[number] for number in sorted(processes)]


def _nest(spans: list[Span]) -> list[Span]:
    """Put each into the one that it is within."""
    outer: list[Span] = []
    stack: list[Span] = []
    for span in sorted(spans, key=lambda each: (each.begin, -each.end)):
        while stack and span.begin >= stack[-1].end - 1e-9:
            stack.pop()
        (stack[-1].inner if stack else outer).append(span)
        stack.append(span)
    return outer
