"""One pass over the data: how it began, how far it is, and what is left of it.

What is left is all that a checkpoint says of a pass over indices, whoever dealt out its batches: the order of the
samples follows from the seed and the epoch, under every strategy and on any number of workers.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import islice
from typing import Any, NamedTuple, Protocol, TypeVar

import torch

from hocket import spans
from hocket.job.randomness import RandomState, SharedRandom
from hocket.job.training_loop import Loop

T = TypeVar("T")
Span = tuple[int, int | None]  # from, and to (excluded; None is the end of the order)


class Rest:
    """Places in the order of an epoch that are not done; the last of ``spans`` goes to the end."""

    def __init__(self, spans: Sequence[Span] = ((0, None),)) -> None:
        self.spans = tuple(spans)

    def pick(self, items: Iterator[T]) -> Iterator[T]:
        """The items of an epoch that are left."""
        at = 0
        for start, stop in self.spans:
            next(islice(items, start - at, start - at), None)
            yield from islice(items, None if stop is None else stop - start)
            at = stop or start

    def count(self, total: int) -> int:
        """How many items are left if the epoch has ``total``."""
        return sum(max(0, min(total, total if stop is None else stop) - start) for start, stop in self.spans)

    def place(self, index: int) -> int:
        """The place in the order of the ``index``-th item that is left."""
        for start, stop in self.spans:
            if stop is None or index < stop - start:
                return start + index
            index -= stop - start
        raise IndexError(index)

    def only(self, kept: Iterable[Span]) -> Rest:
        """A part of the rest, given as spans of the items that are left: ascending, the last one to the end."""
        found: list[Span] = []
        for first, last in kept:
            before = 0
            for start, stop in self.spans:
                after = None if stop is None else before + stop - start
                begin = max(first, before)
                end = last if after is None else after if last is None else min(last, after)
                if end is None or begin < end:
                    span = (start + begin - before, None if end is None else start + end - before)
                    if found and found[-1][1] == span[0]:
                        span = (found.pop()[0], span[1])
                    found.append(span)
                if after is None:
                    break
                before = after
        return Rest(found)


Item = TypeVar("Item")


class BatchSource(Protocol):
    """Says which batch of an epoch is this rank's next."""

    def take(self, epoch: int, total: int | None) -> int | None:
        """The number of the next batch, or None if there is none now; ``total`` is how many there are, if known."""

    def end(self, total: int) -> None:
        """The epoch has only ``total`` batches."""


class Counts(NamedTuple):
    """What is known of a batch beside its contents."""

    here: int  # samples on this rank
    everywhere: int  # samples on all ranks; 0 if only this rank's are known
    taken: int  # items of the source that all ranks have taken in this epoch, with this batch


@dataclass
class Start:
    """How the source of a pass began, from which its order follows."""

    random: RandomState | None  # None if the pass has not begun
    generators: list[torch.Tensor]
    sampler: Any  # the state_dict of the sampler, if it has one

    def as_data(self) -> list[Any]:
        """The start as plain data with tensors."""
        return [self.random.as_data() if self.random is not None else None, self.generators, self.sampler]

    @staticmethod
    def from_data(data: list[Any]) -> Start:
        """The start that ``as_data`` gave."""
        random, generators, sampler = data
        return Start(RandomState.from_data(random) if random is not None else None, generators, sampler)


