"""This process as a worker: who it is, whom it talks to, and how it says goodbye."""

from __future__ import annotations

import atexit
import dataclasses
import faulthandler
import functools
import json
import multiprocessing
import os
import sys
from collections.abc import Callable
from typing import Any, ParamSpec, Protocol, TypeVar, cast

from torch import nn
from torch.nn.modules.module import register_module_module_registration_hook
from torch.optim import Optimizer
from torch.optim.optimizer import register_optimizer_step_pre_hook

from hocket import config as configuration
from hocket import spans
from hocket.comm.alone import AloneCommunicator
from hocket.comm.communicator import Communicator, calling
from hocket.config import Config
from hocket.errors import CheckpointError, UsageError
from hocket.events import Happening, NoSink, PipeSink, Sink, Stage
from hocket.job import copies, devices, rendezvous
from hocket.job.first_step import FirstStep
from hocket.job.goodbye import say_goodbye
from hocket.job.guard import Guard
from hocket.job.loop import Loop
from hocket.job.loops import Loops
from hocket.job.owner import Owner
from hocket.job.randomness import RandomState, reseed
from hocket.job.replicas import ReplicaCheck
from hocket.job.telling import Tally, Teller
from hocket.server.client import Client
from hocket.server.communicator import ServedCommunicator
from hocket.strategies import collector
from hocket.strategies.base import Strategy
from hocket.transport.gate import STACK_SIGNAL

P = ParamSpec("P")
T = TypeVar("T")


