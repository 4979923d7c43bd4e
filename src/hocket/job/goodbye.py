"""How a worker ends: it tells the launcher, and the workers that wait for it."""

from __future__ import annotations

import atexit
import contextlib
import os
import signal
import sys
import traceback
from types import TracebackType
from typing import TYPE_CHECKING

from hocket import spans
from hocket.errors import HocketError
from hocket.events import Stage
from hocket.job.replica_check import describe_last

if TYPE_CHECKING:
    from hocket.job.worker import Worker

_GRACE = 2.0  # seconds in which collectives end that the script has begun, and not waited for


def say_goodbye(worker: Worker) -> None:
    """Tell waiting ranks how this one ended: a finished script is not a crashed one."""
    failed = False
    previous = sys.excepthook
    process = os.getpid()

    def on_exception(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
        nonlocal failed
        failed = True
        words = "" if _can_say() else "".join(traceback.format_exception(kind, error, trace))
        with contextlib.suppress(Exception):  # the stream may be closed
            previous(kind, error, trace)
        if os.getpid() != process:  # a child that the script has forked is no worker
            return
        spans.flush()
        # Before others notice: else a rank that fails only because of this one would be taken for the cause.
        worker.sink.put(Stage("failed", -signal.SIGINT if issubclass(kind, KeyboardInterrupt) else 1, words))
        # Threads of the script may keep the process alive for long; nobody should wait for them.
        worker.has_left = True
        worker.communicator.leave(failed)
        if worker.communicator.nccl is not None:
            worker.communicator.nccl.abort()

    def on_exit() -> None:
        nonlocal failed
        if os.getpid() != process:
            return
        if not failed and not worker.has_left:
            try:
                worker.training.loops.end_script()  # others may wait for this worker
                for what in worker.groups.unfinished(_GRACE):
                    print(
                        f"hocket: rank {worker.config.rank} ends while {what} is under way, and will not take part in "
                        "it: call wait() on what the call returned",
                        file=sys.stderr,
                        flush=True,
                    )
            except HocketError as error:
                failed = True
                print(f"hocket: at the end of rank {worker.config.rank}: {error}", file=sys.stderr, flush=True)
                worker.sink.put(Stage("failed", 1))
        worker.teller.tell_end()
        if not failed and not worker.has_left:
            last = describe_last(worker.training.checks.values())
            if last is not None:
                worker.sink.put(last)
        worker.has_left = True
        worker.communicator.leave(failed)
        if worker.communicator.nccl is not None:
            worker.communicator.nccl.close()

    sys.excepthook = on_exception
    atexit.register(on_exit)


def _can_say() -> bool:
    """Whether there is a standard error stream, which the launcher hears."""
    try:
        sys.stderr.flush()
        os.fstat(2)
    except (AttributeError, OSError, ValueError):  # there is no stream, or it is closed
        return False
    return True
