"""One thread of one process makes a worker's calls: the order of two threads' calls may differ between ranks."""

from __future__ import annotations

import os
import threading

from hocket.errors import UsageError


class Owner:
    """The thread that makes a worker's calls: the first that makes one, and after its end another."""

    def __init__(self) -> None:
        self._process = os.getpid()
        self._thread: threading.Thread | None = None
        self._number = 0

    @property
    def is_elsewhere(self) -> bool:
        """Whether another thread than this one makes the worker's calls."""
        return self._number not in (0, threading.get_ident())

    def check(self, call: str) -> None:
        """Raise if this is another thread, or a process that was forked from the worker."""
        if os.getpid() != self._process:
            raise UsageError(
                f"{call} in process {os.getpid()}, which was forked from worker {self._process} and is no worker: let "
                "the worker make this call, and send it what the child has found through a pipe or a queue"
            )
        if threading.get_ident() == self._number:
            return
        mine = threading.current_thread()
        if self._thread is not None and self._thread is not mine and self._thread.is_alive():
            raise UsageError(
                f"{call} in thread {mine.name!r}, while thread {self._thread.name!r} makes the calls of this worker: "
                "ranks must make them in the same order, so let one thread make all of them and hand results over "
                "through a queue; only hocket.report() may be called from any thread"
            )
        self._thread, self._number = mine, threading.get_ident()