class Runtime(Teller):
    """The worker that this process is.

    Attributes:
        parameters: Of the distributed models, by id; each belongs to one strategy.
        strategies: At work, in the order in which models were distributed.
        idle: Those of a script alone, made when something asks for them.
        loaders: How many there have been.
        weight: What backward passes count now, relative to those of other ranks.
        samples: Samples that training has seen so far, of all ranks; ``batches`` likewise.
        metrics: The values that were reported last.
    """

    def __init__(self, config: Config, communicator: Communicator, sink: Sink | None = None) -> None:
        super().__init__()
        self.config, self.communicator = config, communicator
        self.models: list[nn.Module] = []
        self.parameters: dict[int, nn.Parameter] = {}
        self.strategies: list[Strategy] = []
        self.idle: list[functools.partial[Strategy]] = []
        self.counters: list[StepCounter] = []
        self.owner = Owner()
        self.guard = Guard(self.owner)
        self.first_step = FirstStep(self)
        self.has_met = self.resumes = False  # whether the script has made calls of all ranks; has called resume()
        self.checks: dict[Strategy, ReplicaCheck] = {}
        self.warmups: list[Warmup] = []
        self.saver: object = None  # of checkpoints, when there has been one
        self.asks_for_checkpoints = False  # the training loop says when a step is complete
        self.loaders = self.batches = self.samples = 0
        self.metrics: dict[str, float] = {}
        self.weight = 1.0
        self.sink: Sink = sink or NoSink()
        self._agreed: int | None = None
        self.tally = Tally(lambda: collector.passes() + sum(counter.steps for counter in self.counters))
        self.loops = Loops(communicator, self.strategies, self.models, self.set_weight, self.owner, self.client)
        self._weights: dict[int, float] = {}
        self._left: list[int] = []  # loops that were left, whose last batch may still be at work
        self._step_of_batch = 0
        self._random: RandomState | None = None
        self._has_begun = False
        self.undo: Callable[[], None] | None = None  # what a repeated batch has left in buffers and random numbers
        if config.checkpoint is not None and config.rank == 0:
            atexit.register(self.first_step.look_back)

    @property
    def client(self) -> Client | None:
        """To the servers, in a job that has some."""
        return self.communicator.client if isinstance(self.communicator, ServedCommunicator) else None

    @property
    def together(self) -> Communicator:
        """Those who write a checkpoint together: with servers, rank 0 does so alone, and nobody waits."""
        return self.communicator if self.client is None else AloneCommunicator()

    @property
    def step(self) -> int:
        """Steps that the optimizer has taken (the busiest one, if there are several)."""
        return max((counter.steps for counter in self.counters), default=self.batches)

    @property
    def common_step(self) -> int:
        """The same on all ranks: batches where one may skip a step alone; what was agreed on where they are uneven."""
        if self._agreed is not None:
            return self._agreed // self.config.size
        return max((s.batches for s in self.strategies if s.skips_alone), default=self.step)

    def restart(self, step: int) -> None:
        """Go on from a checkpoint of that step."""
        if self.client is None and any(strategy.is_uneven for strategy in self.strategies):
            self._agreed = step * self.config.size

    def agree(self, batches: int, samples: int) -> None:
        """All ranks together have had so many batches more, and the others so many samples."""
        self._agreed = (self._agreed or 0) + batches
        self.samples += samples

    def wake(self) -> list[Strategy]:
        """All strategies, those that were not needed so far included."""
        while self.idle:
            self.add(self.idle.pop(0)())
        return self.strategies

    def add(self, strategy: Strategy) -> None:
        """A strategy is at work from now on."""
        self.strategies.append(strategy)
        self.loops.adopt(strategy)

    def weigh(self, loader: object, weight: float | None) -> None:
        """What the batch of a training loop counts, relative to those of other ranks; None when the loop is over.

        Of loops that go on at the same time and disagree, the mean counts.
        """
        for left in self._left:
            self._weights.pop(left, None)
        self._left.clear()
        if weight is None:
            self.tally.close(loader)
            self._weights.pop(id(loader), None)
        else:
            self._weights[id(loader)] = weight
        self.set_weight(sum(self._weights.values()) / len(self._weights) if self._weights else 1.0)
        if not self._weights:
            for strategy in self.strategies:
                strategy.begin_batch(0)

    def leave_loop(self, loader: object) -> None:
        """A training loop was left before its end; what its last batch counts holds until the next one comes."""
        self._left.append(id(loader))
        self.tally.close(loader)
        self.tell_again()
        if self.step > self._step_of_batch:
            self.leave_no_trace()

    @property
    def repeats(self) -> bool:
        """Whether the batch at work is one that only keeps this rank in step."""
        return bool(self._weights) and not any(self._weights.values())

    def set_weight(self, weight: float) -> None:
        """What backward passes count from now on, until the next batch."""
        if weight != self.weight:
            self.weight = weight
            for strategy in self.strategies:
                strategy.collector.weigh(weight)

    def count_batch(self, samples: int, mean: float | None = None, *, again: bool = False) -> None:
        """Training has a batch at work; ``samples`` and ``mean`` are as for ``Strategy.begin_batch``.

        It counts, unless work on it has begun before.
        """
        if not again:
            self.batches += 1
            self.samples += samples
        self._step_of_batch = self.step
        for strategy in self.strategies:
            strategy.begin_batch(samples, mean)

    def begin_loop(self, loader: object, epoch: int) -> Loop:
        """A training loop begins."""
        if not self._has_begun and self.config.rank == 0:
            self.sink.put(Happening("training began", {"samples of a pass": getattr(loader, "pass_samples", None)}))
        self._has_begun = True
        return self.loops.begin(loader, epoch, lambda: [counter.optimizer for counter in self.counters])

    def end_epoch(self, loop: Loop) -> None:
        """A training loop has come to the end of its loader; collective."""
        self.loops.finish(loop, alone=self.client is not None)
        self.tell_again()  # now that its last step is done

    def on_rank_0(self, work: Callable[[], T], communicator: Communicator | None = None) -> T:
        """What ``work`` returns on rank 0 (plain data), or its error, on all ranks; collective."""
        communicator = communicator or self.communicator
        told = b""
        if communicator.rank == 0:
            try:
                told = json.dumps([work(), ""]).encode()
            except (CheckpointError, OSError) as error:
                told = json.dumps([None, str(error)]).encode()
        result, failure = json.loads(communicator.gather_bytes(told)[0])
        if failure:
            topology = communicator.topology
            raise CheckpointError(failure if len(topology.hosts) == 1 else f"on {topology.name_of(0)}: {failure}")
        return cast(T, result)

    def leave_no_trace(self) -> None:
        """The step on a repeated batch is over."""
        undo, self.undo = self.undo, None
        if undo is not None:
            undo()

    def say_what_is_owed(self) -> None:
        """The script ends: has it ever seen the model that its strategies stand for?"""
        if self.loops.owed and self.config.rank == 0 and self.config.size > 1:
            print(
                f"hocket: the script ended without the end of its training loop, {self.loops.owed}: call "
                "hocket.settle() on all ranks before the model is saved or evaluated",
                file=sys.stderr,
                flush=True,
            )

    def keep_random(self, state: RandomState) -> None:
        """The random state with which a resumed loop is to go on."""
        self._random = state

    def restore_random(self) -> RandomState | None:
        """Go on with it, now that nothing of the start-up draws any more."""
        state, self._random = self._random, None
        if state is not None:
            state.restore()
        return state


