"""This process as a worker: who it is, whom it talks to, and how it says goodbye."""

from __future__ import annotations

import atexit
import faulthandler
import multiprocessing
import sys
from collections.abc import Callable
from types import TracebackType

from torch import nn

from hocket import config as configuration
from hocket.comm.communicator import Communicator
from hocket.config import Config
from hocket.errors import UsageError
from hocket.events import NoSink, PipeSink, Sink, Stage
from hocket.job import rendezvous
from hocket.strategies.base import Strategy
from hocket.transport.gate import STACK_SIGNAL


class Runtime:
    """The worker that this process is."""

    def __init__(self, config: Config, communicator: Communicator, sink: Sink | None = None) -> None:
        self.config, self.communicator = config, communicator
        self.models: list[nn.Module] = []
        self.strategies: list[Strategy] = []
        self.idle: list[Callable[[], Strategy]] = []  # of a script alone, made when something asks for them
        self.weight = 1.0
        self.sink: Sink = sink or NoSink()

    def wake(self) -> list[Strategy]:
        """All strategies, those that were not needed so far included."""
        while self.idle:
            self.strategies.append(self.idle.pop(0)())
        return self.strategies

    def weigh(self, weight: float) -> None:
        """What the backward passes from now on count, relative to those of other ranks; 1 is usual."""
        if weight != self.weight:
            self.weight = weight
            for strategy in self.strategies:
                strategy.collector.weigh(weight)


_current: Runtime | None = None


def init() -> None:
    """Become a worker of the job that launched this process, or be alone if nothing did.

    Blocks until all workers are here. A second call does nothing.
    """
    global _current
    if _current is not None:
        return
    config = configuration.read()
    if multiprocessing.current_process().name != "MainProcess":
        config = Config()  # a data-loader process that runs the script again is no worker
    _have_stacks_printed()
    sink: Sink = PipeSink(config.events) if config.events is not None else NoSink()
    sink.put(Stage("joining"))
    _current = Runtime(config, rendezvous.join(config), sink)
    sink.put(Stage("joined"))
    if config.size > 1:
        _say_goodbye(_current)


def current() -> Runtime:
    """The runtime of this process."""
    if _current is None:
        raise UsageError("Hocket is not initialised: call hocket.init() at the beginning of the script")
    return _current


def rank() -> int:
    """The number of this worker in the job, from 0."""
    return current().config.rank


def size() -> int:
    """How many workers the job has."""
    return current().config.size


def local_rank() -> int:
    """The number of this worker on its host, from 0."""
    return current().config.local_rank


def _have_stacks_printed() -> None:
    """On a fatal signal, and when another rank asks for it."""
    try:
        faulthandler.enable(file=2)
        if hasattr(faulthandler, "register"):
            faulthandler.register(STACK_SIGNAL, file=2, all_threads=True)
    except (AttributeError, OSError, ValueError, RuntimeError):
        pass  # there is no stderr to print them to


def _say_goodbye(runtime: Runtime) -> None:
    """Tell waiting ranks how this one ended: a finished script is not a crashed one."""
    failed = False
    previous = sys.excepthook

    def on_exception(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
        nonlocal failed
        failed = True
        previous(kind, error, trace)
        # Threads of the script may keep the process alive for long; nobody should wait for them.
        runtime.communicator.leave(failed)
        runtime.sink.put(Stage("failed"))

    sys.excepthook = on_exception
    atexit.register(lambda: runtime.communicator.leave(failed))
