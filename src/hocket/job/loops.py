"""The training loops of a script: which batch is at work, which batches count, and what is due when a loop is over.

A loop is one over a loader of ours, however the script takes batches from it: in a ``for`` loop, with ``next()``, ahead
of time, or in a thread. A batch counts when a backward pass came after it was given, once, whichever of several loops
(``zip``) asks for the next one first: in the script's first ``step()`` for it, or else when the script asks for the
next batch. A loop that was left on purpose is settled there. One that was left in doubt may have been left by an
exception, so nothing is collective there: it is settled with the next call that all ranks make.
"""

from __future__ import annotations

import _thread
import functools
import sys
import weakref
from collections import deque
from collections.abc import Callable, Sequence

import torch
from torch import nn
from torch.optim import Optimizer

from hocket.comm.communicator import Communicator
from hocket.job import buffers
from hocket.job.loop import Batch, Loop, storages
from hocket.job.owner import Owner
from hocket.job.schedules import Following
from hocket.server.client import Client
from hocket.strategies import collector
from hocket.strategies.base import Strategy
from hocket.strategies.model_hooks import tensors


class Loops:
    """Of one worker.

    Attributes:
        own: Batches of the loop that goes on, of this worker; ``pace`` likewise, of all on the average.
    """

    def __init__(
        self,
        communicator: Communicator,
        strategies: Sequence[Strategy],
        models: Sequence[nn.Module],
        weigh: Callable[[float], None],
        owner: Owner,
        client: Client | None = None,
    ) -> None:
        self._communicator, self._strategies, self._models = communicator, strategies, models
        self._weigh, self._owner, self._client = weigh, owner, client
        self.own, self.pace = 0, 0.0
        self._open: list[Loop] = []
        self._unit, self._unit_passes = 1, 0  # the batch of all loops at once, and backward passes when it began
        self._counted: dict[Strategy, int] = {}  # the last of these that counted
        self._most: dict[Strategy, int] = {}  # steps for one batch
        self._followed = 0  # backward passes, when the last batch was followed
        self._following: Following | None = None
        self._optimizers: Callable[[], list[Optimizer]] = list
        self._due: list[Callable[[], None]] = []
        self._odd: list[tuple[list[weakref.ref[torch.Tensor]], float]] = []  # batches with other weights
        self._is_odd = False  # the one at work
        self._was_left = False  # the last loop, before its end

    @property
    def in_thread(self) -> bool:
        """Whether this is not the thread that trains."""
        return self._owner.is_elsewhere

    def adopt(self, strategy: Strategy) -> None:
        """Hear of the forward passes and steps of one more strategy."""
        for each in strategy.collectors:
            each.on_step = functools.partial(self._step, strategy)
            each.on_forward = self._see

    def begin(self, loader: object, epoch: int, optimizers: Callable[[], list[Optimizer]]) -> Loop:
        """A training loop begins."""
        self._optimizers = optimizers
        loop = Loop(loader, epoch, in_thread=self.in_thread)
        if not loop.in_thread:
            self._begin(loop)
        self._open.append(loop)
        return loop

    def _begin(self, loop: Loop) -> None:
        """Strategies hear of it; not in another thread."""
        loop.has_begun, self._was_left = True, False
        if not any(each.has_trained for each in self._open):
            self.own, self.pace = 0, 0.0
            if self._following is None and any(each.is_uneven or each.survives_loss for each in self._strategies):
                self._following = Following(self, self._optimizers())
            for strategy in self._strategies:
                strategy.begin_epoch(loop.epoch)
        if not any(each.has_begun for each in self._open):
            self._unit_passes = collector.passes()
        for strategy in self._strategies:
            strategy.counts_steps = False

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
            self._end(loop)

    def leave(self, loop: Loop, before: Callable[[], None] | None, *, on_purpose: bool) -> None:
        """A loop was left after it had trained.

        Args:
            loop: The loop.
            before: What is due before it is settled; collective.
            on_purpose: Whether the script surely goes on after the loop, on all ranks.
        """
        loop.given = deque([loop.at_work] if loop.at_work is not None and loop.trains else [])
        buffered = any(next(model.buffers(), None) is not None for model in self._models)
        if not buffered and not any(type(each).settle is not Strategy.settle for each in self._strategies):
            self._finish(loop)
            self._close(loop)
            return

        def settle() -> None:
            self._was_left = True
            self._finish(loop)
            self._close(loop)
            if before is not None:
                before()
            self._settle()

        if not on_purpose or self.in_thread:
            self._due.append(settle)
            return
        try:
            settle()
        except BaseException as error:  # which Python would print and forget, where a generator is being closed
            self._fail(error)

    def _fail(self, error: BaseException) -> None:
        """Have an error raised by the script's next call."""

        def fail() -> None:
            raise error

        self._due.insert(0, fail)
        if isinstance(error, KeyboardInterrupt):
            _thread.interrupt_main()

    def forget(self, loop: Loop) -> None:
        """A loop was left without a backward pass: it was a glance at the data."""
        self._close(loop)
        if loop.has_begun:
            self._glance()

    def finish(self, loop: Loop, *, alone: bool) -> None:
        """A loop has come to the end of its loader; collective.

        Args:
            loop: The loop.
            alone: Whether ranks may have had no batch where others had some.
        """
        holds = any(strategy.holds for strategy in self._strategies)  # a resumption may begin with the end of a loop
        if self._close(loop) or alone or holds:
            self._settle()
        else:
            self._glance()
            self._average_buffers()

    def settle(self) -> None:
        """The script asks for the model that its strategies stand for; collective."""
        self._count_rest()
        for loop in self._open:
            if loop.pause is not None:
                loop.pause()
        self._settle()

    def catch_up(self, call: str) -> None:
        """Do what is due of loops that are over or were left; collective.

        Args:
            call: Where this is, for a script that is to be told that this is late.
        """
        for loop in [each for each in self._open if each.after is not None]:
            self._end(loop)
        while self._due:
            owed = self.owed
            self._due.pop(0)()
            if owed and self._communicator.rank == 0:
                print(
                    f"hocket: a training loop was left by an exception, or in a way that cannot be seen ({owed}): the "
                    f"model was settled only now, in {call}; call hocket.settle() before you save or evaluate it",
                    file=sys.stderr,
                    flush=True,
                )

    def meet(self) -> None:
        """All ranks come to a meeting. Those that this one has left in a loop may have trained on; collective."""
        self.catch_up("the next call that all ranks make")
        if self._was_left and not self._open:
            self._was_left = False
            self._settle(stays=True)

    @property
    def owed(self) -> str:
        """What the script does not see of its model, if there is something."""
        return next((strategy.owes for strategy in self._strategies if strategy.owes), "")

    def follow(self, pace: float) -> None:
        """Workers advance unevenly: so many batches there were for each, on the average, in the loop that goes on."""
        if not self.own or collector.passes() > self._followed:  # else it is another loop's part of the same batch
            self.own += 1
        self._followed, self.pace = collector.passes(), pace

    def _see(self, inputs: object) -> None:
        """A forward pass begins: which of several batches is it for?"""
        if self.in_thread or not self._open:
            self._see_odd(inputs)
            return
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
                loop.given.popleft()  # was not trained on
            self._start(loop, found)

    def _see_odd(self, inputs: object) -> None:
        """Outside of loops: a batch that the script has kept (``itertools.cycle``) counts what it counted before."""
        if not self._odd or self.in_thread:
            return
        self._odd = [each for each in self._odd if any(ref() is not None for ref in each[0])]
        mine = storages(inputs)
        weights = [w for refs, w in self._odd if mine & storages([ref() for ref in refs])]
        if weights or self._is_odd:
            self._weigh(weights[0] if weights else 1.0)
        self._is_odd = bool(weights)

    def _start(self, loop: Loop, batch: Batch) -> None:
        """Work on a batch begins."""
        if not loop.has_begun:
            self._begin(loop)
        loop.at_work, loop.passes = batch, collector.passes()
        before, weight = loop.weight, batch.start()
        loop.weight = weight
        if loop.is_suspect and loop.has_trained and weight != before:
            self._warn_of_order(loop)
        if weight not in (0.0, 1.0):
            self._odd.append(([weakref.ref(tensor) for tensor in tensors(batch.contents)], weight))

    def _warn_of_order(self, loop: Loop) -> None:
        """The first batch was not trained on before the second was asked for; a smaller one comes now."""
        loop.is_suspect = False
        if self._communicator.rank == 0:
            print(
                "hocket: if the script asks for the next batch before it trains on the one before, the last batches, "
                "which are smaller, are weighed wrongly, because their inputs are changed before the model gets them: "
                "use DataLoader(drop_last=True), or ask for a batch when the one before is done",
                file=sys.stderr,
                flush=True,
            )

    def _step(self, strategy: Strategy) -> None:
        """An optimizer's step is over, or was left out by GradScaler."""
        loops = [loop for loop in self._open if loop.given]
        if not loops:
            strategy.end_batch(1, stepped=True)  # without a loop, steps stand for batches
            return
        if all(loop.at_work is None for loop in loops):
            self._start(loops[0], loops[0].given[0])
        loops = [loop for loop in loops if loop.at_work is not None]  # a thread may have begun the next one
        batch = loops[0].at_work
        assert batch is not None
        loops[0].has_trained = True
        number = batch.steps[strategy] = batch.steps.get(strategy, 0) + 1
        if self._counted.get(strategy) != self._unit:
            self._counted[strategy] = self._unit
            strategy.end_batch(batch.samples, stepped=True)
        elif number > self._most.get(strategy, 0):  # on one batch again and again
            strategy.end_batch(batch.samples, stepped=True)
        for loop in loops:
            self._step_without_asking(loop)

    def _step_without_asking(self, loop: Loop) -> None:
        """Where the script does not ask for another batch in this thread, its step is where one ends and all is due."""
        stepped = loop.at_work is not None and all(each in loop.at_work.steps for each in self._strategies)
        if not stepped or not (loop.in_thread or loop.after is not None):
            return
        if loop.between is not None and loop.in_thread:
            loop.between()
        if loop.after is not None and len(loop.given) == 1:
            self._finish(loop)
            self._end(loop)

    def _finish(self, loop: Loop) -> None:
        """The batch at work is done, if there was a backward pass."""
        batch, passes = loop.at_work, collector.passes()
        if batch is None or not loop.trains:
            return
        loop.at_work, loop.has_trained, loop.place = None, True, batch.place
        while loop.given and loop.given.popleft() is not batch:
            pass  # was not trained on
        for strategy, steps in batch.steps.items():
            self._most[strategy] = max(steps, self._most.get(strategy, 0))
        if passes > self._unit_passes:
            self._count_rest(batch.samples)
            for strategy in self._strategies:
                strategy.look()
            self._unit, self._unit_passes = self._unit + 1, passes

    def _count_rest(self, samples: int = 1) -> None:
        """Let those strategies count the batch that had no step for it."""
        if collector.passes() > self._unit_passes:
            for strategy in self._strategies:
                if self._counted.get(strategy) != self._unit:
                    self._counted[strategy] = self._unit
                    strategy.end_batch(samples, stepped=False)

    def _end(self, loop: Loop) -> None:
        after, loop.after = loop.after, None
        assert after is not None
        after()

    def _settle(self, *, stays: bool = False) -> None:
        """Collective. Where workers may train without each other, one that comes to a meeting settles with the others.

        Args:
            stays: Whether this worker does not train before all others have come to that meeting.
        """
        client = self._client if self._strategies else None
        if client is None and stays:
            return  # all are at the same place
        while True:
            works, over = True, True
            if client is not None:
                for strategy in self._strategies:  # nobody is to wait for this worker
                    strategy.flush()
                    strategy.idle()
                works, over = client.settle(has_trained=not stays or bool(self.owed), stays=stays)
            if works:
                for strategy in self._strategies:
                    strategy.settle()
                self._average_buffers()
            if over or not stays:
                break
        if not works:
            for strategy in self._strategies:
                strategy.rejoin()

    def _close(self, loop: Loop) -> bool:
        """Whether the loop has trained."""
        if loop in self._open:
            self._open.remove(loop)
        goes_on = any(each.has_trained for each in self._open)
        if self._following is not None and not goes_on:
            self._following.end()
            self._following = None
        for strategy in self._strategies:
            strategy.counts_steps = not goes_on
        return loop.has_trained

    def _glance(self) -> None:
        if not any(loop.has_trained for loop in self._open):
            for strategy in self._strategies:
                strategy.glance()

    def _average_buffers(self) -> None:
        for model in self._models:
            buffers.average(self._communicator, model)
