"""Spans: what this process does when, for the timeline of a run. Unless somebody asked for one, nothing is kept.

Whoever has taken two times of ``time.perf_counter()`` anyway calls ``add``; it costs nothing where no timeline is
made. Spans are gathered in memory and handed to the sink a few times a second, also by a process that hangs, so that a
killed one loses no more than that.
"""

from __future__ import annotations

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

_EVERY = 0.2  # seconds between two handovers
_MOST = 100_000  # spans that are kept while the sink takes nothing

_Key = tuple[str, str, str]


class _Tape:
    def __init__(self, sink: Sink) -> None:
        self._sink = sink
        self._rows: deque[tuple[_Key, float, float, int]] = deque()  # whose ends threads may use without a lock
        self._lost = 0
        self._lock = threading.Lock()  # of handovers
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run, name="hocket-spans", daemon=True)
        self._thread.start()

    def close(self) -> None:
        self._stop.set()
        self._thread.join()
        self.hand_over()

    def _run(self) -> None:
        # All processes at the same moment: whoever is held up for a moment holds up all others at their next meeting.
        while not self._stop.wait(_EVERY - time.time() % _EVERY):
            self.hand_over()

    def add(self, key: _Key, begin: float, end: float, number: int) -> None:
        self._rows.append((key, begin, end, number))

    def hand_over(self) -> None:
        with self._lock:
            rows = [self._rows.popleft() for _ in range(len(self._rows))]
            if not rows:
                return
            numbers: dict[_Key, int] = {}
            base = min([row[1] for row in rows])
            flat: list[int] = []
            for key, begin, end, number in rows:
                index = numbers.get(key)
                if index is None:
                    index = numbers[key] = len(numbers)
                flat += (index, int((begin - base) * 1e9), int((end - begin) * 1e9), number)
            record = Spans(int(base * 1e9), [list(key) for key in numbers], flat, self._lost)
            if not self._sink.offer(record):
                self._lost += max(0, len(rows) - _MOST)
                self._rows.extendleft(reversed(rows[-_MOST:]))


_tape: _Tape | None = None


def start(sink: Sink) -> None:
    """Keep spans from now on, and hand them to ``sink``."""
    global _tape
    _tape = _Tape(sink)


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
    """Whether somebody asked for them: then times may be taken that nobody else needs."""
    return _tape is not None


def add(kind: str, name: str, begin: float, end: float, *, track: str = SCRIPT, number: int = -1) -> None:
    """This process has done something.

    Args:
        kind: What it is, one of the words above.
        name: What a reader is told; few different ones.
        begin: By ``time.perf_counter()``; ``end`` likewise.
        track: Where it is shown. Spans of one track are one after the other, or inside of each other.
        number: What tells it from others of its name, as the number of a batch; the same for meetings of several.
    """
    if _tape is not None:
        _tape.add((name, track, kind), begin, end, number)


@contextmanager
def silence() -> Iterator[None]:
    """Keep nothing within, to compare."""
    global _tape
    tape, _tape = _tape, None
    try:
        yield
    finally:
        _tape = tape


@contextmanager
def span(kind: str, name: str, *, track: str = SCRIPT) -> Iterator[None]:
    """Add a span for what is done within; for what happens seldom."""
    begin = time.perf_counter()
    try:
        yield
    finally:
        add(kind, name, begin, time.perf_counter(), track=track)
