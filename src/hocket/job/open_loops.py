"""The training loops of a script: which batch is at work, which batches count, and what is due when a loop is over.

A loop is any use of Hocket's loader, however the script takes its batches: in a ``for`` loop, with ``next()``, ahead
of time, or in a thread. A batch is at work from its forward pass to its step, also if the script asks for others
meanwhile. Which batch a forward pass is for is told by its inputs, or else by the order of the batches. A batch counts
when a backward pass came after it was given, once, whichever of several loops (``zip``) asks for the next one first: in
the script's first ``step()`` for it, or else when work on the next one begins.
"""

from __future__ import annotations

import functools
import sys
from collections import deque
from collections.abc import Callable, Sequence

from torch.optim import Optimizer

from hocket.capture.collector import BackwardPasses
from hocket.job.batch_count import BatchCount
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
        self._late: list[Loop] = []  # loops that are over, and have batches that the script may train on yet
        self._stepped: int | None = None  # backward passes before the last step; None before the first
        self._count = BatchCount(strategies, backward)
        self._said: set[str] = set()

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
        loop.is_watched = bool(self._strategies)
        if not loop.in_thread:
            self._begin(loop)
        self._open.append(loop)
        return loop

    def _begin(self, loop: Loop) -> None:
        """Tell strategies that a loop begins; not in another thread."""
        loop.has_begun = True
        self._settling.begin_loop()
        if not any(each.has_trained for each in self._open):
            paced = any(each.spec.is_uneven or each.spec.survives_loss for each in self._strategies)
            self.pace.begin(self._optimizers if paced else None)
            for strategy in self._strategies:
                strategy.begin_loop(loop.epoch)
        if not any(each.has_begun for each in self._open):
            self._count.begin()
        self.goes_on = True

    def ask(self, loop: Loop) -> None:
        """The script asks for the next batch: it is done with the one at work, if it has taken a step on that."""
        if loop.in_thread:
            return
        if loop.at_work is not None and loop.is_busy:
            loop.at_work.asked_at = self._backward.count
        else:
            self._finish(loop)

    def give(self, loop: Loop, batch: Batch) -> None:
        """The script gets a batch."""
        batch.number, loop.asked = loop.asked, loop.asked + 1
        loop.given.append(batch)
        if not loop.in_thread:
            self._go_on(loop)

    def end(self, loop: Loop, after: Callable[[], None]) -> None:
        """The script has been given all batches; ``after``, which is collective, is due when it has trained on them."""
        loop.after, loop.asked = after, loop.asked + 1
        if loop.in_thread:
            return
        if not loop.waits:
            self._finish(loop)
            loop.end()
        elif loop.lag is not None:
            self._go_on(loop)

    def _go_on(self, loop: Loop) -> None:
        """Work goes on with the batch whose turn it is, unless one is at work."""
        if loop.is_busy or self._late:
            return
        if loop.lag is None:
            self._start(loop, loop.given[-1])
        else:
            self._work_on(loop, loop.expected)

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
        if loop.is_late and self._settles_later(loop):
            self._close(loop)
            return
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

    def catch_up(self, call: str, *, moves_on: bool = False) -> None:
        """Do what is due of loops that are over or were left; collective.

        Args:
            call: The call that the script makes, for the message that this is late; empty if it is not.
            moves_on: Whether the script goes on with another loop, or ends.
        """
        for loop in [each for each in self._open if each.after is not None]:
            if not loop.is_busy:
                self._finish(loop)
            rest = [loop.at_work] if loop.at_work is not None and loop.is_busy and loop.trains else []
            rest += loop.untrained if loop.is_watched else []
            if rest and not moves_on and self._settles_later(loop):
                continue  # the loop goes on
            loop.is_late = bool(rest)
            loop.end()
            if rest:
                self._keep(loop, rest)
        self._settling.catch_up(call)

    def _settles_later(self, loop: Loop) -> bool:
        """Whether nothing is to be settled before the script has trained on the batches that it has."""
        is_uneven = any(strategy.spec.is_uneven for strategy in self._strategies)
        return (loop.is_torn and not is_uneven) or all(strategy.spec.in_step for strategy in self._strategies)

    def _keep(self, loop: Loop, rest: list[Batch]) -> None:
        """A loop is over, and the script has batches that it may train on yet: they count as in the loop."""
        loop.given = deque(rest)
        self._late.append(loop)
        if loop.lag is not None and not loop.trains:
            self._start(loop, rest[0])

    def _retire(self, loop: Loop) -> None:
        """The script has trained on all batches of a loop that was over before."""
        self._late.remove(loop)
        self._finish(loop)
        if not any(each.loader is loop.loader for each in self._open):
            self._weights.end_loop(loop.loader)
        if not self._open and any(strategy.spec.is_uneven for strategy in self._strategies):
            self._settling.was_left = True  # others may train on
        elif not self._open:
            self._settling.settle(pauses=False)
        for each in self._open:
            if each.given and not each.in_thread:
                self._go_on(each)

    def end_script(self) -> None:
        """The script has come to its end; collective."""
        self.catch_up("the end of the script", moves_on=True)
        for loop in self._late:
            self._warn_of_late(loop)
        self._settling.say_what_is_owed()

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
        for loop in [loop for loop in self._late if loop.at_work is not None and not loop.untrained and loop.is_done]:
            self._retire(loop)
        if not (loops := self._late + self._open):
            if not self._weights.see_kept(inputs):
                self._warn(
                    "a batch that weighs less or more than others was kept, as by itertools.cycle, and the script "
                    "trains outside of a loop over the loader, on inputs that it has changed: if they are of that "
                    "batch, it is weighed wrongly: use DataLoader(drop_last=True), or begin a new loop over the loader"
                )
            return
        if len(loops) == 1 and loops[0].at_work is not None and loops[0].is_plain and not loops[0].in_thread:
            loops[0].at_work.has_passed = True
            return
        found = {loop: batch for loop in loops if (batch := loop.find(inputs)) is not None}
        for loop, batch in found.items():
            loop.is_told = True
            if loop.after is None and not loop.in_thread:
                loop.lag, loop.is_guessed = loop.asked - 1 - batch.number, False
        if not found:
            late = {loop.loader: loop for loop in reversed(self._late) if loop.lag is not None}  # the first of each
            found = {loop: loop.guess(inputs) for loop in late.values()}
            if not found or not self._is_late(found, inputs):
                found = {loop: loop.guess(inputs) for loop in self._open if loop.given}
        for loop, batch in found.items():
            self._work_on(loop, batch)
            batch.has_passed = True
        if self._late and not any(loop in found for loop in self._late):
            self._late.clear()  # the script has left out its last batches

    def _is_late(self, found: dict[Loop, Batch], inputs: object) -> bool:
        """Whether a forward pass may be for batches of loops that are over, rather than for those of a newer loop."""
        others = any(loop.given and loop.given[-1].fits(inputs) for loop in self._open)
        for loop, batch in found.items():
            if others and not loop.is_told:
                if not batch.fits(inputs):
                    return False
                self._warn_of_late(loop)
        return True

    def _warn_of_late(self, loop: Loop) -> None:
        if loop.is_guessed and any(batch.weight != 1 for batch in loop.given):
            self._warn_of_order(loop)

    def _work_on(self, loop: Loop, batch: Batch) -> None:
        """Work goes on with a batch, which may be at work already."""
        if batch is loop.at_work:
            return
        if loop.is_busy and not loop.trains and loop.asks_early is None:
            loop.asks_early = False  # the script has left out the batch at work after its forward pass
        self._finish(loop)
        if batch in loop.passed_over:
            loop.passed_over.remove(batch)
            loop.given.appendleft(batch)
        while loop.given[0] is not batch:  # these batches were not trained on
            loop.passed_over.append(loop.given.popleft())
        self._start(loop, batch)

    def _start(self, loop: Loop, batch: Batch) -> None:
        """Work on a batch begins."""
        if not loop.has_begun:
            self._begin(loop)
        loop.at_work, loop.passes = batch, self._backward.count
        before = loop.weight
        loop.weight = batch.weight = batch.start()
        if loop.is_guessed and loop.has_trained and loop.weight != before and len(loop.given) > 1:
            self._warn_of_order(loop)
        self._weights.keep(batch)

    def _warn_of_order(self, loop: Loop) -> None:
        """Which batch was trained on when was concluded from the number of batches alone."""
        loop.is_guessed = False
        self._warn(
            f"the script had {(loop.lag or 0) + 1} batches before its first forward pass, and changes inputs before "
            "the model gets them: it is taken to ask for batches ahead of time; if it left the first ones out instead, "
            "smaller last batches are weighed wrongly: use DataLoader(drop_last=True)"
        )

    def _warn(self, text: str) -> None:
        if text not in self._said and self._rank == 0:
            self._said.add(text)
            print(f"hocket: {text}", file=sys.stderr, flush=True)

    def _step(self, strategy: Strategy) -> None:
        """An optimizer's step is over, or was left out by GradScaler."""
        self._stepped = self._backward.count
        late = [loop for loop in self._late if loop.is_busy or loop.trains]
        loops = late or [loop for loop in self._open if loop.given]
        if not loops:
            strategy.end_batch(DoneBatch(in_loop=self.goes_on))  # without a loop, steps stand for batches
            return
        for loop in loops:
            if loop.lag is None and not loop.in_thread:
                loop.learn_order()  # no forward pass was seen
                if loop.lag:
                    self._work_on(loop, loop.expected)
        if all(loop.at_work is None for loop in loops):
            self._start(loops[0], loops[0].given[0])
        loops = [loop for loop in loops if loop.at_work is not None]  # a thread may have begun the next batch
        batch = loops[0].at_work
        assert batch is not None
        loops[0].has_trained = True
        self._count.step(strategy, loops[0], batch)
        for loop in loops:
            if loop.at_work is not None and loop.at_work is not batch:
                loop.at_work.steps[strategy] = loop.at_work.steps.get(strategy, 0) + 1
            self._step_without_asking(loop)

    def _step_without_asking(self, loop: Loop) -> None:
        """Where the script asks for batches before the step, or in another thread, the step does all that is due."""
        stepped = loop.at_work is not None and all(each in loop.at_work.steps for each in self._strategies)
        asks_elsewhere = loop.in_thread or (loop.at_work is not None and loop.at_work.asked_at is not None)
        if not stepped or not (asks_elsewhere or loop.is_late or loop.after is not None):
            return
        if loop.is_late:
            if loop.is_last:
                self._retire(loop)
            return
        if loop.between is not None and asks_elsewhere:
            loop.between()
        if loop.after is not None and loop.is_last:
            self._finish(loop)
            loop.end()

    def _finish(self, loop: Loop) -> None:
        """The batch at work is done, if there was a backward pass."""
        batch = loop.at_work
        if batch is None or not loop.trains:
            return
        passes = self._backward.count
        loop.usual, loop.usual_steps = passes - loop.passes, sum(batch.steps.values())
        loop.asks_early = batch.asked_at is not None and (passes > batch.asked_at or bool(batch.steps))
        loop.at_work, loop.has_trained, loop.place = None, True, batch.place
        while loop.given and (passed := loop.given.popleft()) is not batch:
            loop.passed_over.append(passed)
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
