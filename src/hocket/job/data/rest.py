"""What is left of an epoch: all that a checkpoint says of a pass over indices, whoever dealt out its batches.

The order of the samples follows from the seed and the epoch, under every strategy and on any number of workers.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from itertools import islice
from typing import TypeVar

T = TypeVar("T")
Span = tuple[int, int | None]  # from, and to (excluded; None is the end of the order)


class Rest:
    """Places in the order of an epoch that are not done; the last of ``spans`` goes to the end."""

    def __init__(self, spans: Sequence[Span] = ((0, None),)) -> None:
        self.spans = tuple(spans)

    def pick(self, items: Iterator[T]) -> Iterator[T]:
        """Those of all items of an epoch that are left."""
        at = 0
        for start, stop in self.spans:
            next(islice(items, start - at, start - at), None)
            yield from islice(items, None if stop is None else stop - start)
            at = stop or start

    def count(self, total: int) -> int:
        """How many are left if the epoch has ``total``."""
        return sum(max(0, min(total, total if stop is None else stop) - start) for start, stop in self.spans)

    def place(self, index: int) -> int:
        """Where the ``index``-th of those that are left is in the order."""
        for start, stop in self.spans:
            if stop is None or index < stop - start:
                return start + index
            index -= stop - start
        raise IndexError(index)

    def only(self, kept: Iterable[Span]) -> Rest:
        """Only some of what is left, in numbers of these: ascending, the last one to the end."""
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