class Warmup(Protocol):
    """A gradual start of the learning rate."""

    def state(self) -> list[Any]: ...

    def load_state(self, state: list[Any]) -> None: ...


class StepCounter:
    """Counts the steps of one optimizer, those that are skipped left out."""

    def __init__(self, optimizer: Optimizer, steps: int = 0) -> None:
        self.optimizer, self.steps = optimizer, steps
        optimizer.register_step_post_hook(self._count)

    def _count(self, *_: object) -> None:
        self.steps += 1


_current: Runtime | None = None


def _before_step(optimizer: Optimizer, *_: object) -> None:
    if _current is not None:
        _current.first_step.look(optimizer)
        _current.guard.before_step(optimizer)


def _before_child(parent: nn.Module, _: str, child: nn.Module | None) -> None:
    if _current is not None:
        _current.guard.look_at_child(parent, child)


register_optimizer_step_pre_hook(_before_step)
register_module_module_registration_hook(_before_child)


def _be_no_worker() -> None:
    """In a child that was forked: what it does to a model is its own, and exchanged with nobody."""
    if _current is not None:
        for strategy in _current.strategies:
            strategy.collector.rests = True


os.register_at_fork(after_in_child=_be_no_worker)


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
    elif not config.launched:
        copies.warn(configuration.environment())
    _have_stacks_printed()
    sink: Sink = PipeSink(config.events) if config.events is not None else NoSink()
    if config.timeline:
        _keep_spans(config, sink)
    sink.put(Stage("joining"))
    with spans.span(spans.WAIT, "join the other workers"):
        communicator = rendezvous.join(config)
    if not config.local_size:
        local = communicator.topology
        config = dataclasses.replace(config, local_rank=local.local_rank, local_size=len(local.local))
    _current = Runtime(config, communicator, sink)
    if config.seed is not None:
        reseed(config.seed)
    sink.put(Stage("joined"))
    if config.size > 1:
        devices.take(config.local_rank)
    if config.size > 1 or config.servers:
        say_goodbye(_current)
    elif config.events is not None:
        atexit.register(_current.tell_again)


def _keep_spans(config: Config, sink: Sink) -> None:
    if config.events is None:
        if config.rank == 0:
            print("hocket: HOCKET_TIMELINE is ignored: only hocket run makes timelines", file=sys.stderr)
        return
    spans.start(sink)
    atexit.register(spans.stop)


def current() -> Runtime:
    """The runtime of this process."""
    if _current is None:
        raise UsageError("Hocket is not initialised: call hocket.init() at the beginning of the script")
    return _current


def meeting() -> Runtime:
    """The runtime of this process, before something that all ranks do together."""
    runtime = current()
    runtime.owner.check("a call that all ranks make together")
    with calling(""):
        runtime.loops.meet()
    return runtime


def together(call: str) -> Callable[[Callable[P, T]], Callable[P, T]]:
    """For what a script calls on all ranks: it is named so in messages, and one thread makes all such calls."""

    def decorate(function: Callable[P, T]) -> Callable[P, T]:
        @functools.wraps(function)
        def named(*args: P.args, **kwargs: P.kwargs) -> T:
            runtime = current()
            runtime.owner.check(call)
            runtime.has_met = True
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
    meeting().loops.settle()


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
