"""The order of buckets: that in which gradients arrive, and which bucket is complete while a pass still computes.

The first pass is only watched: it shows in which order gradients become ready, and whether each comes once. On a GPU
three are, since the third one also shows how long a pass takes there; the first ones prepare much.
"""

from __future__ import annotations

import torch

from hocket.errors import StrategyError

_WATCHED_ON_GPU = 3  # passes


class Readiness:
    """Counts the gradients of each bucket.

    Attributes:
        is_early: Whether buckets may be sent off before the pass is over.
        has_sent: Whether a bucket was sent off early in this pass.
        is_held: Whether the rest of this pass is sent only when the pass is over.
    """

    def __init__(
        self, bucket_of: list[int], trained: list[list[int]], *, early: bool | None, on_gpu: bool = False
    ) -> None:
        self._bucket_of = bucket_of
        self._to_watch = 0 if early is not None else _WATCHED_ON_GPU if on_gpu else 1  # passes
        self._on_gpu = on_gpu
        self._marks: list[torch.cuda.Event] = []  # in the GPU's work, at each gradient of the pass that is watched
        self._repeats = False
        self._arrivals: list[int] = []  # indices of the gradients of the last watched pass, as they came
        self.is_early = bool(early)
        self.has_sent = self.is_held = False
        self.set_trained(trained)
        self.begin()

    def set_trained(self, trained: list[list[int]]) -> None:
        """Set which parameters of each bucket may get gradients from the next pass on; this pass is held back."""
        self._full = [len(inside) for inside in trained]
        self.is_held = True

    def begin(self) -> None:
        """A pass begins."""
        self._left = list(self._full)
        self._seen = bytearray(len(self._bucket_of))
        self.has_sent = self.is_held = False

    def arrive(self, index: int, *, nested: bool) -> int | None:
        """Take note of a gradient; returns the bucket that it completes, if that may be sent off.

        Args:
            index: The index of the parameter.
            nested: Whether the gradient came in a backward pass inside of the backward pass, and may come again.
        """
        if self._to_watch:
            self._watch(index, nested)
            return None
        if not self.is_early:
            return None
        bucket = self._bucket_of[index]
        if nested or self._seen[index]:
            raise StrategyError(
                "a gradient arrived twice in one backward pass, the second time after it may have been sent: use "
                "checkpoint(…, use_reentrant=False) with more than one host"
            )
        self._seen[index] = 1
        self._left[bucket] -= 1
        if self._left[bucket] or self.is_held:
            return None
        self.has_sent = True
        return bucket

    def _watch(self, index: int, nested: bool) -> None:
        self._repeats |= nested or bool(self._seen[index])
        if 1 not in self._seen:
            self._arrivals, self._marks = [], []
        self._seen[index] = 1
        self._arrivals.append(index)
        if self._on_gpu:
            self._marks.append(torch.cuda.Event(enable_timing=True))
            self._marks[-1].record()

    @property
    def seconds(self) -> float:
        """How long the GPU took from the first to the last gradient of the last watched pass; 0 without a GPU."""
        if not self._marks:
            return 0.0
        self._marks[-1].synchronize()
        return float(self._marks[0].elapsed_time(self._marks[-1])) / 1e3

    @property
    def order(self) -> list[int]:
        """All parameters, by index, in the order in which they should lie in the buckets, after the watched passes.

        Gradients that never arrive come first: they need not be last.
        """
        seen = list(dict.fromkeys(self._arrivals))
        return sorted(set(range(len(self._bucket_of))) - set(seen)) + seen

    def end(self) -> bool:
        """A pass that was exchanged is over; returns whether it was the last one to be watched."""
        was_last = self._to_watch == 1
        self._to_watch = max(0, self._to_watch - 1)
        if was_last:
            self.is_early = not self._repeats
        self.begin()
        return was_last
