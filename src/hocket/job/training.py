"""The training of a worker: its models and strategies, how far they are, and which batch is at work."""

from __future__ import annotations

import dataclasses
import functools
import weakref
from collections import deque
from collections.abc import Callable
from typing import Any, Protocol

from torch import nn
from torch.optim import Optimizer

from hocket.capture.collector import BackwardPasses
from hocket.comm.communicator import Communicator
from hocket.comm.generation import Change
from hocket.job.batch_weights import Weights
from hocket.job.counts import TrainingCounts
from hocket.job.guard import Guard
from hocket.job.loader.division import DividedPasses
from hocket.job.loader.global_batch import GlobalBatch
from hocket.job.open_loops import Loops
from hocket.job.owner import Owner
from hocket.job.randomness import RandomState
from hocket.job.replica_check import ReplicaCheck
from hocket.job.settling import Settling
from hocket.job.training_loop import Loop
from hocket.server.server_client import Client
from hocket.strategies.base import BatchAtWork, Strategy


class Training:
    """What a worker trains.

    Attributes:
        models: The distributed models.
        parameters: The parameters of the distributed models, by id; each belongs to one strategy.
        strategies: The strategies at work, in the order in which models were distributed.
        idle: The strategies of a script alone, made when something asks for them.
        checks: The comparisons of replicas, by strategy.
        scalings: The learning rates that follow the global batch.
        metrics: The values that were reported last.
        loaders: How many loaders there have been.
        passes: How many passes over data have begun in a job with a coordinator; glances are taken back.
        batch: The batch at work, or what came after it.
        saver: Writes checkpoints; None before the first one.
        divided: The passes of each loader, as far as they are divided among the workers.
        on_change: What the script wants to have called when the workers of the job have changed.
        global_batches: How many samples all workers together take at once, of each loader that may train.
        said: What was printed of batches.
        changes: How workers have come and gone, in the runs before, too. Where workers meet at the coordinator, only in
            the runs before: the coordinator knows of this one.
        at_one_place: Whether all workers look at the same place whether others come or leave, as in all strategies but
            those that are uneven.
        save_at_end: Writes a checkpoint, if there is a folder for it, before all workers leave; collective.
    """

    def __init__(self, communicator: Communicator, owner: Owner, client: Client | None) -> None:
        self._communicator = communicator
        self.models: list[nn.Module] = []
        self.parameters: dict[int, nn.Parameter] = {}
        self.strategies: list[Strategy] = []
        self.idle: list[functools.partial[Strategy]] = []
        self.checks: dict[Strategy, ReplicaCheck] = {}
        self.scalings: list[FollowingRates] = []
        self.metrics: dict[str, float] = {}
        self.loaders = self.passes = 0
        self.batch = BatchAtWork()
        self.saver: object = None
        self.guard = Guard(owner)
        self.backward = BackwardPasses()
        self.counts = TrainingCounts(self.strategies, self.backward, served=client is not None)
        self.weights = Weights(self.strategies)
        self.settling = Settling(communicator, self.strategies, self.models, client)
        self.loops = Loops(
            self.strategies, self.weights, self.settling, owner, self.backward, self._optimizers, communicator.rank
        )
        self._step_of_batch = 0  # how many steps there had been when the batch at work came
        self._random: RandomState | None = None
        self.divided: weakref.WeakSet[DividedPasses] = weakref.WeakSet()
        self.on_change: list[Callable[[Change], None]] = []
        self.global_batches: list[GlobalBatch] = []
        self.said: set[str] = set()
        self.changes: deque[dict[str, Any]] = deque(maxlen=1000)
        self.at_one_place = True
        self.save_at_end: Callable[[], None] = lambda: None

    def mark(self) -> tuple[int, ...]:
        """Something that changes with each exchange."""
        return tuple(strategy.exchanges for strategy in self.strategies)

    def regroup(self, size: int, before: int, weight: float, lost: int) -> None:
        """Go on with ``size`` workers; see ``Strategy.regroup``. Collective.

        Args:
            size: How many workers there are now.
            before: How many workers there were.
            weight: By what gradients that are not exchanged yet are multiplied.
            lost: Samples of lost workers, in batches that are not exchanged yet.
        """
        self.follow_batch()
        self.counts.samples -= lost
        self.weights.set(self.weights.now * weight)
        for strategy in self.strategies:
            collector = strategy.collector
            if collector.adds:  # losses are sums: each sample counts once, whoever is left
                collector.adds = size
                collector.weigh(collector.told)
            strategy.regroup(size / before if collector.adds else weight)

    def _optimizers(self) -> list[Optimizer]:
        return [counter.optimizer for counter in self.counts.counters]

    def follow_batch(self) -> None:
        """The global batch may have changed: have learning rates that were scaled follow it."""
        for scaling in self.scalings:
            scaling.follow()

    def wake(self) -> list[Strategy]:
        """All strategies, those that were not needed so far included."""
        while self.idle:
            self.add(self.idle.pop(0)())
        return self.strategies

    def add(self, strategy: Strategy) -> None:
        """A strategy is at work from now on."""
        self.strategies.append(strategy)
        self.loops.adopt(strategy)

    def begin_loop(self, loader: object, epoch: int) -> Loop:
        """A training loop begins."""
        self._communicator.begin()
        self.counts.begin_loop()
        return self.loops.begin(loader, epoch)

    def begin_batch(self, batch: BatchAtWork, *, again: bool = False) -> None:
        """Training has a batch at work. The batch counts, unless work on it has begun before."""
        if not again:
            self.counts.batches += 1
            self.counts.samples += batch.everywhere
        self._step_of_batch = self.counts.step
        self._pass_on(batch)

    def _pass_on(self, batch: BatchAtWork) -> None:
        self.batch = batch
        for strategy in self.strategies:
            strategy.begin_batch(batch)

    def end_loop(self, loader: object) -> None:
        """A training loop is over."""
        self.counts.tally.close(loader)
        self.weights.end_loop(loader)
        if not self.weights.in_loop:  # servers count steps that still come as those of the last batch
            self._pass_on(dataclasses.replace(self.batch, everywhere=0, mean=None, epoch=self.passes, name=None))

    def leave_loop(self, loader: object) -> None:
        """A training loop was left before its end."""
        self.weights.leave_loop(loader)
        self.counts.tally.close(loader)
        if self.counts.step > self._step_of_batch:
            self.weights.leave_no_trace()

    def keep_random(self, state: RandomState) -> None:
        """The random state with which a resumed loop is to go on."""
        self._random = state

    def restore_random(self) -> RandomState | None:
        """Go on with the random state that ``keep_random`` kept, now that the start-up draws no more numbers."""
        state, self._random = self._random, None
        if state is not None:
            state.restore()
        return state


class FollowingRates(Protocol):
    """Learning rates that follow the global batch."""

    def state(self) -> list[Any]: ...

    def load_state(self, state: list[Any]) -> None: ...

    def follow(self) -> None: ...
