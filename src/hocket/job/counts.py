"""How far the training of a worker is: steps of its optimizers, batches, and samples of this worker and of all."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from torch.optim import Optimizer

from hocket.capture.collector import BackwardPasses
from hocket.strategies.base import Strategy


class TrainingCounts:
    """How far the training of one worker is.

    Attributes:
        batches: Batches that training has had at work.
        samples: Samples that training has seen so far, of all ranks.
        tally: Samples that this worker has trained on itself.
        counters: One for each optimizer of a distributed model, in the order in which they were distributed.
    """

    def __init__(self, size: int, strategies: Sequence[Strategy], passes: BackwardPasses, *, served: bool) -> None:
        self._size, self._strategies, self._served = size, strategies, served
        self.batches = self.samples = 0
        self.counters: list[StepCounter] = []
        self.tally = Tally(lambda: passes.count + sum(counter.steps for counter in self.counters))
        self._ticks = 0
        self._stepped: set[StepCounter] = set()  # since the last tick
        self._agreed: int | None = None  # batches of all ranks, where workers are uneven and have told each other

    def watch(self, optimizer: Optimizer, steps: int = 0) -> None:
        """Count the steps of one more optimizer, which has taken so many before."""
        self.counters.append(StepCounter(optimizer, steps, self._tick))
        self.begin_loop()

    def begin_loop(self) -> None:
        """A training loop begins: the next step of any optimizer is a step of the training."""
        self._stepped.clear()

    def _tick(self, counter: StepCounter) -> None:
        """An optimizer has stepped. Those that take turns, as in a GAN, step once each before the next tick."""
        if not self._stepped or counter in self._stepped:
            self._ticks += 1
            self._stepped.clear()
        self._stepped.add(counter)

    @property
    def step(self) -> int:
        """Steps of the training: those of its optimizer, or of the busiest one where several are stepped in turn.

        Where one model is trained after another, it goes on rising with the steps of the model that is being trained.
        """
        return self._ticks if self.counters else self.batches

    @property
    def common_step(self) -> int:
        """The same on all ranks: batches where one may skip a step alone; what was agreed on where they are uneven."""
        if self._agreed is not None:
            return self._agreed // self._size
        return max((s.batches for s in self._strategies if s.spec.skips_alone), default=self.step)

    def agree(self, batches: int, samples: int) -> None:
        """All ranks together have had so many batches more, and the others so many samples."""
        self._agreed = (self._agreed or 0) + batches
        self.samples += samples

    def restart(self, batches: int, samples: int, steps: Sequence[int], step: int, common_step: int) -> None:
        """Go on from a checkpoint that was written after so many; ``steps`` are those of each optimizer."""
        self.batches, self.samples = batches, samples
        self.tally.restart(samples)
        for counter, taken in zip(self.counters, steps, strict=False):
            counter.steps = taken
        self._ticks = step
        self._stepped.clear()
        if not self._served and any(strategy.spec.is_uneven for strategy in self._strategies):
            self._agreed = common_step * self._size


class StepCounter:
    """Counts the steps of one optimizer, those that are skipped left out.

    Args:
        optimizer: Whose steps.
        steps: How many it has taken before.
        on_step: Called after each.
    """

    def __init__(self, optimizer: Optimizer, steps: int, on_step: Callable[[StepCounter], None]) -> None:
        self.optimizer, self.steps, self._on_step = optimizer, steps, on_step
        optimizer.register_step_post_hook(self._count)

    def _count(self, *_: object) -> None:
        self.steps += 1
        self._on_step(self)


class Tally:
    """Samples that this worker has trained on; whoever makes the record adds up those of all workers.

    A batch counts when training has gone on since it was given, and not when it is given: a look at a batch, or one
    that goes back to the queue, is no training. Several may be given before that (``zip``, losses that are added up).

    Args:
        progress: A number that goes up when the worker trains, also where it is alone.

    Attributes:
        before: Samples of all workers in the run that this one goes on from.
    """

    def __init__(self, progress: Callable[[], int]) -> None:
        self.progress, self._mark = progress, 0
        self._own = self.before = 0
        self._given: dict[int, int] = {}  # by loader, since the worker has trained last
        self._closed: set[int] = set()  # loops of these that are over

    @property
    def own(self) -> int:
        """So far, of this worker."""
        return self._own + (sum(self._given.values()) if self.progress() > self._mark else 0)

    def give(self, loader: object, samples: int) -> None:
        """A training loop gets a batch, of which this worker has so many samples."""
        self._own = self.own
        if self.progress() > self._mark:
            self.drop()
        self._given = {key: given for key, given in self._given.items() if key not in self._closed}
        self._closed.clear()
        self._given[id(loader)] = self._given.get(id(loader), 0) + samples
        self._mark = self.progress()

    def close(self, loader: object) -> None:
        """A training loop is over; its last batch may be at work still."""
        self._closed.add(id(loader))

    def drop(self) -> None:
        """What was given and not trained on does not count."""
        self._given.clear()

    def restart(self, samples: int) -> None:
        """Go on from a run in which all workers together have had so many samples."""
        self._own, self.before = 0, samples
        self.drop()
