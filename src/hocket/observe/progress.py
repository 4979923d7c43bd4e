"""How fast a run is: speed, shares of waiting and communication, and the time left, from records of progress."""

from __future__ import annotations

import time
from collections import deque
from dataclasses import dataclass

from hocket.events import Progress

_WINDOW = 5.0  # seconds over which the speed is taken


@dataclass(frozen=True)
class Mark:
    """What a worker had done at one moment, counted since the run began.

    Attributes:
        time: The time, by a clock that the caller chooses.
        batches: Batches that the loader has given.
        steps: Steps of the optimizer; batches where the worker does not tell its steps.
        samples: Samples of all workers.
        waited: Seconds that the worker has slept for others.
        exchanging: Seconds that it has spent in exchanges, waiting included.
        told: Whether the worker counts steps and samples itself.
    """

    time: float
    batches: int
    steps: int
    samples: int
    waited: float
    exchanging: float
    told: bool


@dataclass(frozen=True)
class Rates:
    """What happened between two marks; shares are of the time between them."""

    samples: float  # samples a second
    batches: float  # batches a second
    step_seconds: float | None  # None where there was no step
    waiting: float
    communication: float


def rates(first: Mark, last: Mark) -> Rates | None:
    """The rates between two marks, or None where they cannot be compared or no time has passed."""
    seconds, waited = last.time - first.time, last.waited - first.waited
    steps, samples = last.steps - first.steps, last.samples - first.samples
    if seconds <= 0 or first.told != last.told or min(waited, steps, samples) < 0:
        return None
    communicated = last.exchanging - first.exchanging - waited
    return Rates(
        samples=samples / seconds,
        batches=(last.batches - first.batches) / seconds,
        step_seconds=seconds / steps if steps else None,
        waiting=min(1.0, waited / seconds),
        communication=min(1.0, max(0.0, communicated / seconds)),
    )


class Odometer:
    """Makes marks from the records of a worker, counting on over the ends of epochs."""

    def __init__(self) -> None:
        self._epoch, self._step, self._samples = 0, 0, 0
        self._batches_before, self._samples_before = 0, 0
        self._told = False

    def read(self, record: Progress, now: float) -> Mark:
        """Take in one record, in the order in which the worker has sent them."""
        if record.epoch != self._epoch or record.step < self._step:  # a new epoch, or another loader
            self._batches_before += self._step
            self._samples_before += self._samples
        self._epoch, self._step, self._samples = record.epoch, record.step, record.samples
        self._told = self._told or record.seen > 0 or record.total > 0
        batches = self._batches_before + record.step
        return Mark(
            time=now,
            batches=batches,
            steps=record.total if self._told else batches,
            samples=record.seen if self._told else self._samples_before + record.samples,
            waited=record.waited,
            exchanging=record.exchanging,
            told=self._told,
        )


class RunPace:
    """The speed of a run over its last seconds, and the text that shows it."""

    def __init__(self) -> None:
        self.record: Progress | None = None
        self._odometer = Odometer()
        self._marks: deque[Mark] = deque()

    def update(self, record: Progress, now: float | None = None) -> None:
        """Take in how far rank 0 is."""
        self.record = record
        mark = self._odometer.read(record, time.monotonic() if now is None else now)
        if self._marks and (mark.told != self._marks[-1].told or mark.samples < self._marks[-1].samples):
            self._marks.clear()  # counted in another way from here on
        self._marks.append(mark)
        while mark.time - self._marks[0].time > _WINDOW and len(self._marks) > 2:
            self._marks.popleft()

    @property
    def rates(self) -> Rates | None:
        """The rates of the last seconds, or None at the start."""
        return rates(self._marks[0], self._marks[-1]) if self._marks else None

    @property
    def seconds_left(self) -> float | None:
        """Seconds until the end of the epoch, or None where that is unknown."""
        current = self.rates
        if self.record is None or self.record.steps is None or current is None or current.batches <= 0:
            return None
        return max(0, self.record.steps - self.record.step) / current.batches

    @property
    def text(self) -> str:
        """One line for a person, empty before the first record."""
        if (record := self.record) is None:
            return ""
        parts = [f"epoch {record.epoch}", f"step {record.step}/{record.steps or '?'}"]
        if (left := self.seconds_left) is not None:
            parts.append(f"{clock(left)} left")
        if (current := self.rates) is not None:
            parts.append(f"{current.samples:,.0f} samples/s")
            if record.exchanging:
                parts += [f"{current.waiting:.0%} waiting", f"{current.communication:.0%} communication"]
        return ", ".join(parts)


def clock(seconds: float) -> str:
    """``0:42`` or ``1:02:03``."""
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02}:{rest:02}" if hours else f"{minutes}:{rest:02}"
