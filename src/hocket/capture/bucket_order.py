"""The order of buckets: that in which gradients arrive, and which bucket is complete while a pass still computes.

The first pass is only watched: it shows in which order gradients become ready, and whether each comes once.
"""

from __future__ import annotations

from hocket.errors import StrategyError


class Readiness:
    """Counts the gradients of each bucket.

    Attributes:
        is_early: Whether buckets may be sent off before the pass is over.
        has_sent: Whether a bucket was sent off early in this pass.
        is_held: Whether the rest of this pass is sent only when the pass is over.
    """

    def __init__(self, bucket_of: list[int], trained: list[list[int]], *, early: bool | None) -> None:
        self._bucket_of = bucket_of
        self._learning = early is None
        self._repeats = False
        self._arrivals: list[int] = []  # indices of the gradients of the first pass, as they came
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
        if self._learning:
            self._repeats |= nested or bool(self._seen[index])
            self._seen[index] = 1
            self._arrivals.append(index)
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

    @property
    def order(self) -> list[int]:
        """All parameters, by index, in the order in which they should lie in the buckets, after the first pass.

        Gradients that never arrive come first: they need not be last.
        """
        seen = list(dict.fromkeys(self._arrivals))
        return sorted(set(range(len(self._bucket_of))) - set(seen)) + seen

    def end(self) -> bool:
        """A pass that was exchanged is over; whether it was the first one."""
        first, self._learning = self._learning, False
        if first:
            self.is_early = not self._repeats
        self.begin()
        return first
