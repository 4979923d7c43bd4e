"""How much the backward passes of a batch count: less where a rank has fewer samples than others, or none.

A last batch that is smaller is spread unevenly, and a rank for which nothing is left repeats a batch with weight 0.
What such a batch does to buffers and random numbers is undone.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence

from torch import nn

from hocket.job import buffers
from hocket.job.training_loop import Batch
from hocket.strategies.base import Strategy


def weigh_share(here: int, everywhere: int, size: int) -> float:
    """The factor of this rank's gradient before it is averaged over ``size`` ranks.

    The average is then that of the whole batch, for losses that are means over the samples.

    Args:
        here: Samples of the batch on this rank.
        everywhere: Samples of the batch on all ranks.
        size: How many ranks share the batch.
    """
    return here * size / everywhere if everywhere else 0.0


class Weights:
    """How much the backward passes of one worker count.

    Attributes:
        now: How much backward passes count now, relative to those of other ranks.
    """

    def __init__(self, strategies: Sequence[Strategy]) -> None:
        self._strategies = strategies
        self.now = 1.0
        self._by_loader: dict[int, float] = {}  # weights of the training loops that go on
        self._left: list[int] = []  # loops that were left, whose last batch may still be at work
        self._undo: Callable[[], None] | None = None
        self._kept: list[Batch] = []  # batches with other weights than 1
        self._is_kept = False  # whether the batch at work is a kept one

    def set(self, weight: float) -> None:
        """Set how much backward passes count from now on, until the next batch."""
        if weight != self.now:
            self.now = weight
            for strategy in self._strategies:
                strategy.collector.weigh(weight)

    def weigh(self, loader: object, weight: float) -> None:
        """Set how much the batch of a training loop counts; simultaneous loops that disagree count their mean."""
        self._forget_left()
        self._by_loader[id(loader)] = weight
        self.set(sum(self._by_loader.values()) / len(self._by_loader))

    def end_loop(self, loader: object) -> None:
        """A training loop is over."""
        self._forget_left()
        self._by_loader.pop(id(loader), None)
        self.set(sum(self._by_loader.values()) / len(self._by_loader) if self._by_loader else 1.0)

    @property
    def in_loop(self) -> bool:
        """Whether a training loop goes on, or was left and its last batch may still be at work."""
        return bool(self._by_loader)

    def leave_loop(self, loader: object) -> None:
        """A training loop was left before its end; the weight of its last batch holds until the next one comes."""
        self._left.append(id(loader))

    def _forget_left(self) -> None:
        for left in self._left:
            self._by_loader.pop(left, None)
        self._left.clear()

    @property
    def repeats(self) -> bool:
        """Whether the batch at work is one that only keeps this rank in step."""
        return bool(self._by_loader) and not any(self._by_loader.values())

    def repeat(self, models: Iterable[nn.Module]) -> None:
        """The batch that comes is a repeated one, which is to leave no trace in the models."""
        self._undo = buffers.remember(models)

    def leave_no_trace(self) -> None:
        """The step on a repeated batch is over."""
        undo, self._undo = self._undo, None
        if undo is not None:
            undo()

    def keep(self, batch: Batch) -> None:
        """The script may keep a batch that weighs more or less than others, and train on it outside of any loop."""
        if batch.weight != 1 and batch not in self._kept:
            self._kept = [*(each for each in self._kept if each.is_alive), batch]

    def see_kept(self, inputs: object) -> bool:
        """A forward pass outside of loops: a batch that was kept (``itertools.cycle``) counts what it did before.

        Returns:
            Whether it is certain what the batch counts.
        """
        self._kept = [batch for batch in self._kept if batch.is_alive]
        weights = [batch.weight for batch in self._kept if batch.has(inputs)]
        if weights or self._is_kept:
            self.set(weights[0] if weights else 1.0)
        self._is_kept = bool(weights)
        return self._is_kept or not any(batch.fits(inputs) for batch in self._kept)
