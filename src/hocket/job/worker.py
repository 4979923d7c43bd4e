"""This process as a worker: who it is, whom it talks to, and how it says goodbye."""

from __future__ import annotations

import atexit
import dataclasses
import faulthandler
import functools
import multiprocessing
import os
import sys
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import ParamSpec, TypeVar

from torch import nn
from torch.nn.modules.module import register_module_module_registration_hook
from torch.optim import Optimizer
from torch.optim.optimizer import register_optimizer_step_pre_hook

from hocket import config as configuration
from hocket import spans, surroundings
from hocket.comm.alone import AloneCommunicator
from hocket.comm.communicator import Communicator, calling
from hocket.comm.coordinator_group import MeetingCommunicator
from hocket.comm.generation import Change, Left
from hocket.comm.groups import Groups
from hocket.config import Config
from hocket.errors import UsageError
from hocket.events import NoSink, PipeSink, Sink, Stage
from hocket.job import devices, forgotten, rendezvous
from hocket.job.forgotten import Forgotten
from hocket.job.goodbye import say_goodbye
from hocket.job.notice import Notice
from hocket.job.owner import Owner
from hocket.job.randomness import reseed
from hocket.job.regrouping import follow_changes
from hocket.job.telling import Teller
from hocket.job.training import Training
from hocket.server.server_client import Client
from hocket.transport.gate import STACK_SIGNAL

P = ParamSpec("P")
T = TypeVar("T")


class Worker:
    """A worker of a job: who it is, whom it talks to, and how it says goodbye.

    Attributes:
        config: What the job has told this worker.
        communicator: The communicator of all workers.
        sink: Takes what the launcher is to hear of this worker.
        owner: The thread that makes the calls which all ranks make together.
        training: What this worker trains.
        groups: What this worker does together with some of the others, or with all of them meanwhile.
        teller: Tells the launcher of the training.
        forgotten: Looks for what the script has forgotten.
        has_left: Whether this worker has said goodbye: loops that end now have nobody to tell.
        notice: Knows whether this worker has to leave.
    """

    def __init__(self, config: Config, communicator: Communicator, sink: Sink | None = None) -> None:
        self.config, self.communicator = config, communicator
        self.sink: Sink = sink or NoSink()
        self.owner = Owner()
        self.training = Training(communicator, self.owner, self.client)
        self.groups = Groups(communicator)
        self.teller = Teller(self)
        self.forgotten = Forgotten(self)
        self.has_left = False
        self.notice = Notice(self)
        follow_changes(self)
        _all.add(self)

    @property
    def client(self) -> Client | None:
        """The connection to the servers, in a job that has some."""
        return self.communicator.client if isinstance(self.communicator, MeetingCommunicator) else None

    @property
    def together(self) -> Communicator:
        """The group that writes a checkpoint together; with servers, rank 0 alone, for which nobody waits."""
        return self.communicator if self.client is None else AloneCommunicator()

    def look(self) -> None:
        """Between two batches: go on with the workers that there are, or leave them, if that is asked.

        Raises:
            Left: this worker leaves, and its script ends.
        """
        try:
            self.communicator.look()
            self.notice.heed()
        except Left:
            self.notice.say_left()
            raise


_spare: Config | None = None  # what a process was told that stands by until it is needed
_of_process: Worker | None = None  # the worker in threads that have no context of their own
_of_context: ContextVar[Worker | None] = ContextVar("worker", default=None)
_all: weakref.WeakSet[Worker] = weakref.WeakSet()


def find() -> Worker | None:
    """The worker that runs this code: that of the context, else that of the process, if there is one."""
    return _of_context.get() or _of_process


def current() -> Worker:
    """The worker that runs this code; see ``find``."""
    if _spare is not None:
        _take_place()
    worker = find()
    if worker is None:
        raise UsageError("Hocket is not initialised: call hocket.init() at the beginning of the script")
    return worker


def become(worker: Worker | None) -> None:
    """Make this process ``worker`` from now on, in all threads; None if it is to be no worker any more."""
    global _of_process
    _of_process = worker


@contextmanager
def acting_as(worker: Worker) -> Iterator[Worker]:
    """Within this context, and not in others or in new threads, the code is run by ``worker``.

    So several workers can live in one process, one context or thread for each.
    """
    token = _of_context.set(worker)
    try:
        yield worker
    finally:
        _of_context.reset(token)


def _before_step(optimizer: Optimizer, *_: object) -> None:
    worker = find()
    if worker is not None:
        worker.forgotten.look(optimizer)
        worker.training.guard.before_step(optimizer)


def _before_child(parent: nn.Module, _: str, child: nn.Module | None) -> None:
    worker = find()
    if worker is not None:
        worker.training.guard.look_at_child(parent, child)


register_optimizer_step_pre_hook(_before_step)
register_module_module_registration_hook(_before_child)


def _be_no_worker() -> None:
    """In a forked child: be no worker, so that what it does to a model is exchanged with nobody."""
    for worker in _all:
        for strategy in worker.training.strategies:
            strategy.collector.rests = True


os.register_at_fork(after_in_child=_be_no_worker)


