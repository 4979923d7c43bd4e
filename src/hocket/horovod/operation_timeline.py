"""``hvd.start_timeline``: when each operation was waited for, and carried out, as a file for Perfetto or Chrome."""

from __future__ import annotations

import json
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from hocket import config
from hocket.horovod import context
from hocket.horovod.execution import Pair


class OperationTimeline:
    """The operations of all ranks, as rank 0 sees them.

    Args:
        path: The file, which is written at the end.
        marks_cycles: Whether cycles are marked.
    """

    def __init__(self, path: Path, marks_cycles: bool) -> None:
        self._path, self._marks_cycles = path, marks_cycles
        self._begin = time.monotonic()
        self._rows: dict[str, int] = {}
        self._events: list[dict[str, Any]] = []

    def take(self, begin: float, pairs: Sequence[Pair]) -> None:
        """Operations were carried out in a cycle that began then."""
        now = time.monotonic()
        for decision, operation in pairs:
            key, kind = decision.request.key, decision.request.kind.upper()
            if key not in self._rows:
                self._rows[key] = len(self._rows) + 1
                self._add({"name": "process_name", "ph": "M", "args": {"name": key}}, key)
            if operation is not None and operation.since < begin:
                self._span(f"NEGOTIATE_{kind}", operation.since, begin, key)
            self._span(kind, begin, now, key)
        if self._marks_cycles:
            self._events.append({"name": "CYCLE_START", "ph": "i", "s": "g", "ts": self._time(begin), "pid": 0})

    def close(self) -> None:
        """Write the file."""
        self._path.write_text(json.dumps(self._events))

    def _span(self, name: str, begin: float, end: float, key: str) -> None:
        self._add({"name": name, "ph": "X", "ts": self._time(begin), "dur": int((end - begin) * 1e6)}, key)

    def _add(self, event: dict[str, Any], key: str) -> None:
        self._events.append({**event, "pid": self._rows[key], "tid": 0})

    def _time(self, when: float) -> int:
        return int((when - self._begin) * 1e6)


_open: list[OperationTimeline] = []


def start_timeline(file_path: str, mark_cycles: bool = False) -> None:
    """Begin a timeline of operations, which ``stop_timeline`` writes on rank 0."""
    found = context.current()
    if _open:
        raise ValueError("a timeline was started already: call hvd.stop_timeline()")
    if found.worker.config.rank == 0:
        _open.append(OperationTimeline(Path(file_path), mark_cycles))
        found.engine(context.GLOBAL).on_cycle = _open[0].take


def stop_timeline() -> None:
    """Write the timeline, on rank 0."""
    while _open:
        if context.is_started():
            context.current().engine(context.GLOBAL).on_cycle = lambda *_: None
        _open.pop().close()


def _start_by_variable() -> None:
    if path := config.environment().get("HOROVOD_TIMELINE"):
        start_timeline(path)


context.on_start.append(_start_by_variable)
context.on_stop.append(stop_timeline)
