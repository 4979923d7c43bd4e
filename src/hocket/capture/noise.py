"""Measures, now and then and without any message, how much the workers' gradients differ: noise scale and diversity.

A worker adds up |g|² of its own gradient and |G|² of the average over all workers. Their means over steps and ranks are
all that the launcher needs (see docs/noise.md), so ranks need not even look at the same steps. What a look costs is
measured, too, and decides how often there is one.
"""

from __future__ import annotations

import math
import time
from collections import deque
from collections.abc import Iterable, Sequence
from typing import NamedTuple

import torch

from hocket import spans
from hocket.capture.collector import Collector
from hocket.events import Gradients

_SHARE = 0.004  # the share of training time that looks may take
_FIRST, _PROBES = 4, 3  # the step with the first look; looks after which their cost is known (the first is slow)
_SPIKE = 3  # times its usual cost that a look can be charged: what is more was done by others
_MOST_STEPS = 1 << 12  # most steps between two looks
_LEAST_ON_GPU = 16  # steps between two looks where their cost cannot be seen by the clock
_CHUNK = 1 << 16  # elements whose squares are added up in their own precision
_LENGTH, _MOST_BLOCKS = 4, 32  # steps of a block at first, and how many there are

Square = float | torch.Tensor


class Sums(NamedTuple):
    """Sums over the looks in one block of steps; ``share`` is one worker's part of a step, in samples (or batches)."""

    looks: float
    share: float
    own: float  # |g|²
    average: float  # |G|²
    own_share: float  # |g|²·share
    average_share: float  # |G|²·share


