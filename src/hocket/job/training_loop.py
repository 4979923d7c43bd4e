"""One pass over a loader as training sees it: the batches that the script was given."""

from __future__ import annotations

import contextlib
from collections import deque
from collections.abc import Callable
from typing import Any

import torch
from torch.multiprocessing.reductions import StorageWeakRef

from hocket.capture.collector import BackwardPasses
from hocket.capture.model_hooks import tensors
from hocket.comm.communicator import Communicator
from hocket.errors import UsageError
from hocket.strategies.base import Strategy


class Batch:
    """One batch that a loop was given.

    Args:
        contents: What the script got.
        samples: How many samples of this worker the batch has.
        place: How far the pass is with this batch.
        start: Sets weights and counts to those of this batch; returns how much the batch weighs.

    Attributes:
        number: How many batches the loop was given before.
        weight: How much the batch weighs, if work on it has begun.
        has_passed: Whether a forward pass for the batch was seen.
        asked_at: The backward passes when the script asked for another batch after that, and before the step.
        steps: How many steps each strategy has taken on the batch.
    """

    def __init__(self, contents: object, samples: int, place: Any, start: Callable[[], float]) -> None:
        self.samples, self.place, self.start = samples, place, start
        self.number, self.weight = 0, 1.0
        self.has_passed = False
        self.asked_at: int | None = None
        self.steps: dict[Strategy, int] = {}
        self._parts = [(extent, StorageWeakRef(tensor.untyped_storage())) for extent, tensor in _extents(contents)]
        self._contents = None if self._parts else contents
        self._lengths = _lengths(contents)

    @property
    def is_alive(self) -> bool:
        """Whether the script still has tensors of the batch as it got them."""
        return not all(storage.expired() for _, storage in self._parts)

    def has(self, inputs: object) -> bool:
        """Whether ``inputs`` are, as far as can be seen, made of this batch."""
        if self._parts:
            mine = [extent for extent, storage in self._parts if not storage.expired()]
            return any(a < d and c < b for a, b in mine for (c, d), _ in _extents(inputs))
        return any(each is self._contents for each in _things(inputs))

    def fits(self, inputs: object) -> bool:
        """Whether ``inputs`` have as many samples as the batch."""
        return bool(self._lengths & _lengths(inputs))


