"""Spans: what this process does when, for the timeline of a run. Unless somebody asked for one, nothing is kept.

Whoever has taken two times of ``time.perf_counter()`` anyway calls ``add``; it costs nothing where no timeline is
made. Spans are gathered in memory and handed to the sink a few times a second, also by a process that hangs, so that a
killed one loses no more than that.
"""

from __future__ import annotations

import os
import threading
import time
from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager

from hocket.events import Sink, Spans

COMPUTE, EXCHANGE, WAIT, DATA, SERVE, FRAME = "compute", "exchange", "wait", "data", "serve", "frame"
"""What a span is: the script's own work, moving and adding up tensors, waiting, getting batches, a server's work; or
one that only holds others together."""

SCRIPT = "script"
"""The track of what the script itself does or waits for, one thing after the other."""

MEETING = "wait for all ranks"
"""The name of waits at a meeting of all ranks of a host; each has a number, and whoever comes last was waited for."""

WAIT_FOR = "wait for"
"""How the names of waits begin that are for one other rank: ``wait for rank 3``."""

_EVERY = 0.2  # seconds between two handovers
_AT_ONCE = 1000  # spans in one record
_MOST = 100_000  # spans that are kept while the sink takes nothing
_LAST = 2.0  # seconds that the last handover may take

_Key = tuple[str, str, str]


class _Tape:
    def __init__(self, sink: Sink) -> None:
        self._sink = sink
        self._rows: deque[tuple[_Key, float, float, int]] = deque()  # whose ends threads may use without a lock
        self._lost = 0
        self._lock = threading.Lock()  # held during handovers
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run, name="hocket-spans", daemon=True)
        self._thread.start()

    def close(self) -> None:
        self._stop.set()
        self._thread.join()
        deadline = time.monotonic() + _LAST
        while not self.hand_over() and time.monotonic() < deadline:
            time.sleep(0.01)

    def _run(self) -> None:
        # All processes at the same moment: whoever is held up for a moment holds up all others at their next meeting.
        while not self._stop.wait(_EVERY - time.time() % _EVERY):
            self.hand_over()

    def add(self, key: _Key, begin: float, end: float, number: int) -> None:
        self._rows.append((key, begin, end, number))

    def hand_over(self) -> bool:
        """Give the sink as many spans as it takes; returns whether that was all."""
        with self._lock:
            while self._rows:
                if not self._sink.has_room():
                    for _ in range(len(self._rows) - _MOST):
                        self._rows.popleft()
                        self._lost += 1
                    return False
                self._sink.put(self._record([self._rows.popleft() for _ in range(min(len(self._rows), _AT_ONCE))]))
            return True

    def _record(self, rows: list[tuple[_Key, float, float, int]]) -> Spans:
        numbers: dict[_Key, int] = {}
        base = min([row[1] for row in rows])
        flat: list[int] = []
        for key, begin, end, number in rows:
            index = numbers.get(key)
            if index is None:
                index = numbers[key] = len(numbers)
            flat += (index, int((begin - base) * 1e9), int((end - begin) * 1e9), number)
        return Spans(int(base * 1e9), [list(key) for key in numbers], flat, self._lost)


_tape: _Tape | None = None


def start(sink: Sink) -> None:
    """Keep spans from now on, and hand them to ``sink``; a process that is forked from this one keeps none."""
    global _tape
    _tape = _Tape(sink)
    os.register_at_fork(after_in_child=_forget)


def _forget() -> None:
    global _tape
    _tape = None


def stop() -> None:
    """Hand over what there is, and keep nothing from now on."""
    global _tape
    tape, _tape = _tape, None
    if tape is not None:
        tape.close()


def flush() -> None:
    """Hand over what there is: this process may be about to end."""
    if _tape is not None:
        _tape.hand_over()


def are_kept() -> bool:
    """Whether spans are kept: then times may be taken that nothing else needs."""
    return _tape is not None


def add(kind: str, name: str, begin: float, end: float, *, track: str = SCRIPT, number: int = -1) -> None:
    """This process has done something.

    Args:
        kind: The kind of span, one of the words above.
        name: The name that a reader sees; there should be few different ones.
        begin: When it began, by ``time.perf_counter()``.
        end: When it ended, by ``time.perf_counter()``.
        track: The track that shows the span. Spans of one track are one after the other, or inside of each other.
        number: What tells it from others of its name, as the number of a batch; the same for meetings of several.
    """
    if _tape is not None:
        _tape.add((name, track, kind), begin, end, number)


@contextmanager
def silence() -> Iterator[None]:
    """Inside this context, keep no spans, to measure what they cost."""
    global _tape
    tape, _tape = _tape, None
    try:
        yield
    finally:
        _tape = tape


@contextmanager
def span(kind: str, name: str, *, track: str = SCRIPT) -> Iterator[None]:
    """Add a span for the time inside this context; for what happens seldom."""
    begin = time.perf_counter()
    try:
        yield
    finally:
        add(kind, name, begin, time.perf_counter(), track=track)
