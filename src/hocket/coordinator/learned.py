"""Which batches workers have learned from, in memory that outlives them: a worker that is killed says nothing more.

Where workers update one copy of the parameters in shared memory, no server sees an update. The queue hears of a batch
with the worker's next question, which may come many batches later.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from hocket.transport.area import Area

_RANKS = 128  # workers of one host of whose batches there is a note
_KEPT = 512  # batches of each worker: more than it may have learned from since its last question


class LearnedBatches:
    """The last batches that each worker has learned from, by queue, epoch and number."""

    nbytes = _RANKS * _KEPT * 8

    def __init__(self, area: Area) -> None:
        self._words = area.words[: self.nbytes].cast("Q")
        self._next = 0

    def note(self, rank: int, names: Iterable[Sequence[int]]) -> None:
        """Worker ``rank`` has learned from these batches."""
        if rank < _RANKS:
            for name in names:
                self._words[rank * _KEPT + self._next % _KEPT] = _pack(*name)  # in one piece, or not at all
                self._next += 1

    def among(self, rank: int, held: Iterable[Sequence[int]]) -> list[Sequence[int]]:
        """Those of the batches ``held`` that worker ``rank`` has learned from."""
        if rank >= _RANKS:
            return []
        noted = set(self._words[rank * _KEPT : (rank + 1) * _KEPT])
        return [name for name in held if _pack(*name) in noted]


def _pack(queue: int, epoch: int, number: int) -> int:
    """One word for a batch; never 0, which stands for none."""
    return 1 << 63 | (epoch & 0xFFFFFF) << 39 | (queue & 0x7F) << 32 | number & 0xFFFFFFFF
