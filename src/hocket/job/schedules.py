"""Learning-rate schedules where workers advance unevenly: they follow what all workers have done, not this one alone.

A scheduler that is stepped inside a training loop is meant to get from the loop's beginning to its end. A worker that
has had half as many batches as the others on the average therefore takes its schedule's steps in pairs.
"""

from __future__ import annotations

import gc
from collections.abc import Callable, Mapping, Sequence
from typing import Any
from weakref import WeakKeyDictionary

from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler

from hocket.capture.collector import BackwardPasses


class LoopPace:
    """How far the training loop is that goes on, where workers may advance unevenly.

    Attributes:
        own: Batches that this worker has had.
        pace: Batches that a worker has had on the average.
    """

    def __init__(self, passes: BackwardPasses) -> None:
        self.own, self.pace = 0, 0.0
        self._passes, self._followed = passes, 0  # backward passes when the last batch was followed
        self._following: Following | None = None
        self._inherited: tuple[int, dict[int, list[int]]] = 0, {}
        self._usual: WeakKeyDictionary[LRScheduler, float] = WeakKeyDictionary()

    def place(self, scheduler: object) -> list[int]:
        """Calls of a scheduler's ``step`` in this loop, and steps that it has taken, for a newcomer."""
        return [0, 0] if self._following is None else self._following.counts.get(id(scheduler), [0, 0])

    def inherit(self, own: int, places: dict[int, list[int]]) -> None:
        """Begin the next loop, as a newcomer, where another worker is: its batches, and the places of schedulers."""
        self._inherited = own, places

    def begin(self, optimizers: Callable[[], list[Optimizer]] | None) -> None:
        """A loop begins; the schedulers of ``optimizers``, if some are given, follow its pace until its end."""
        (self.own, places), self._inherited = self._inherited, (0, {})
        self.pace, self._followed = 0.0, self._passes.count - 1
        if self._following is None and optimizers is not None:
            self._following = Following(self, optimizers(), places)

    def follow(self, pace: float) -> None:
        """This worker gets a batch; ``pace`` is how many batches a worker has had on the average."""
        if self._passes.count > self._followed:  # else it is another loop's part of the same batch
            self.own += 1
        self._followed, self.pace = self._passes.count, pace

    def due(self, scheduler: LRScheduler, calls: int) -> int:
        """Steps that a scheduler has to have taken in this loop, after so many calls of its ``step``.

        A worker that had no batch at all goes by its calls for each batch in the loops before.
        """
        if self.own:
            self._usual[scheduler] = calls / self.own
            return int(calls * self.pace / self.own + 1e-9)
        return max(calls, int(self._usual.get(scheduler, 0.0) * self.pace + 1e-9))

    def complete(self, pace: float) -> None:
        """All batches are done; a worker that had fewer than others in the end takes the steps that it missed."""
        self.pace = pace
        if self._following is not None:
            self._following.complete()

    def end(self) -> None:
        """The loop is over."""
        if self._following is not None:
            self._following.end()
            self._following = None


class Following:
    """For the time of one training loop, the schedulers of some optimizers follow the pace of all workers."""

    def __init__(
        self, pace: LoopPace, optimizers: list[Optimizer], places: Mapping[int, Sequence[int]] | None = None
    ) -> None:
        self._pace = pace
        self._kinds: list[tuple[LRScheduler, type[LRScheduler]]] = []
        self.counts: dict[int, list[int]] = {}  # calls of a scheduler's step(), and steps taken for them
        for scheduler in _schedulers(optimizers):
            kind = type(scheduler)
            self._kinds.append((scheduler, kind))
            self.counts[id(scheduler)] = [*(places or {}).get(id(scheduler), (0, 0))]
            scheduler.__class__ = self._make(kind)

    def end(self) -> None:
        """The loop is over: from now on, a scheduler's step is one step again."""
        for scheduler, kind in self._kinds:
            scheduler.__class__ = kind

    def complete(self) -> None:
        """All workers come to the same place of their schedules."""
        for scheduler, kind in self._kinds:
            self._catch_up(scheduler, kind)

    def _catch_up(self, scheduler: LRScheduler, kind: type[LRScheduler]) -> None:
        counts = self.counts[id(scheduler)]
        due = self._pace.due(scheduler, counts[0])
        for _ in range(due - counts[1]):
            kind.step(scheduler)
        counts[1] = max(counts[1], due)

    def _make(self, kind: type[LRScheduler]) -> type[LRScheduler]:
        following = self

        def step(scheduler: Any, *args: Any, **kwargs: Any) -> None:
            if args or kwargs:
                kind.step(scheduler, *args, **kwargs)
                return
            following.counts[id(scheduler)][0] += 1
            following._catch_up(scheduler, kind)

        return type(kind.__name__, (kind,), {"step": step, "__module__": kind.__module__, "__doc__": kind.__doc__})


def _schedulers(optimizers: list[Optimizer]) -> list[LRScheduler]:
    """The schedulers that a script has built on ``optimizers``, which do not know their schedulers.

    The search takes tens of milliseconds, so it is left out where no scheduler has left its mark.
    """
    marked = [each for each in optimizers if any("initial_lr" in group for group in each.param_groups)]
    if not marked:
        return []
    holders = gc.get_referrers(*marked)
    attributes = [each for each in holders if type(each) is dict and any(each.get("optimizer") is o for o in marked)]
    holders += gc.get_referrers(*attributes) if attributes else []
    found = {
        id(each): each
        for each in holders
        if isinstance(each, LRScheduler) and any(getattr(each, "optimizer", None) is o for o in marked)
    }
    inside = {id(part) for each in found.values() for part in getattr(each, "_schedulers", ())}
    return [each for each in found.values() if id(each) not in inside]