def init() -> None:
    """Become a worker of the job that launched this process, or be alone if nothing did.

    Blocks until all workers are here. A second call does nothing. In a process that stands by for a lost worker, the
    first call whose result depends on the rank blocks until the process is needed.
    """
    global _spare
    if find() is not None or _spare is not None:
        return
    config = configuration.read()
    if multiprocessing.current_process().name != "MainProcess":
        config = Config()  # a data-loader process that runs the script again is no worker
    elif not config.launched:
        config = _of_surroundings(config)
    _have_stacks_printed()
    sink: Sink = PipeSink(config.events) if config.events is not None else NoSink()
    if config.timeline:
        _keep_spans(config, sink)
    if config.seed is not None:
        reseed(config.seed)
    if config.spare_fd is not None:
        sink.put(Stage("standing by"))
        _spare = config
        return
    _enter(config, sink)


def _of_surroundings(config: Config) -> Config:
    """What this process is told by what has started it as one of several; ``config`` if nothing has."""
    environ = configuration.environment()
    found = surroundings.find(environ)
    if found is None:
        forgotten.warn_of_copies(environ)
        return config
    told = found.variables(environ)
    if found.number == 0:
        where = f"{told['MASTER_ADDR']}:{told['MASTER_PORT']}"
        line = (
            f"hocket: {found.sign}: {found.count} workers of one job, which meet at {where}, open to all who reach it"
        )
        print(line, file=sys.stderr, flush=True)
    return configuration.read({**environ, **told})


def _take_place() -> None:
    """Wait until this process, which stands by, is needed, and become the worker that it is to replace."""
    global _spare
    assert _spare is not None and _spare.spare_fd is not None
    with os.fdopen(_spare.spare_fd) as told:
        numbers = [int(word) for word in told.readline().split()]
    if not numbers:
        os._exit(0)  # the job is over
    sink: Sink = PipeSink(_spare.events) if _spare.events is not None else NoSink()
    config, _spare = configuration.take_place(_spare, *numbers), None
    _enter(config, sink)


def _enter(config: Config, sink: Sink) -> None:
    """Join the other workers."""
    sink.put(Stage("joining"))
    with spans.span(spans.WAIT, "join the other workers"):
        communicator = rendezvous.join(config)
    if not config.local_size:
        local = communicator.topology
        config = dataclasses.replace(config, local_rank=local.local_rank, local_size=len(local.local))
    worker = Worker(config, communicator, sink)
    become(worker)
    if config.checkpoint is not None and config.rank == 0:
        atexit.register(worker.forgotten.look_back)
    if not config.newcomer:  # a newcomer has joined when it has what the others have
        sink.put(Stage("joined"))
    if config.job is not None:
        worker.notice.watch()
    if config.size > 1:
        devices.take(config.local_rank)
    if config.size > 1 or config.servers:
        say_goodbye(worker)
    elif config.events is not None:
        atexit.register(worker.teller.tell_again)


def _keep_spans(config: Config, sink: Sink) -> None:
    if config.events is None:
        if config.rank == 0:
            print("hocket: HOCKET_TIMELINE is ignored: only hocket run makes timelines", file=sys.stderr)
        return
    spans.start(sink)
    atexit.register(spans.stop)


def meeting(call: str = "the next call that all ranks make") -> Worker:
    """The worker that runs this code, before something that all ranks do together.

    Args:
        call: What the script calls, for the message that a loop is settled late; empty if it asks for just that.
    """
    worker = current()
    worker.owner.check("a call that all ranks make together")
    with calling(""):
        worker.training.loops.meet(call)
    return worker


def together(call: str) -> Callable[[Callable[P, T]], Callable[P, T]]:
    """Decorate a function that a script calls on all ranks: messages name it ``call``, and one thread must call it."""

    def decorate(function: Callable[P, T]) -> Callable[P, T]:
        @functools.wraps(function)
        def named(*args: P.args, **kwargs: P.kwargs) -> T:
            worker = current()
            worker.owner.check(call)
            worker.forgotten.has_met = True
            with calling(call):
                return function(*args, **kwargs)

        return named

    return decorate


@together("hocket.settle()")
def settle() -> None:
    """Let every rank have the model that its strategy stands for, to be evaluated or saved; every rank must call it.

    The end of a loop over a loader does so by itself, and so does ``break``. Call it where Hocket cannot see that
    training pauses: when batches are taken with ``next()``, in a script without a loader, or after an exception that
    was caught. Training may go on afterwards; a round of local steps begins anew.
    """
    meeting("").training.loops.settle()


def on_change(function: Callable[[Change], None]) -> Callable[[Change], None]:
    """Have ``function`` called on each worker that is left when a worker was lost, with what has changed.

    Rank, size, data and exchanges are those of the workers that are left by then. The function may not call what all
    ranks do together: the step in which the worker was lost goes on afterwards. May be used as a decorator. With
    servers, gossip and Hogwild, where ranks stay as they are, nothing is called.

    Args:
        function: Takes a change: its ``generation``, the new ``rank`` and ``size``, and the numbers of the ``lost``
            workers as they were when the job began.
    """
    current().training.on_change.append(function)
    return function


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
    """Have stacks printed on a fatal signal, and when another rank asks for them."""
    try:
        faulthandler.enable(file=2)
        if hasattr(faulthandler, "register"):
            faulthandler.register(STACK_SIGNAL, file=2, all_threads=True)
    except (AttributeError, OSError, ValueError, RuntimeError):
        pass  # there is no stderr to print them to
