"""Batches that workers are dealt as they get ready: the contract, and the coordinator's dealer behind it.

Used with parameter servers, gossip and hogwild. A loader whose workers are in step without a dealer needs none of this.
"""

from __future__ import annotations

import contextlib
import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable
from typing import Any, Protocol

from torch.utils.data import DataLoader

from hocket import spans
from hocket.coordinator.dealer_client import Deal
from hocket.errors import HocketError
from hocket.job.loader.passes import BatchSource, Counts, Pass, Plan
from hocket.job.training_loop import Loop
from hocket.job.worker import Worker
from hocket.server.server_client import Client
from hocket.strategies.base import BatchAtWork, Why


class DealtBatches(ABC):
    """How one loader's batches are dealt to workers that may advance unevenly.

    Attributes:
        deal: Where this worker's batches come from; None if each worker has data of its own.
    """

    deal: Dealt | None

    @property
    def queue(self) -> int | None:
        """The number of the queue that all workers share, if they share one."""
        return None

    @property
    def in_step(self) -> bool:
        """Whether all workers take the same steps all the same, each on its share of a global batch."""
        return False

    @abstractmethod
    def begin_pass(self, plan: Plan) -> None:
        """A training loop begins."""

    def give(self, counts: Counts) -> None:  # noqa: B027 - may not matter
        """The script gets a batch, on which it may train later."""

    def begin(self, now: Pass, counts: Counts, *, is_first: bool) -> None:
        """Work on a batch of a pass begins, for the first time or again, perhaps when the loop is over."""
        if now.loop is not None and now.loop.is_late:
            self.begin_late(counts)
        elif is_first:
            now.batches, now.samples = self.begin_step(counts, now.batches, now.samples)
        else:
            self.begin_again(counts)

    @abstractmethod
    def begin_step(self, counts: Counts, batches: int, samples: int) -> tuple[int, int]:
        """Work on a batch begins.

        Args:
            counts: What is known of the batch.
            batches: Batches of this pass so far, with this one.
            samples: Samples of this pass so far, with those of this batch.

        Returns:
            The same two numbers, with what others have taken meanwhile, as far as that is known.
        """

    def begin_again(self, counts: Counts) -> None:  # noqa: B027 - may not matter
        """Work on a batch begins, which had begun before work on another one."""

    def begin_late(self, counts: Counts) -> None:
        """Work on a batch begins that the script had when its loop was over."""
        self.begin_step(counts, 0, 0)

    @abstractmethod
    def end_step(self, loop: Loop) -> None:
        """The loop is done with its batches, but for those that it has not trained on; may be collective."""

    def pause(self) -> None:  # noqa: B027 - there may be nothing to do
        """All workers settle in the middle of their loops."""

    def look(self) -> None:  # noqa: B027 - there may be nothing to do
        """All workers are about to begin a pass."""

    @abstractmethod
    def await_more(self, loop: Loop) -> bool:
        """Whether there is a batch for this worker after all; may block, unless the script is ahead of its training."""

    @abstractmethod
    def finish(self, plan: Plan, *, is_late: bool) -> bool:
        """The loop has come to its end, and perhaps the script trains on its last batches only later.

        Returns:
            Whether all batches of the pass were then trained on, by whatever worker.
        """

    @abstractmethod
    def leave(self, plan: Plan, loop: Loop, *, has_trained: bool) -> Callable[[], None] | None:
        """The loop was left.

        Args:
            plan: The plan of the pass.
            loop: The loop, with the batches that the script has not trained on.
            has_trained: Whether the script has trained on any batch of the loop.

        Returns:
            What is still due before all settle, which is collective.
        """

    def place(self) -> Any:
        """How far all workers are in the pass that goes on, as this one knows; None where no newcomer can be told."""
        return None

    def go_on(self, place: Any) -> None:
        """Take batches, as a newcomer, of a pass that goes on, and in which another worker has been at ``place``."""
        raise NotImplementedError

    @abstractmethod
    def restore(self, state: dict[str, Any]) -> None:
        """Go on with the batches of a checkpoint; every worker calls this."""


class Dealt(BatchSource, Protocol):
    """A source of batches whose place in an epoch is known."""

    def state(self) -> dict[str, Any]:
        """Which batches are not done."""