class Blocks:
    """Sums over blocks of consecutive steps, which become longer instead of more: 32 at most.

    Attributes:
        length: Steps of a block.
        sums: The sums of each block, by its number.
    """

    def __init__(self) -> None:
        self.length = _LENGTH
        self.sums: dict[int, Sums] = {}

    def add(self, step: int, share: float, own: float, average: float) -> None:
        """Count a look at ``step``, from 1."""
        while (step - 1) // self.length >= _MOST_BLOCKS:
            old, self.sums = self.sums, {}
            self.length *= 2
            for number, sums in old.items():
                self._put(number // 2, sums)
        self._put((step - 1) // self.length, Sums(1, share, own, average, own * share, average * share))

    def _put(self, number: int, sums: Sums) -> None:
        before = self.sums.get(number)
        self.sums[number] = sums if before is None else Sums(*(a + b for a, b in zip(before, sums, strict=True)))


class Made(NamedTuple):
    """What gradients were made of, for a look at a time when the collector is at another batch."""

    weight: float
    samples: int
    collected: int


class Gauge:
    """Looks at the gradients of one strategy, on one of ``workers`` workers.

    Attributes:
        is_due: Whether there is a look in this step.
        steps: How many steps there have been.
        looks: In how many steps there was a look that counts.
        seconds: How long all looks have taken.
        blocks: What the looks have seen.
        knows_samples: Whether all steps were made of batches of a loader whose samples are known.
    """

    def __init__(self, workers: int, parameters: Sequence[torch.Tensor]) -> None:
        self.workers, self.parameters = workers, sum(parameter.numel() for parameter in parameters)
        self.steps, self.looks, self.seconds = 0, 0, 0.0
        self.knows_samples = True
        self.blocks = Blocks()
        self._least = _LEAST_ON_GPU if any(parameter.is_cuda for parameter in parameters) else 1
        self._next = _FIRST if workers > 1 else 0  # the step with the next look; 0 never comes
        self.is_due = False
        self._seen: dict[int, Square] = {}  # |g|² of this step, by bucket
        self._cost, self._charged = 0.0, 0.0
        self._costs: deque[float] = deque(maxlen=5)
        self._paces: deque[float] = deque(maxlen=8)
        self._last = (0, 0.0)  # step and time of the last look, or of the first step
        self._under_way: deque[_Pending] = deque()

    def see(self, bucket: int, slot: torch.Tensor) -> None:
        """This worker's gradients of ``bucket`` are complete, and may soon be replaced by the average."""
        if self.is_due:
            begin = time.perf_counter()
            self._seen[bucket] = _square(slot)
            self._cost += time.perf_counter() - begin

    def see_rest(self, slots: Sequence[torch.Tensor]) -> None:
        """All gradients of this worker are complete: look at the buckets that ``see`` has not seen."""
        if self.is_due:
            for bucket, slot in enumerate(slots):
                if bucket not in self._seen:
                    self.see(bucket, slot)

    def end_step(self, results: Sequence[torch.Tensor], collector: Collector | Made) -> None:
        """The averages of this step are there: look at them, if a look is due."""
        if self.is_due:
            begin = time.perf_counter()
            own, average = _total(self._seen.values()), _total(map(_square, results))
            self._seen.clear()
            self._end_look(own, average, collector, begin)
        self._count()

    def end_sliced_step(self, parts: Iterable[torch.Tensor], results: Iterable[torch.Tensor], it: Collector) -> None:
        """Like ``end_step``, where a worker sees one slice of all workers' gradients: ``parts``, and their averages.

        Means over ranks are then those of whole gradients.
        """
        if self.is_due:
            begin = time.perf_counter()
            self._end_look(_total(map(_square, parts)), self.workers * _total(map(_square, results)), it, begin)
        self._count()

    def stop(self) -> None:
        """Look no more."""
        self._next, self.is_due = 0, False

    def settle(self) -> None:
        """Count what has arrived from a GPU; waits for nothing."""
        while self._under_way and self._under_way[0].event.query():
            pending = self._under_way.popleft()
            own, average = pending.values.tolist()
            self._add(pending.step, pending.share, own, average)

    def report(self, number: int) -> Gradients | None:
        """What was seen so far, of the model with this number, for the launcher; None if that is nothing."""
        self.settle()
        sums = {str(block): list(values) for block, values in self.blocks.sums.items()}
        known, length = self.knows_samples, self.blocks.length
        return Gradients(number, self.workers, self.parameters, self.steps, known, length, sums) if sums else None

    def _end_look(self, own: Square, average: Square, collector: Collector | Made, begin: float) -> None:
        share = collector.collected * (collector.samples / self.workers or 1.0)
        step, is_usual = self.steps + 1, collector.weight == 1
        if is_usual:  # else ranks have different numbers of samples
            self.knows_samples &= collector.samples > 0
            if isinstance(own, torch.Tensor) or isinstance(average, torch.Tensor):
                self._under_way.append(_fetch(step, share, own, average))
            else:
                self._add(step, share, own, average)
        self.settle()
        self._plan(step, begin)

    def _add(self, step: int, share: float, own: float, average: float) -> None:
        if math.isfinite(own) and math.isfinite(average):
            self.looks += 1
            self.blocks.add(step, share, own, average)

    def _plan(self, step: int, begin: float) -> None:
        """Find the next step with a look: a multiple of a power of two, so that ranks mostly meet."""
        now = time.perf_counter()
        spans.add(spans.COMPUTE, "look at gradient noise", begin, now)
        self._costs.append(self._cost + now - begin)
        self.seconds += self._costs[-1]
        self._cost = 0.0
        self._paces.append((now - self._last[1]) / (step - self._last[0]))
        self._last = (step, now)
        # Seconds per look, and per step. The least of each is seen: what is more, others did who needed the core.
        cost, budget = min(self._costs), _SHARE * max(min(self._paces), 1e-9)
        if len(self._costs) < _PROBES:
            self._next = 2 * step
            return
        self._charged += min(self._costs[-1], _SPIKE * cost) if self._charged else _PROBES * cost
        apart = self._least
        while apart < min(cost / budget, _MOST_STEPS):
            apart *= 2
        paid = min((self._charged + cost) / budget, step + _MOST_STEPS)  # the step by which another look is paid for
        self._next = apart * max(step // apart + 1, math.ceil(paid / apart))

    def _count(self) -> None:
        self.steps += 1
        if self.steps == 1:
            self._last = (1, time.perf_counter())
        self.is_due = self.steps + 1 == self._next


class _Pending(NamedTuple):
    """A look whose values are on their way from a GPU."""

    step: int
    share: float
    values: torch.Tensor
    event: torch.cuda.Event


def _fetch(step: int, share: float, own: Square, average: Square) -> _Pending:
    device = next(value.device for value in (own, average) if isinstance(value, torch.Tensor))
    found = torch.stack([torch.as_tensor(value, dtype=torch.float64, device=device) for value in (own, average)])
    values = torch.empty(2, dtype=torch.float64, pin_memory=True)
    values.copy_(found, non_blocking=True)
    event = torch.cuda.Event()
    event.record(torch.cuda.current_stream(device))
    return _Pending(step, share, values, event)


def _square(flat: torch.Tensor) -> Square:
    """The sum of the squares, which stays on a GPU.

    In chunks: a single sum of ten million squares in float32 is wrong by a few ten thousandths.
    """
    if flat.is_cuda:
        norm: torch.Tensor = torch.linalg.vector_norm(flat, dtype=torch.promote_types(flat.dtype, torch.float32))
        return norm.double().square()
    chunks = flat.split(_CHUNK) if flat.numel() > _CHUNK else (flat,)
    if flat.dtype in (torch.float32, torch.float64):
        return sum(float(torch.dot(chunk, chunk)) for chunk in chunks)
    return sum(float(torch.linalg.vector_norm(chunk, dtype=torch.float32)) ** 2 for chunk in chunks)


def _total(squares: Iterable[Square]) -> Square:
    total: Square = 0.0
    for square in squares:
        total = total + square
    return total
