"""Memory that the workers of one host share; the coordinator makes it, and reads one kind: what was learned.

Where workers update one copy of the parameters in shared memory, no server sees an update. The queue hears of a batch
with the worker's next question, which may come many batches later, and a worker that is killed says nothing more. So
workers note what they have learned from in memory that outlives them.
"""

from __future__ import annotations

import threading
from collections.abc import Iterable, Sequence

from hocket.errors import MismatchError
from hocket.transport.area import Area

_LONGEST_PURPOSE = 60  # letters of what memory is for, which is a part of a file's name
PURPOSE = "learned batches"
"""What this memory is for: the coordinator reads it when a worker is lost."""

_RANKS = 128  # workers of one host of whose batches there is a note
_KEPT = 512  # batches of each worker: more than it may have learned from since its last question


class SharedAreas:
    """The areas of one job.

    Attributes:
        learned: What workers have learned from; None if they tell servers.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._areas: dict[tuple[int, int], Area] = {}  # by generation and number
        self.learned: LearnedBatches | None = None

    def get(self, where: tuple[int, int], nbytes: int, purpose: str) -> Area:
        """The area of a generation and a number in it: made when the first worker asks for it."""
        with self._lock:
            for key in [key for key in self._areas if key[0] < where[0]]:
                self._areas.pop(key).close_descriptor()
            if where not in self._areas:
                self._areas[where] = Area.create(nbytes, purpose.replace("\0", "")[:_LONGEST_PURPOSE])
            area = self._areas[where]
            if purpose == PURPOSE and self.learned is None:
                self.learned = LearnedBatches(area)
        if area.nbytes != Area.size(nbytes):
            raise MismatchError(
                f"{nbytes:,} bytes of shared memory, and another worker has asked for {area.nbytes:,}: build the "
                "same model on every rank"
            )
        return area

    def close(self) -> None:
        """Give up the descriptors."""
        for area in self._areas.values():
            area.close_descriptor()


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