class QueuedBatches(DealtBatches):
    """Batches from the coordinator's dealer, as each worker asks for its next one.

    Attributes:
        deal: The loader's end of the queue that all workers share; None if each worker has data of its own.
    """

    deal: Deal | None

    def __init__(self, worker: Worker, client: Client, original: DataLoader[Any], *, queued: bool, local: bool) -> None:
        self._worker, self._client, self._local = worker, client, local
        self._batch, self._passes = original.batch_size or 1, 0
        self.deal = Deal(client) if queued else None
        self._given: dict[int, BatchAtWork | None] = {}  # batches that the loop has, by their numbers in the queue
        self._before: int | None = None  # batches of the pass in an earlier run
        self._taken, self._pace = 0, 0.0  # batches that all workers have taken since; rounds, where they are in step
        self._inherited: list[Any] | None = None  # for the next pass
        self._own = self._ahead = 0  # batches of the pass that a newcomer has from another worker
        if self.deal is not None:
            self.deal.before_state = self._finish_learned

    @property
    def queue(self) -> int | None:
        return None if self.deal is None else self.deal.number

    @property
    def in_step(self) -> bool:
        strategies = self._worker.training.strategies
        return not self._local and bool(strategies) and all(strategy.spec.in_step for strategy in strategies)

    def begin_pass(self, plan: Plan) -> None:
        """A training loop begins; bounds on staleness hold within it."""
        self._worker.training.passes += 1
        plan.deal = self.deal
        self._passes = self._worker.training.backward.count
        self._before, self._taken, self._pace, self._own = self._inherited or (None, 0, 0.0, 0)
        self._inherited, self._ahead = None, 0
        strategies = self._worker.training.strategies
        if self.deal is not None:
            self.deal.leases = bool(strategies) and all(strategy.spec.leases for strategy in strategies)
            plan.in_step = self.deal.in_step = self.in_step

    def give(self, counts: Counts) -> None:
        self._given[counts.taken - 1] = None

    def _make(self, counts: Counts) -> BatchAtWork:
        training = self._worker.training
        # In step, what a batch counts is in its gradient, as with mirrored.
        is_weighed = self.in_step and counts.everywhere > 0
        weight = 1.0 if is_weighed else counts.here + (training.batch.weight if self._holds else 0.0)
        everyone = counts.everywhere if is_weighed else counts.here
        return BatchAtWork(everyone, epoch=training.passes, weight=weight, in_step=is_weighed)

    def begin_again(self, counts: Counts) -> None:
        number = counts.taken - 1
        if self.deal is None or number not in self._given:
            return
        numbers = [*self._given]
        for other in numbers[numbers.index(number) + 1 :]:  # work on these has not begun after all
            if (later := self._given[other]) is not None:
                later.close()
                self._given[other] = None
        if (batch := self._given[number]) is None:
            batch = self._given[number] = self._make(counts)
            batch.name = self.deal.number, self.deal.epoch, number
        self._worker.training.begin_batch(batch, again=True)

    def begin_late(self, counts: Counts) -> None:
        self._worker.training.begin_batch(self._make(counts))

    def begin_step(self, counts: Counts, batches: int, samples: int) -> tuple[int, int]:
        training = self._worker.training
        if self._before is None:
            self._before = batches - 1
        batch, others = self._make(counts), 0
        everyone = batch.everywhere
        if self.deal is not None:
            number = counts.taken - 1
            batch.name = self.deal.number, self.deal.epoch, number
            self._given[number] = batch
            pace, dealt = training.loops.pace, self.deal.pace(number)
            if dealt is not None:
                if self._own:
                    self._ahead, self._own = self._own + 1 - dealt[0], 0
                pace.own, pace.pace = dealt[0] + self._ahead, dealt[1]
                others = round(everyone * (pace.pace - self._pace)) - everyone  # none, as long as nobody is lost
                self._pace = pace.pace
                batches = self._before + math.ceil(self._pace - 1e-9)
            else:
                others = max(counts.taken - self._taken - 1, 0) * self._batch
                self._taken = max(counts.taken, self._taken)
                batches = self._before + self._taken
                pace.follow(self._taken / self._client.workers)
        batch.everywhere += others
        training.begin_batch(batch)
        return batches, samples + others

    def end_step(self, loop: Loop) -> None:
        """The batches so far are done, whether something was pushed for them or not, unless gradients are kept."""
        if not self._holds:
            self._finish_trained(loop)

    def _finish_trained(self, loop: Loop) -> None:
        waiting = loop.untrained_numbers
        self._finish([number for number in self._given if number not in waiting])

    def _finish(self, numbers: list[int]) -> None:
        """Batches that the loop has had are done, even if a strategy might still tell of them."""
        if self.deal is not None:
            self.deal.finish(numbers)
            for number in numbers:
                if (batch := self._given.pop(number)) is not None:
                    batch.close()

    def _finish_learned(self) -> None:
        """A checkpoint is made, perhaps in the middle of a batch: batches that had a step are done."""
        if not self._holds:
            self._finish(self._learned)

    @property
    def _learned(self) -> list[int]:
        """Batches that had a step."""
        return [number for number, batch in self._given.items() if batch is not None and batch.name is None]

    @property
    def _holds(self) -> bool:
        return any(strategy.holds for strategy in self._worker.training.strategies)

    def pause(self) -> None:
        """All workers settle in the middle of their loops: others are to know which batches are done."""
        if self.deal is not None:
            self._finish_learned()
            self.deal.give_back([], leaves=False)

    def await_more(self, loop: Loop) -> bool:
        if self.deal is None or (loop.waits and (self.in_step or loop.is_torn or loop.lag is None)):
            return False  # where the script is ahead otherwise, batches of a lost worker may come
        for strategy in self._worker.training.strategies:
            strategy.settle(Why.IDLE)
        # Kept gradients go into a later step, for which nobody is to wait.
        self._finish_trained(loop)
        with spans.span(spans.WAIT, "wait for the last batches of others"):
            return self._client.await_batch(self.deal, self._worker.training.passes)

    def finish(self, plan: Plan, *, is_late: bool) -> bool:
        if self.deal is not None and self.deal.mean is not None:
            self._worker.training.loops.pace.complete(self.deal.mean)
        self._leave(plan.counts, was_left=False, is_late=is_late)
        return self.deal is not None

    def leave(self, plan: Plan, loop: Loop, *, has_trained: bool) -> None:
        # Before waiting for others, which may wait for this worker's batches. If it has left, it may have said goodbye.
        with contextlib.suppress(*([HocketError] if self._worker.has_left else [])):
            self._leave(plan.counts, was_left=True)

    def place(self) -> list[Any] | None:
        if self.deal is None:
            return None
        return [self._before, self._taken, self._pace, self._worker.training.loops.pace.own]

    def go_on(self, place: list[Any]) -> None:
        self._inherited = place

    def restore(self, state: dict[str, Any]) -> None:
        if self.deal is not None and self._client.is_starter:
            self.deal.restore(state)

    def _leave(self, unused: Iterable[Counts], *, was_left: bool, is_late: bool = False) -> None:
        """A training loop is over, or was left: nobody is to wait for its next push.

        Args:
            unused: Batches that were taken and never given out.
            was_left: Whether the loop was left, so that its last batch may still be at work.
            is_late: Whether the last pushes are still to come, after the loop.
        """
        training, given = self._worker.training, [*unused]
        if self.deal is None or was_left:
            for strategy in training.strategies:
                strategy.settle(Why.LAST_BATCH)
        if self.deal is not None:
            # What was not pushed is for others; a loop that is left early seldom trains on its last batch afterwards.
            # At the end of a loop, what the script has got and has not trained on is its own.
            self._finish(self._learned if was_left else [*self._given])
            begun = [batch for batch in self._given.values() if batch is not None]
            if begun:
                training.counts.tally.drop()  # other workers train on these batches
            self.deal.give_back([*(counts.taken - 1 for counts in given), *sorted(self._given)])
            for batch in begun:
                batch.close()
            self._given.clear()
        if was_left and training.backward.count == self._passes:
            training.passes -= 1  # a glance at the data
            return
        if is_late and self.in_step:
            return
        self._client.leave_epoch(training.passes)
        if not was_left:
            for strategy in training.strategies:
                strategy.settle(Why.REFRESH)  # the last updates may have been those of others