@dataclass
class Plan:
    """One pass over the data: where it starts, and what is noted for each batch."""

    epoch: int
    taken: int = 0  # items of a stream that an earlier run took, and that are passed over
    rest: Rest = field(default_factory=Rest)  # indices that an earlier run has left
    start: Start | None = None  # how the pass began
    is_resumed: bool = False
    has_begun: bool = False  # whether the source has been read; it may be read again
    random: SharedRandom | None = None  # what the source draws from, if not from what it usually does
    first: int | None = None  # a checksum of the first global batch of a sampler that is not PyTorch's
    deal: BatchSource | None = None  # the queue from which batches are taken, if there is one
    in_step: bool = False  # whether the queue deals out shares of global batches
    given: int = 0  # batches that this worker was given
    whole: int = 1  # items of the source that are divided at once
    rank: int = 0  # among whom they are divided, if the workers of the job have changed in the pass
    size: int = 0
    short: dict[int, int] = field(default_factory=dict)  # samples that batches have lost, by number, with their workers

    def __post_init__(self) -> None:
        self.counts: deque[Counts] = deque()

    def number(self, taken: int) -> int:
        """The number, from 1, of the batch with which ``taken`` items were taken."""
        return -(-taken // self.whole)

    def correct(self, counts: Counts) -> Counts:
        """What is known of a batch, without the samples of workers that are lost."""
        return counts._replace(everywhere=counts.everywhere - self.short.get(self.number(counts.taken), 0))


class Pass:
    """What a loader knows of one pass over its data."""

    def __init__(self, epoch: int) -> None:
        self.plan = Plan(epoch)
        self.batches, self.samples, self.taken = self._origin = 0, 0, 0
        self.is_divided = False
        self.passes = 0  # the worker's progress when the pass began
        self.was_left = False  # whether the script left the pass before its end
        self.loop: Loop | None = None  # the script's loop, in training
        self.origin: dict[str, Any] | None = None  # where the pass was resumed, and the random numbers then
        self.random: RandomState | None = None

    @classmethod
    def resume(cls, state: dict[str, Any], whole: int) -> Pass:
        """The rest of the pass in which ``Loader.state`` was taken; ``whole`` samples are counted as one batch."""
        self = cls(state["epoch"])
        if state["start"] is None:  # a stream
            self.plan.taken = self.taken = state["taken"]
        else:
            self.plan.start = Start.from_data(state["start"])
            self.plan.rest = Rest([(start, stop) for start, stop in state["rest"]])
        self.plan.is_resumed = True
        self.plan.has_begun = state.get("goes on", False)  # on other workers, which compare nothing any more
        self.batches, self.samples = state["batches"] * state["whole"] // whole, state["samples"]
        self.is_divided, self.origin = state["divided"], state
        self._origin = self.place
        return self

    def add(self, counts: Counts, everywhere: int) -> None:
        """One more batch has been taken."""
        self.batches += 1
        self.samples += everywhere
        self.taken = counts.taken or self.taken

    @property
    def samples_before(self) -> int:
        """Samples of the pass before it was resumed."""
        return self._origin[1]

    def complete(self, whole: int | None) -> int:
        """All of the data has been trained on, by whichever rank; returns how many samples were not known of.

        Args:
            whole: Samples of a pass, if that is known.
        """
        rest = 0 if whole is None else whole - self.samples
        self.samples += rest
        return rest

    @property
    def place(self) -> tuple[int, int, int]:
        """How far the pass is: batches and samples, and items taken of the source."""
        return self.batches, self.samples, self.taken

    @property
    def trained_place(self) -> tuple[int, int, int]:
        """How far the pass is, without batches that the script has asked for ahead of time."""
        loop = self.loop
        if loop is None or not (loop.is_ahead or loop.is_busy):
            return self.place
        place: tuple[int, int, int] | None = loop.at_work.place if loop.at_work and loop.trains else loop.place
        return place or self._origin

    def watched(self, items: Iterator[Item], *, training: bool) -> Iterator[Item]:
        """The same items; tells a timeline, if there is one, how long each took to come, and how long it was used."""
        return self._watch(items, training=training) if spans.are_kept() else items

    def _watch(self, items: Iterator[Item], *, training: bool) -> Iterator[Item]:
        while True:
            begin = time.perf_counter()
            if (item := next(items, None)) is None:
                return
            given = time.perf_counter()
            spans.add(spans.DATA, "next batch", begin, given)
            try:
                yield item
            finally:  # also of a loop that was left
                if training:
                    spans.add(spans.FRAME, "batch", given, time.perf_counter(), number=self.batches)
