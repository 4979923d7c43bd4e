"""Collects the signals that ask for the end of a job, and wakes whoever waits for its workers."""

from __future__ import annotations

import contextlib
import os
import signal
from types import FrameType, TracebackType
from typing import Any


def asking() -> list[signal.Signals]:
    """Signals that ask for the end of a job: those that this process was started to ignore do not.

    A shell has its background jobs ignore SIGINT, and ``nohup`` SIGHUP: these are meant for others.
    """
    asks = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
    return [number for number in asks if signal.getsignal(number) != signal.SIG_IGN]


class Signals:
    """While entered, SIGINT, SIGTERM and SIGHUP are collected; they and SIGCHLD make ``fileno()`` readable.

    What is ignored stays so.

    It may be entered again by whoever is given it.

    Attributes:
        received: The numbers of the signals that asked for the end, in their order.
    """

    def __init__(self) -> None:
        self.received: list[int] = []
        self._depth = 0
        self._before: dict[int, Any] = {}
        self._previous = -1
        self._reader = self._writer = -1

    def fileno(self) -> int:
        return self._reader

    def drain(self) -> None:
        """To be called when ``fileno()`` is readable."""
        with contextlib.suppress(BlockingIOError):
            os.read(self._reader, 1 << 16)

    def __enter__(self) -> Signals:
        self._depth += 1
        if self._depth > 1:
            return self
        self._reader, self._writer = os.pipe()
        for descriptor in (self._reader, self._writer):
            os.set_blocking(descriptor, False)
        asks = asking()
        self._before = {number: signal.getsignal(number) for number in (*asks, signal.SIGCHLD)}
        for number in asks:
            signal.signal(number, self._take)
        signal.signal(signal.SIGCHLD, lambda *_: None)
        self._previous = signal.set_wakeup_fd(self._writer, warn_on_full_buffer=False)
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, _: TracebackType | None) -> None:
        self._depth -= 1
        if self._depth:
            return
        signal.set_wakeup_fd(self._previous)
        for number, handler in self._before.items():
            signal.signal(number, handler)
        os.close(self._reader)
        os.close(self._writer)

    def _take(self, number: int, _: FrameType | None) -> None:
        self.received.append(number)