class Loop:
    """One pass over a loader, as training sees it.

    Attributes:
        given: Batches that have been given to the script and are not done, in this order.
        passed_over: Batches of which the script has trained on later ones first, as long as it has them.
        at_work: The batch that the script trains on.
        asked: How often the script has asked for a batch; one more than there are batches at the end.
        lag: How many batches later than the one at work the script has then asked for; None before that is known.
        is_told: Whether inputs of the model have told which batch they are made of.
        is_guessed: Whether ``lag`` follows from the number of batches before the first forward pass alone.
        is_watched: Whether forward and backward passes are seen.
        is_late: Whether the loop is over, and the script trains on the rest of its batches only now.
        in_thread: Whether the script takes batches in another thread; nothing is collective there.
    """

    def __init__(self, loader: object, epoch: int, backward: BackwardPasses, *, in_thread: bool) -> None:
        self.loader, self.epoch, self._backward = loader, epoch, backward
        self.given: deque[Batch] = deque()
        self.passed_over: list[Batch] = []
        self.at_work: Batch | None = None
        self.asked = 0
        self.is_told = self.is_guessed = self.is_watched = self.is_late = False
        self.lag: int | None = None
        self.in_thread = in_thread
        self.passes = 0  # backward passes when work on the batch at work began
        self.usual: int | None = None  # backward passes for one batch, as the last one had
        self.usual_steps = 0  # and steps of all optimizers
        self.asks_early: bool | None = None  # whether the script asks between a forward pass and its step
        self.place: Any = None  # how far the pass is with the last batch that is done
        self.has_begun = self.has_trained = False
        self.weight = 1.0  # the weight of the batch at work
        self.pause: Callable[[], None] | None = None  # what the loader does before all settle
        self.between: Callable[[], None] | None = None  # what the loader does between two batches
        self.after: Callable[[], None] | None = None  # called when all batches are done, and no more will come

    def check_thread(self, group: Communicator, *, agrees: bool) -> None:
        """If the loop is in a thread, have the workers of ``group`` stay as they are, which the thread cannot follow.

        Raises:
            UsageError: ranks ``agree`` on something in every batch, or the user has asked for a group that changes.
        """
        if self.in_thread and group.changes:
            group.stay("a loader is iterated in a thread of the script: iterate it in the main thread")
        if self.in_thread and agrees:
            raise UsageError(
                "a loader was iterated in a thread of the script, where ranks cannot agree on batches, as this data or "
                "strategy needs: iterate it in the main thread, and let DataLoader(num_workers=…) read ahead"
            )

    def end(self) -> None:
        """Do what is due when all batches are done; collective."""
        after, self.after = self.after, None
        assert after is not None
        after()

    @property
    def trains(self) -> bool:
        """Whether the script has trained on the batch at work."""
        return self.at_work is not None and self._backward.count > self.passes

    @property
    def is_busy(self) -> bool:
        """Whether the batch at work had its forward pass and waits for its step, so that no newer one takes over."""
        return self.at_work is not None and self.at_work.has_passed and not self.at_work.steps

    @property
    def is_torn(self) -> bool:
        """Whether the script has asked for a batch between a forward pass and its step, and not left the batch out."""
        if self.at_work is None or not self.is_busy or self.at_work.asked_at is None:
            return False
        return bool(self.asks_early) if self.trains else self.asks_early is not False

    @property
    def is_plain(self) -> bool:
        """Whether there is only one batch that a forward pass can be for."""
        is_one = len(self.given) == 1 and self.given[0] is self.at_work
        return is_one and self.lag is not None and not self.passed_over

    @property
    def untrained(self) -> list[Batch]:
        """Batches that the script has and may train on yet."""
        after = self.at_work is None or self.lag is None
        found = []
        for batch in self.given:
            after |= batch is self.at_work
            if after and not (batch is self.at_work and self.trains):
                found.append(batch)
        return found

    @property
    def untrained_numbers(self) -> list[int]:
        """The numbers of these in the queue that they were taken from, if they were."""
        return [batch.place[2] - 1 for batch in self.untrained]

    @property
    def is_ahead(self) -> bool:
        """Whether the script has asked for batches that come after the one at work."""
        return bool(self.given) and self.at_work is not self.given[-1]

    @property
    def waits(self) -> bool:
        """Whether the script has asked for batches ahead of time, and has not trained on them yet."""
        may_wait = self.in_thread or (self.is_watched if self.lag is None else self.lag > 0)
        return self.is_torn or (may_wait and bool(self.untrained))

    def find(self, inputs: object) -> Batch | None:
        """The batch that ``inputs`` are made of, as far as can be seen."""
        self.passed_over = [batch for batch in self.passed_over if batch.is_alive]
        found = [batch for batch in (*self.given, *self.passed_over) if batch.has(inputs)]
        expected = self.expected if len(found) > 1 else None
        return expected if expected in found else found[0] if found else None

    def guess(self, inputs: object) -> Batch:
        """The batch that ``inputs`` are for, by the order of the batches, and by how many samples it has."""
        if self.lag is None:
            self.learn_order()
        expected = self.expected
        if self.is_told or expected.fits(inputs):
            return expected
        fitting = [batch for batch in self.given if batch.fits(inputs)]
        if fitting and self.after is None and not self.in_thread:
            self.lag = self.asked - 1 - fitting[-1].number
        return fitting[-1] if fitting else expected

    def learn_order(self) -> None:
        """The first forward pass, or step, tells how many batches the script asks for ahead of time."""
        self.lag = self.asked - 1 - self.given[0].number
        self.is_guessed = self.lag > 0 and not self.in_thread

    @property
    def expected(self) -> Batch:
        """The batch whose turn it is, going by the order in which the script got its batches; there is one."""
        number = self.asked - 1 - (self.lag or 0)
        if self.in_thread:
            number = 0  # another thread asks, some time
        is_over = self.in_thread or self.is_late or self.after is not None
        if is_over and self.at_work is not None and (self.at_work.has_passed or self.trains):
            number = max(number, self.at_work.number + self.is_done)
        return next((batch for batch in self.given if batch.number >= number), self.given[-1])

    @property
    def is_done(self) -> bool:
        """Whether the batch at work has had as many backward passes as the one before."""
        passes = self._backward.count - self.passes
        assert self.at_work is not None
        return bool(self.trains and (self.at_work.steps if self.usual is None else passes >= self.usual))

    @property
    def is_last(self) -> bool:
        """Whether the batch at work is the last that the script has, and had as many steps as the one before."""
        steps = 0 if self.at_work is None else sum(self.at_work.steps.values())
        is_alone = len(self.given) == 1 and not any(batch.is_alive for batch in self.passed_over)
        return is_alone and steps >= self.usual_steps


def _things(value: object) -> list[object]:
    """A value and all that is in it, as far as plain containers go."""
    if isinstance(value, dict):
        return [value, *(thing for each in value.values() for thing in _things(each))]
    if isinstance(value, (list, tuple)):
        return [value, *(thing for each in value for thing in _things(each))]
    return [value]


def _extents(value: object) -> list[tuple[tuple[int, int], torch.Tensor]]:
    """The tensors in a value that have a place in memory, each with its beginning and its end there."""
    found = []
    for tensor in tensors(value):
        with contextlib.suppress(RuntimeError):  # sparse tensors, those of torch.func …
            if tensor.numel() and (start := tensor.data_ptr()):
                steps = zip(tensor.shape, tensor.stride(), strict=True)
                length = sum((size - 1) * stride for size, stride in steps) + 1
                found.append(((start, start + length * tensor.element_size()), tensor))
    return found


def _lengths(value: object) -> set[int]:
    """The lengths of the tensors in a value."""
    return {len(tensor) for tensor in tensors(value) if tensor.dim()}
