"""Averages over shared memory in two halves, between which nobody waits: ranks may be batches apart meanwhile.

Each rank writes its slot and says so; whoever finds, now or later, that all have, averages its own slice of them into
the one shared result, and says that; when all have said that, too, everyone takes the result.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from hocket.comm.communicator import Averager
from hocket.comm.layout import Layout
from hocket.errors import MismatchError
from hocket.transport.area import aligned
from hocket.transport.counters import Counters
from hocket.transport.gate import Description, say
from hocket.transport.shared_memory import SharedMemory

if TYPE_CHECKING:
    from hocket.comm.shared import SharedBuffer


class SplitAverager(Averager):
    """One slot per rank, and one result. A rank that begins the next average is done with this one."""

    overlaps = False

    def __init__(self, transport: SharedMemory, buffer: SharedBuffer, layout: Layout) -> None:
        self._transport, self._buffer, self._everyone = transport, buffer, range(transport.size)
        nbytes = Counters.nbytes(transport.size)
        self._offered = Counters(transport.allocate(nbytes, "counters"), transport.gate)
        self._reduced = Counters(transport.allocate(nbytes, "counters"), transport.gate)
        row = 2 * 8 * transport.size  # what each rank came for, and its payload; two rows, for averages in turn
        words = transport.allocate(2 * aligned(row), "counters").words
        self._tables = [words[start : start + row].cast("q") for start in (0, aligned(row))]
        self._count = 0
        self._has_reduced = True
        self._what: Description = ""
        self.slots = buffer.mine
        self.all_slots = [self.slots]
        self.results = layout.allocate()

    def average(self, number: int, payload: int, what: Description) -> list[int]:
        self.begin(number, payload, what)
        return self.finish()

    def begin(self, number: int, payload: int, what: Description) -> None:
        self._count += 1
        table, rank = self._tables[self._count & 1], self._transport.rank
        table[2 * rank], table[2 * rank + 1] = number, payload
        self._has_reduced, self._what = False, what
        self._offered.advance(self._count)
        self.progress()

    def progress(self) -> None:
        if not self._has_reduced and self._offered.reached(self._count, self._everyone):
            self._reduce()

    def finish(self) -> list[int]:
        if not self._has_reduced:
            self._offered.wait(self._count, self._everyone, self._what)
            self._reduce()
        self._reduced.wait(self._count, self._everyone, self._what)
        found = self._tables[self._count & 1].tolist()
        if len(set(found[::2])) > 1:
            raise MismatchError(
                f"the ranks do not do the same: rank {self._transport.rank} does {say(self._what)}, and others do "
                "something else. All ranks must make the same calls in the same order, and have as many batches"
            )
        for private, shared in zip(self.results, self._buffer.results, strict=True):
            private.copy_(shared)
        return found[1::2]

    def _reduce(self) -> None:
        self._has_reduced = True
        self._buffer.reduce()
        self._reduced.advance(self._count)
