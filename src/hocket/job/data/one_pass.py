"""One pass over the data, and how far it is."""

from __future__ import annotations

import time
from collections.abc import Iterator
from typing import Any, TypeVar

from hocket import spans
from hocket.job.data.rest import Rest
from hocket.job.data.sharding import Counts, Plan, Start
from hocket.job.loop import Loop
from hocket.job.randomness import RandomState

Item = TypeVar("Item")


class Pass:
    """What a loader knows of it."""

    def __init__(self, epoch: int) -> None:
        self.plan = Plan(epoch)
        self.batches, self.samples, self.taken = self._origin = 0, 0, 0
        self.is_divided = False
        self.passes = 0  # how much had been trained when it began
        self.was_left = False  # before its end
        self.loop: Loop | None = None  # of the script, in training
        self.origin: dict[str, Any] | None = None  # where it was resumed, and the random numbers then
        self.random: RandomState | None = None

    @classmethod
    def resume(cls, state: dict[str, Any], ranks: int) -> Pass:
        """The rest of the pass in which ``Loader.state`` was taken; batches of ``ranks`` workers are counted as one."""
        self = cls(state["epoch"])
        if state["start"] is None:  # a stream
            self.plan.taken = self.taken = state["taken"]
        else:
            self.plan.start = Start.from_data(state["start"])
            self.plan.rest = Rest([(start, stop) for start, stop in state["rest"]])
        self.plan.is_resumed = True
        self.batches, self.samples = state["batches"] * state["ranks"] // ranks, state["samples"]
        self.is_divided, self.origin = state["divided"], state
        self._origin = self.place
        return self

    def add(self, counts: Counts, everywhere: int) -> None:
        """One more batch has been taken."""
        self.batches += 1
        self.samples += everywhere
        self.taken = counts.taken or self.taken

    def complete(self, whole: int | None) -> int:
        """All of the data has been trained on, by whichever rank: how many samples more that is than was known.

        Args:
            whole: Samples of a pass, if that is known.
        """
        rest = 0 if whole is None else whole - self.samples
        self.samples += rest
        return rest

    @property
    def place(self) -> tuple[int, int, int]:
        """How far it is: batches and samples, and what was taken of the source."""
        return self.batches, self.samples, self.taken

    @property
    def trained_place(self) -> tuple[int, int, int]:
        """The same, without what the script has asked for ahead of time."""
        loop = self.loop
        if loop is None or not loop.is_ahead:
            return self.place
        place: tuple[int, int, int] | None = loop.at_work.place if loop.at_work and loop.trains else loop.place
        return place or self._origin

    def watched(self, items: Iterator[Item], *, training: bool) -> Iterator[Item]:
        """The same items; a timeline, if there is one, is told how long each took to come, and how long it was used."""
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
