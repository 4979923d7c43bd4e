"""A worker is told, by SIGTERM, that it has to leave: it finishes its batch, and the others go on without it."""

from __future__ import annotations

import os
import signal
import sys
import threading
import time
from types import FrameType
from typing import TYPE_CHECKING

from hocket.comm.generation import Left
from hocket.events import Stage
from hocket.strategies.base import Why
from hocket.transport.waiting import await_end, hold_sigterm

if TYPE_CHECKING:
    from hocket.job.worker import Worker

_AGAIN = 1.0  # seconds in which another signal is the same notice: the launcher may not know yet that it was heard


class Notice:
    """What a worker knows of its own end.

    Args:
        worker: The worker.

    Attributes:
        is_given: Whether the worker has to leave as soon as it is between two batches.
        is_expected: Whether the script looks for it by itself, though no model of it is distributed.
    """

    def __init__(self, worker: Worker) -> None:
        self._worker, self.is_given, self._process = worker, False, os.getpid()
        self.is_expected = False
        self._since, self._watches = 0.0, False

    def watch(self) -> None:
        """Take SIGTERM for a notice from now on; a second one, later, ends the process, as does one before training."""
        handler = signal.getsignal(signal.SIGTERM)  # the script may have one of its own
        is_free = handler == signal.SIG_DFL or isinstance(getattr(handler, "__self__", None), Notice)
        if self._can_leave and is_free and threading.current_thread() is threading.main_thread():
            signal.signal(signal.SIGTERM, self._take)
            self._watches = True

    @property
    def is_heeded(self) -> bool:
        """Whether SIGTERM is a notice to this worker."""
        return self._watches and self._can_leave

    @property
    def _can_leave(self) -> bool:
        """Whether others go on without this worker, or there are none, or all can leave together."""
        worker = self._worker
        return worker.communicator.parts or worker.client is not None or worker.communicator.size == 1

    def _take(self, number: int, _: FrameType | None) -> None:
        worker, process = self._worker, os.getpid()
        is_child = process != self._process  # which the script has forked, and ends with this signal
        if self.is_given and not is_child and time.monotonic() < self._since + _AGAIN:
            return
        trains = bool(worker.training.models) or self.is_expected
        if self.is_given or is_child or not trains or worker.has_left or not self._can_leave:
            signal.signal(number, signal.SIG_DFL)
            os.kill(process, number)
            return
        self.is_given, self._since = True, time.monotonic()
        seconds = worker.config.notice

        def count_down() -> None:  # in a thread: the signal may have come while this worker told something
            worker.sink.put(Stage("on notice"))
            time.sleep(seconds)
            if not worker.has_left and os.getpid() == process:
                print(
                    f"hocket: rank {worker.config.rank} was told to leave, and came to the end of no batch within "
                    f"{seconds:g} s (--notice): it is killed now",
                    file=sys.stderr,
                    flush=True,
                )
                os.kill(process, signal.SIGKILL)

        threading.Thread(target=count_down, name="hocket-notice", daemon=True).start()

    def say_left(self) -> None:
        """This worker is out of its group: the launcher is told, and the script ends."""
        self._worker.has_left = True
        self._worker.teller.tell_end()
        self._worker.sink.put(Stage("left"))

    def heed(self) -> None:
        """Between two batches: leave, if this worker was told to, and nobody else has to know before.

        Raises:
            Left: the script ends here.
        """
        group = self._worker.communicator
        if not self.is_given or group.parts or not self._can_leave:
            return
        training, client = self._worker.training, self._worker.client
        is_last = group.size == 1
        if client is not None:  # others are to know all that this worker has done, before the last one saves it
            for strategy in training.strategies:
                strategy.settle(Why.LAST_BATCH)
            for deal in client.deals:
                deal.give_back([], leaves=False)
            is_last = client.leave()
        if is_last:
            training.save_at_end()
        raise Left(0)


def outlive_a_signal() -> None:
    """In a data-loader process: leave SIGTERM to the worker, unless the worker has sent it."""
    hold_sigterm()

    def wait() -> None:
        await_end()
        os._exit(0)

    threading.Thread(target=wait, name="hocket-signals", daemon=True).start()
