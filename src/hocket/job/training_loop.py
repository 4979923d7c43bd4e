"""One pass over a loader as training sees it: the batches that the script was given."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from typing import Any

from hocket.capture.collector import BackwardPasses
from hocket.capture.model_hooks import tensors
from hocket.errors import UsageError
from hocket.strategies.base import Strategy


class Batch:
    """One batch that a loop was given.

    Args:
        contents: What the script got.
        samples: How many samples of this worker the batch has.
        place: How far the pass is with this batch.
        start: Sets weights and counts to those of this batch; returns how much the batch weighs.
    """

    def __init__(self, contents: object, samples: int, place: Any, start: Callable[[], float]) -> None:
        self.contents, self.samples, self.place, self.start = contents, samples, place, start
        self.steps: dict[Strategy, int] = {}

    def has(self, inputs: object) -> bool:
        """Whether ``inputs`` are, as far as can be seen, made of this batch."""
        mine = storages(self.contents)
        return bool(mine & storages(inputs)) or any(each is self.contents for each in _things(inputs))


class Loop:
    """One pass over a loader, as training sees it.

    Attributes:
        given: Batches that have been given to the script and are not done, in this order.
        at_work: The batch that the script trains on.
        is_ahead: Whether the script asks for batches before it has trained on those that it has.
        in_thread: Whether the script takes batches in another thread; nothing is collective there.
    """

    def __init__(self, loader: object, epoch: int, backward: BackwardPasses, *, in_thread: bool) -> None:
        self.loader, self.epoch, self._backward = loader, epoch, backward
        self.given: deque[Batch] = deque()
        self.at_work: Batch | None = None
        self.is_ahead = self.in_thread = in_thread
        self.passes = 0  # backward passes when work on the batch at work began
        self.place: Any = None  # how far the pass is with the last batch that is done
        self.has_begun = self.has_trained = False
        self.weight = 1.0  # the weight of the batch at work
        self.is_suspect = False  # whether the script may be ahead unseen
        self.pause: Callable[[], None] | None = None  # what the loader does before all settle
        self.between: Callable[[], None] | None = None  # what the loader does between two batches
        self.after: Callable[[], None] | None = None  # called when all batches are done, and no more will come

    def check_thread(self, *, agrees: bool) -> None:
        """Raise if ranks ``agree`` on something in every batch, and the loop is in a thread."""
        if self.in_thread and agrees:
            raise UsageError(
                "a loader was iterated in a thread of the script, where ranks cannot agree on batches, as this data or "
                "strategy needs: iterate it in the main thread, and let DataLoader(num_workers=…) read ahead"
            )

    @property
    def trains(self) -> bool:
        """Whether the script has trained on the batch at work."""
        return self.at_work is not None and self._backward.count > self.passes

    @property
    def waits(self) -> bool:
        """Whether the script has asked for batches ahead of time, and has not trained on them yet."""
        return self.is_ahead and len(self.given) > self.trains


def _things(value: object) -> list[object]:
    """A value and all that is in it, as far as plain containers go."""
    if isinstance(value, dict):
        return [value, *(thing for each in value.values() for thing in _things(each))]
    if isinstance(value, (list, tuple)):
        return [value, *(thing for each in value for thing in _things(each))]
    return [value]


def storages(value: object) -> set[int]:
    """Where the tensors of a value are in memory."""
    return {tensor.untyped_storage().data_ptr() for tensor in tensors(value) if tensor.numel()}
