"""Which batches count for a strategy: each once, in the script's first step for it or when it is done."""

from __future__ import annotations

from collections.abc import Sequence

from hocket.capture.collector import BackwardPasses
from hocket.job.training_loop import Batch, Loop
from hocket.strategies.base import DoneBatch, Strategy


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
