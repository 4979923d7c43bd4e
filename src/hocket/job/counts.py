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

    def __init__(self, strategies: Sequence[Strategy], passes: BackwardPasses, *, served: bool) -> None:
        self._strategies, self._served = strategies, served
        self.batches = self.samples = 0
        self.counters: list[StepCounter] = []
        self.tally = Tally(lambda: passes.count + sum(counter.steps for counter in self.counters))
        self._ticks = 0
        self._stepped: set[StepCounter] = set()  # optimizers that have stepped since the last tick
        self._agreed: float | None = None  # batches of a rank on the average, where ranks are uneven

    def watch(self, optimizer: Optimizer, steps: int = 0) -> None:
        """Count the steps of one more optimizer, which has taken ``steps`` before."""
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

        Where one model is trained after another, the number goes on rising with the model that is being trained.
        """
        return self._ticks if self.counters else self.batches

    @property
    def common_step(self) -> int:
        """A step that is the same on all ranks: batches where a rank may skip one; the agreed number where uneven."""
        if self._agreed is not None:
            return int(self._agreed + 1e-9)
        return max((s.batches for s in self._strategies if s.spec.skips_alone), default=self.step)

    def agree(self, batches: float, samples: int) -> None:
        """Ranks have had this many more batches on the average, and the other ranks together this many samples."""
        self._agreed = (self._agreed or 0.0) + batches
        self.samples += samples

    def level(self) -> None:
        """Count on from a whole number, as a newcomer does, which knows only that."""
        self._agreed = None if self._agreed is None else float(self.common_step)

    def restart(self, batches: int, samples: int, steps: Sequence[int], step: int, common_step: int) -> None:
        """Go on from the counts of a checkpoint; ``steps`` are those of each optimizer."""
        self.batches, self.samples = batches, samples
        self.tally.restart(samples)
        for counter, taken in zip(self.counters, steps, strict=False):
            counter.steps = taken
        self._ticks = step
        self._stepped.clear()
        if not self._served and any(strategy.spec.is_uneven for strategy in self._strategies):
            self._agreed = float(common_step)


class StepCounter:
    """Counts the steps of one optimizer, those that are skipped left out.

    Args:
        optimizer: The optimizer whose steps are counted.
        steps: How many steps it has taken before.
        on_step: Called after each step.
    """

    def __init__(self, optimizer: Optimizer, steps: int, on_step: Callable[[StepCounter], None]) -> None:
        self.optimizer, self.steps, self._on_step = optimizer, steps, on_step
        optimizer.register_step_post_hook(self._count)

    def _count(self, *_: object) -> None:
        self.steps += 1
        self._on_step(self)


class Tally:
    """Samples that this worker has trained on; the recorder adds up those of all workers.

    A batch counts when training has gone on since it was given, and not when it is given: a look at a batch, or one
    that goes back to the queue, is no training. Several batches may be given before training goes on (``zip``).

    Args:
        progress: Gives a number that goes up when the worker trains, also where it is alone.

    Attributes:
        before: Samples of all workers in the run that this run goes on from.
    """

    def __init__(self, progress: Callable[[], int]) -> None:
        self.progress, self._mark = progress, 0
        self._own = self.before = 0
        self._given: dict[int, int] = {}  # samples given since the worker has trained last, by loader
        self._closed: set[int] = set()  # loaders whose loops are over

    @property
    def own(self) -> int:
        """Samples that this worker has trained on so far."""
        return self._own + (sum(self._given.values()) if self.progress() > self._mark else 0)

    def give(self, loader: object, samples: int) -> None:
        """A training loop gets a batch, of which this worker has ``samples`` samples."""
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
        """Forget batches that were given and not trained on."""
        self._given.clear()

    def restart(self, samples: int) -> None:
        """Go on from a run in which all workers together have had ``samples`` samples."""
        self._own, self.before = 0, samples
        self.drop()
