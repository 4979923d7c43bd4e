"""One pass over a loader as training sees it, and the batches that the script was given of it."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from typing import Any

from hocket.strategies import collector
from hocket.strategies.base import Strategy
from hocket.strategies.model_hooks import tensors


class Batch:
    """One that a loop was given.

    Args:
        contents: What the script got.
        samples: Of this worker.
        place: How far the pass is with this batch.
        start: Lets weights and counts be those of this batch; says how much it weighs.
    """

    def __init__(self, contents: object, samples: int, place: Any, start: Callable[[], float]) -> None:
        self.contents, self.samples, self.place, self.start = contents, samples, place, start
        self.steps: dict[Strategy, int] = {}

    def has(self, inputs: object) -> bool:
        """Whether these are, as far as can be seen, made of it."""
        mine = storages(self.contents)
        return bool(mine & storages(inputs)) or any(each is self.contents for each in _things(inputs))


class Loop:
    """One pass over a loader, as training sees it.

    Attributes:
        given: Batches that have been given to the script and are not done, in this order.
        at_work: The one of them that it trains on.
        is_ahead: Whether the script asks for batches before it has trained on those that it has.
        in_thread: Whether it does so in another thread; nothing is collective there.
    """

    def __init__(self, loader: object, epoch: int, *, in_thread: bool) -> None:
        self.loader, self.epoch = loader, epoch
        self.given: deque[Batch] = deque()
        self.at_work: Batch | None = None
        self.is_ahead = self.in_thread = in_thread
        self.passes = 0  # backward passes, when work on that batch began
        self.place: Any = None  # how far the pass is with the last batch that is done
        self.has_begun = self.has_trained = False
        self.weight = 1.0  # of that batch
        self.is_suspect = False  # perhaps it is ahead, and that cannot be seen
        self.pause: Callable[[], None] | None = None  # what the loader does before all settle
        self.between: Callable[[], None] | None = None  # what the loader does between two batches
        self.after: Callable[[], None] | None = None  # what is due when all that was given is done; no more will come

    @property
    def trains(self) -> bool:
        """Whether the script has trained on the batch at work."""
        return self.at_work is not None and collector.passes() > self.passes

    @property
    def waits(self) -> bool:
        """Whether the script has asked for batches ahead of time, and has not trained on them yet."""
        return self.is_ahead and len(self.given) > self.trains


def _things(value: object) -> list[object]:
    """What a value is made of, itself included, as far as plain containers go."""
    if isinstance(value, dict):
        return [value, *(thing for each in value.values() for thing in _things(each))]
    if isinstance(value, (list, tuple)):
        return [value, *(thing for each in value for thing in _things(each))]
    return [value]


def storages(value: object) -> set[int]:
    """Where the tensors of a value are in memory."""
    return {tensor.untyped_storage().data_ptr() for tensor in tensors(value) if tensor.numel()}
