"""The training loops of a script: which batches count, and what is due when a loop is over.

A loop is one over a loader of ours. It has trained when a backward pass came after one of its batches; a batch counts
once, whichever of several loops (``zip``) asks for the next one first. A loop that was left before its end may have
been left by an exception, so nothing is collective there: what is due is done with the next call that all ranks make.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from torch import nn
from torch.optim import Optimizer

from hocket.comm.communicator import Communicator
from hocket.job import buffers
from hocket.job.schedules import Following
from hocket.strategies import collector
from hocket.strategies.base import Strategy


class Loops:
    """Of one worker.

    Attributes:
        own: Batches of the loop that goes on, of this worker; ``pace`` likewise, of all on the average.
    """

    def __init__(self, communicator: Communicator, strategies: Sequence[Strategy], models: Sequence[nn.Module]) -> None:
        self._communicator, self._strategies, self._models = communicator, strategies, models
        self.own, self.pace = 0, 0.0
        self._open: dict[int, bool] = {}  # loops that go on, and whether they have trained
        self._counted = self._followed = 0  # backward passes, when the last batch counted, or was followed
        self._following: Following | None = None
        self._due: list[Callable[[], None]] = []

    def begin(self, loader: object, epoch: int, optimizers: list[Optimizer]) -> None:
        """A training loop begins."""
        if not any(self._open.values()):
            self.own, self.pace = 0, 0.0
            if self._following is None and any(each.is_uneven or each.survives_loss for each in self._strategies):
                self._following = Following(self, optimizers)
            for strategy in self._strategies:
                strategy.begin_epoch(epoch)
        if not self._open:
            self._counted = collector.passes()
        self._open[id(loader)] = False
        for strategy in self._strategies:
            strategy.counts_steps = False

    def end_batch(self, loader: object, samples: int) -> None:
        """A loop is done with a batch of its own, of which this worker had so many samples."""
        passes = collector.passes()
        if passes > self._counted:
            self._counted = passes
            self._open[id(loader)] = True
            for strategy in self._strategies:
                strategy.end_batch(samples)

    def end(self, loader: object, *, alone: bool) -> None:
        """A loop has come to the end of its loader; collective.

        Args:
            loader: Of the loop.
            alone: Whether ranks may have had no batch where others had some.
        """
        holds = any(strategy.holds for strategy in self._strategies)  # a resumption may begin with the end of a loop
        if self._close(loader) or alone or holds:
            for strategy in self._strategies:
                strategy.settle()
        else:
            self._glance()
        self._average_buffers()

    def leave(self, loader: object, samples: int, before: Callable[[], None] | None) -> None:
        """A loop was left after it had trained.

        Args:
            loader: Of the loop.
            samples: In its last batch here.
            before: What is due before replicas are made equal.
        """
        if not any(type(strategy).settle is not Strategy.settle for strategy in self._strategies):
            self._close(loader)
            return

        def settle() -> None:
            self.end_batch(loader, samples)
            self._close(loader)
            if before is not None:
                before()
            for strategy in self._strategies:
                strategy.settle()
            self._average_buffers()

        self._due.append(settle)

    def forget(self, loader: object) -> None:
        """A loop was left without a backward pass: it was a glance at the data."""
        self._close(loader)
        self._glance()

    def catch_up(self) -> None:
        """Do what is due of loops that were left; collective."""
        while self._due:
            self._due.pop(0)()

    def follow(self, pace: float) -> None:
        """Workers advance unevenly: so many batches there were for each, on the average, in the loop that goes on."""
        if not self.own or collector.passes() > self._followed:  # else it is another loop's part of the same batch
            self.own += 1
        self._followed, self.pace = collector.passes(), pace

    def _close(self, loader: object) -> bool:
        """Whether the loop has trained."""
        has_trained = self._open.pop(id(loader), False)
        if self._following is not None and not any(self._open.values()):
            self._following.end()
            self._following = None
        for strategy in self._strategies:
            strategy.counts_steps = not any(self._open.values())
        return has_trained

    def _glance(self) -> None:
        if not any(self._open.values()):
            for strategy in self._strategies:
                strategy.glance()

    def _average_buffers(self) -> None:
        for model in self._models:
            buffers.average(self._communicator, model)
