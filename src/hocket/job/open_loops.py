"""The training loops of a script: which batch is at work, which batches count, and what is due when a loop is over.

A loop is any use of Hocket's loader, however the script takes its batches: in a ``for`` loop, with ``next()``, ahead
of time, or in a thread. A batch counts when a backward pass came after it was given, once, whichever of several loops
(``zip``) asks for the next one first: in the script's first ``step()`` for it, or else when the script asks for the
next batch.
"""

from __future__ import annotations

import functools
import sys
from collections import deque
from collections.abc import Callable, Sequence

from torch.optim import Optimizer

from hocket.capture.collector import BackwardPasses
from hocket.job.batch_weights import Weights
from hocket.job.owner import Owner
from hocket.job.schedules import LoopPace
from hocket.job.settling import Settling
from hocket.job.training_loop import Batch, Loop
from hocket.strategies.base import DoneBatch, Strategy, Why


class Loops:
    """The training loops of one worker.

    Attributes:
        goes_on: Whether a training loop goes on; else steps stand for batches.
        pace: How far the loop that goes on is, on this worker and on all.
    """

    def __init__(
        self,
        strategies: Sequence[Strategy],
        weights: Weights,
        settling: Settling,
        owner: Owner,
        backward: BackwardPasses,
        optimizers: Callable[[], list[Optimizer]],
        rank: int,
    ) -> None:
        self._strategies, self._weights, self._settling, self._owner = strategies, weights, settling, owner
        self._backward, self._optimizers, self._rank = backward, optimizers, rank
        self.goes_on = False
        self.pace = LoopPace(backward)
        self._open: list[Loop] = []
        self._stepped: int | None = None  # backward passes before the last step; None before the first
        self._count = BatchCount(strategies, backward)

    @property
    def in_thread(self) -> bool:
        """Whether this is not the thread that trains."""
        return self._owner.is_elsewhere

    @property
    def is_between(self) -> bool:
        """Whether the script has trained on all batches that it was given, and taken a step on all gradients."""
        if self._stepped is not None and self._backward.count > self._stepped:
            return False  # gradients are accumulated, without a word to Hocket
        return all(len(loop.given) <= loop.trains and loop.after is None for loop in self._open)

    def adopt(self, strategy: Strategy) -> None:
        """Hear of the passes and steps of one more strategy."""
        strategy.collector.backward = self._backward
        strategy.collector.on_step = functools.partial(self._step, strategy)
        strategy.collector.on_forward = self._see

    def begin(self, loader: object, epoch: int) -> Loop:
        """A training loop begins."""
        loop = Loop(loader, epoch, self._backward, in_thread=self.in_thread)
        if not loop.in_thread:
            self._begin(loop)
        self._open.append(loop)
        return loop

    def _begin(self, loop: Loop) -> None:
        """Tell strategies that a loop begins; not in another thread."""
        loop.has_begun, self._settling.was_left = True, False
        if not any(each.has_trained for each in self._open):
            paced = any(each.spec.is_uneven or each.spec.survives_loss for each in self._strategies)
            self.pace.begin(self._optimizers if paced else None)
            for strategy in self._strategies:
                strategy.begin_loop(loop.epoch)
        if not any(each.has_begun for each in self._open):
            self._count.begin()
        self.goes_on = True

    def ask(self, loop: Loop) -> None:
        """The script asks for the next batch: it is done with the one at work, if it has trained on that."""
        if not loop.in_thread:
            self._finish(loop)
            if loop.is_ahead and loop.given and loop.at_work is None:
                self._start(loop, loop.given[0])

    def give(self, loop: Loop, batch: Batch) -> None:
        """The script gets a batch. It trains on the newest, unless it was seen to ask ahead of time."""
        loop.is_suspect |= len(loop.given) == 1 and not loop.has_trained and not loop.trains
        loop.given.append(batch)
        if not loop.in_thread and (loop.at_work is None or not loop.is_ahead):
            self._start(loop, batch)

    def end(self, loop: Loop, after: Callable[[], None]) -> None:
        """The script has been given all batches; ``after``, which is collective, is due when it has trained on them."""
        loop.after = after
        if not (loop.waits or loop.in_thread):
            _end(loop)

    def leave(self, loop: Loop, before: Callable[[], None] | None, *, on_purpose: bool) -> None:
        """A loop was left after it had trained.

        Args:
            loop: The loop.
            before: What is due before the loop is settled; collective.
            on_purpose: Whether the script surely goes on after the loop, on all ranks.
        """
        loop.given = deque([loop.at_work] if loop.at_work is not None and loop.trains else [])
        if not self._settling.is_needed:
            self._finish(loop)
            self._close(loop)
            return

        def settle() -> None:
            self._settling.was_left = True
            self._finish(loop)
            self._close(loop)
            if before is not None:
                before()
            self._settling.settle(pauses=self.goes_on)

        self._settling.settle_left(settle, at_once=on_purpose and not self.in_thread)

    def forget(self, loop: Loop) -> None:
        """A loop was left without a backward pass: it was a glance at the data."""
        self._close(loop)
        if loop.has_begun:
            self._glance()

    def finish(self, loop: Loop, *, alone: bool) -> None:
        """A loop has come to the end of its loader; collective.

        Args:
            loop: The loop.
            alone: Whether ranks may have had no batch where others had some, as those that join late.
        """
        holds = any(strategy.holds for strategy in self._strategies)  # a resumption may begin with the end of a loop
        if self._close(loop) or alone or holds:
            self._settling.settle(pauses=self.goes_on)
        else:
            self._glance()
            self._settling.average_buffers()

    def settle(self) -> None:
        """Give every worker the model that its strategies stand for, as the script asks; collective."""
        self._count.count_rest(DoneBatch(in_loop=self.goes_on, stepped=False))
        for loop in self._open:
            if loop.pause is not None:
                loop.pause()
        self._settling.settle(pauses=self.goes_on)

    def catch_up(self, call: str) -> None:
        """Do what is due of loops that are over or were left; collective.

        Args:
            call: The call that the script makes, for the message that this is late; empty if it is not.
        """
        for loop in [each for each in self._open if each.after is not None]:
            _end(loop)
        self._settling.catch_up(call)

    def meet(self, call: str) -> None:
        """All ranks come to a meeting; ranks may have trained on in a loop that this one has left. Collective."""
        self.catch_up(call)
        if self._settling.was_left and not self._open:
            self._settling.was_left = False
            self._settling.settle(pauses=self.goes_on, stays=True)

    def _see(self, inputs: object) -> None:
        """A forward pass begins: find out which of several batches it is for."""
        if self.in_thread:
            return
        if not self._open:
            self._weights.see_kept(inputs)
        for loop in self._open:
            if len(loop.given) + loop.in_thread < 2:
                continue
            found = next((batch for batch in loop.given if batch.has(inputs)), None)
            if found is None and loop.in_thread:
                is_done = loop.at_work is None or (loop.at_work.steps and loop.trains)
                rest = [batch for batch in loop.given if batch is not loop.at_work]
                found = rest[0] if is_done and rest else None
            loop.is_suspect &= found is None
            if found is None or found is loop.at_work:
                continue
            loop.is_ahead |= found is not loop.given[-1]
            self._finish(loop)
            while loop.given[0] is not found:
                loop.given.popleft()  # this batch was not trained on
            self._start(loop, found)

    def _start(self, loop: Loop, batch: Batch) -> None:
        """Work on a batch begins."""
        if not loop.has_begun:
            self._begin(loop)
        loop.at_work, loop.passes = batch, self._backward.count
        before, weight = loop.weight, batch.start()
        loop.weight = weight
        if loop.is_suspect and loop.has_trained and weight != before:
            self._warn_of_order(loop)
        self._weights.keep(batch.contents, weight)

    def _warn_of_order(self, loop: Loop) -> None:
        """The first batch was not trained on before the second was asked for; a smaller one comes now."""
        loop.is_suspect = False
        if self._rank == 0:
            print(
                "hocket: if the script asks for the next batch before it trains on the one before, the last batches, "
                "which are smaller, are weighed wrongly, because their inputs are changed before the model gets them: "
                "use DataLoader(drop_last=True), or ask for a batch when the one before is done",
                file=sys.stderr,
                flush=True,
            )

    def _step(self, strategy: Strategy) -> None:
        """An optimizer's step is over, or was left out by GradScaler."""
        self._stepped = self._backward.count
        loops = [loop for loop in self._open if loop.given]
        if not loops:
            strategy.end_batch(DoneBatch(in_loop=self.goes_on))  # without a loop, steps stand for batches
            return
        if all(loop.at_work is None for loop in loops):
            self._start(loops[0], loops[0].given[0])
        loops = [loop for loop in loops if loop.at_work is not None]  # a thread may have begun the next batch
        batch = loops[0].at_work
        assert batch is not None
        loops[0].has_trained = True
        self._count.step(strategy, loops[0], batch)
        for loop in loops:
            self._step_without_asking(loop)

    def _step_without_asking(self, loop: Loop) -> None:
        """Where the script asks for batches in another thread, its step ends a batch, and does all that is due."""
        stepped = loop.at_work is not None and all(each in loop.at_work.steps for each in self._strategies)
        if not stepped or not (loop.in_thread or loop.after is not None):
            return
        if loop.between is not None and loop.in_thread:
            loop.between()
        if loop.after is not None and len(loop.given) == 1:
            self._finish(loop)
            _end(loop)

    def _finish(self, loop: Loop) -> None:
        """The batch at work is done, if there was a backward pass."""
        batch = loop.at_work
        if batch is None or not loop.trains:
            return
        loop.at_work, loop.has_trained, loop.place = None, True, batch.place
        while loop.given and loop.given.popleft() is not batch:
            pass  # this batch was not trained on
        self._count.finish(loop, batch)

    def _close(self, loop: Loop) -> bool:
        """Close a loop; returns whether it has trained."""
        if loop in self._open:
            self._open.remove(loop)
        self.goes_on = any(each.has_trained for each in self._open)
        if not self.goes_on:
            self.pace.end()
        return loop.has_trained

    def _glance(self) -> None:
        if not any(loop.has_trained for loop in self._open):
            for strategy in self._strategies:
                strategy.settle(Why.GLANCE)


