"""One number per rank in shared memory that only goes up; other ranks read it, or wait until it is high enough."""

from __future__ import annotations

import time
from collections.abc import Sequence

from hocket import spans
from hocket.transport import futex
from hocket.transport.area import LINE, Area, aligned
from hocket.transport.gate import Gate, Waiting
from hocket.transport.waiting import Description, Patience

_SPINS = 50


class Counters:
    """The numbers of the ranks that meet at ``gate``, all zero at first; they may wrap around."""

    @staticmethod
    def nbytes(size: int) -> int:
        """How large an area the counters of ``size`` ranks need."""
        return aligned(size * LINE) + aligned(size)

    def __init__(self, area: Area, gate: Gate) -> None:
        self._gate, self._area, self._address = gate, area, area.address()
        lines = aligned(gate.size * LINE)
        self._words = area.words[:lines].cast("I")
        self._asleep = area.words[lines : lines + gate.size]
        self._nobody = bytes(gate.size)

    def advance(self, count: int) -> None:
        """Set this rank's number to ``count``."""
        self._words[self._gate.rank * 16] = count & 0xFFFFFFFF
        futex.fence()
        if self._asleep.tobytes() != self._nobody:
            futex.wake(self._address + self._gate.rank * LINE)

    def of(self, rank: int) -> int:
        """The number of ``rank``."""
        return int(self._words[rank * 16])

    def reached(self, count: int, ranks: Sequence[int]) -> bool:
        """Whether the number of each of ``ranks`` is at least ``count``."""
        words = self._words
        return all((words[rank * 16] - count) & 0xFFFFFFFF < 1 << 31 for rank in ranks)

    def wait(self, count: int, ranks: Sequence[int], what: Description) -> None:
        """Wait until the number of each of ``ranks`` is at least ``count``; raises as ``Gate.meet`` does."""
        spins, waiting = _SPINS, None
        for rank in ranks:
            begin, slept = time.perf_counter(), False
            while (self._words[rank * 16] - count) & 0xFFFFFFFF >= 1 << 31:
                spins -= 1
                if spins < 0:
                    waiting = waiting or Waiting(
                        what,
                        Patience(self._gate.timeout),
                        lambda r: r not in ranks or (self._words[r * 16] - count) & 0xFFFFFFFF < 1 << 31,
                    )
                    slept = True
                    self._gate.sleep(rank, waiting, self._words, self._address, self._asleep)
            if slept:
                name = f"{spans.WAIT_FOR} rank {self._gate.numbers[rank]}"
                spans.add(spans.WAIT, name, begin, time.perf_counter())
