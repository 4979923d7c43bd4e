"""One exchange at a time beside the script's own thread, which waits for it before it uses the transport itself.

Kernels of torch, waits on a futex and waits for Gloo leave the interpreter to the script meanwhile.
"""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable
from typing import Any

_GOODBYE = 2.0  # seconds in which the thread of a worker that leaves should have noticed


class Task:
    """A piece of work that was given to the thread."""

    def __init__(self, work: Callable[[], Any]) -> None:
        self._work, self._result, self._error = work, None, None  # type: Any, Any, BaseException | None
        self._done = threading.Event()

    def run(self) -> None:
        """Do it."""
        try:
            self._result = self._work()
        except BaseException as error:  # it is for the script to hear of it
            self._error = error
        finally:
            self._done.set()

    @property
    def is_done(self) -> bool:
        return self._done.is_set()

    def result(self) -> Any:
        """What it returned, or raises what it raised; waits for it, which ends as the waits in it do."""
        self._done.wait()
        if self._error is not None:
            raise self._error
        return self._result


class Beside:
    """The thread, started with the first task. All ranks start their tasks in the same order as their collectives."""

    def __init__(self) -> None:
        self._tasks: queue.SimpleQueue[Task | None] = queue.SimpleQueue()
        self._thread: threading.Thread | None = None
        self._last: Task | None = None

    def start(self, work: Callable[[], Any]) -> Task:
        """Have ``work`` done; there must be nothing under way."""
        if self._thread is None:
            self._thread = threading.Thread(target=self._run, name="hocket-exchange", daemon=True)
            self._thread.start()
        self._last = Task(work)
        self._tasks.put(self._last)
        return self._last

    def enter(self) -> bool:
        """Before a collective: wait for what is under way; at once if it is this thread that does it.

        Returns:
            Whether it is.
        """
        last = self._last
        if last is None:
            return False
        if threading.current_thread() is self._thread:
            return True
        last.result()
        return False

    def close(self) -> None:
        """End the thread; what it waits for must have been told that this worker leaves."""
        if self._thread is not None:
            self._tasks.put(None)
            self._thread.join(_GOODBYE)

    def _run(self) -> None:
        while (task := self._tasks.get()) is not None:
            task.run()