def _end(loop: Loop) -> None:
    after, loop.after = loop.after, None
    assert after is not None
    after()


class BatchCount:
    """Lets each strategy count a batch once, whichever of several loops it is from, and however many steps it has."""

    def __init__(self, strategies: Sequence[Strategy], backward: BackwardPasses) -> None:
        self._strategies, self._backward = strategies, backward
        self._unit, self._passes = 1, 0  # the batch of all loops at once, and backward passes when it began
        self._counted: dict[Strategy, int] = {}  # the last batch that each strategy has counted
        self._most: dict[Strategy, int] = {}  # the most steps of each strategy for one batch

    def begin(self) -> None:
        """The first of several loops begins."""
        self._passes = self._backward.count

    def step(self, strategy: Strategy, loop: Loop, batch: Batch) -> None:
        """A strategy has taken a step on a batch of a loop."""
        number = batch.steps[strategy] = batch.steps.get(strategy, 0) + 1
        is_first = self._counted.get(strategy) != self._unit
        self._counted[strategy] = self._unit
        if is_first or number > self._most.get(strategy, 0):  # or one batch has many steps
            strategy.end_batch(DoneBatch(loop.epoch, batch.samples, loop.weight))

    def finish(self, loop: Loop, batch: Batch) -> None:
        """The script is done with a batch of a loop that it has trained on."""
        for strategy, steps in batch.steps.items():
            self._most[strategy] = max(steps, self._most.get(strategy, 0))
        passes = self._backward.count
        if passes > self._passes:
            self.count_rest(DoneBatch(loop.epoch, batch.samples, loop.weight, stepped=False))
            self._unit, self._passes = self._unit + 1, passes

    def count_rest(self, batch: DoneBatch) -> None:
        """Let strategies that took no step for the batch count it."""
        if self._backward.count > self._passes:
            for strategy in self._strategies:
                if self._counted.get(strategy) != self._unit:
                    self._counted[strategy] = self._unit
                    strategy.end_batch(batch)
