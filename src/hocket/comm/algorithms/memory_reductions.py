"""Means over the workers of one host: every rank writes a slot in shared memory, and reads those of the others."""

from __future__ import annotations

import time

import torch

from hocket import spans
from hocket.comm.bucket_layout import Bucket, Layout, cut
from hocket.comm.exchange import Algorithm, Ticket
from hocket.comm.kernels import average_into
from hocket.errors import MismatchError, WorkerLost
from hocket.transport.area import Area, aligned
from hocket.transport.shared_memory import SharedMemory
from hocket.transport.waiting import Description, say

ONE_PHASE_BYTES = 1 << 15  # up to so many bytes one phase is faster for any number of ranks


class SharedBuffer:
    """One slot per rank and, if asked for, one result, in memory that all ranks map.

    Attributes:
        rows: The bytes of each slot, and of the result.
    """

    @staticmethod
    def nbytes(buckets: list[Bucket], size: int, *, result: bool) -> int:
        """How many bytes of memory this takes for so many ranks."""
        return (size + result) * sum(aligned(bucket.nbytes) for bucket in buckets)

    def __init__(self, transport: SharedMemory, buckets: list[Bucket], purpose: str, *, result: bool) -> None:
        self._transport = transport
        size = transport.size
        slot_bytes = sum(aligned(b.nbytes) for b in buckets)
        area = transport.allocate(self.nbytes(buckets, size, result=result), purpose)
        self.rows = [area.words[row * slot_bytes : (row + 1) * slot_bytes] for row in range(size + result)]
        rows = [_bucket_tensors(area, row * slot_bytes, buckets) for row in range(size + result)]
        self.slots = rows[:size]
        self.mine = rows[transport.rank]
        self.results = rows[size] if result else []
        bounds = [cut(b.count, b.dtype, size)[transport.rank] for b in buckets]
        self._slices = [
            (self.results[i][start:end], [slot[i][start:end] for slot in self.slots])
            for i, (start, end) in enumerate(bounds)
            if result and end > start
        ]

    def average(self, number: int, payload: int, what: Description) -> list[int]:
        """Average all slots to ``results``, two-phase; ``mine`` may be written again at once."""
        payloads = self._transport.meet(number, payload, what)
        self.reduce()
        self._transport.meet(number + 1, 0, what)
        return payloads

    def reduce(self) -> None:
        """Average this rank's slice of all slots."""
        begin = time.perf_counter()
        for out, parts in self._slices:
            average_into(out, parts)
        spans.add(spans.EXCHANGE, "reduce this rank's slice of all buckets", begin, time.perf_counter())


class OnePhase(Algorithm):
    """One meeting, then every rank averages all slots by itself: least latency, and least traffic for two ranks.

    A rank that is done reading says so. Before it writes its slot again it looks whether all others are done, too: by
    then they almost always are, as they began to read at the same time.
    """

    def __init__(self, transport: SharedMemory, layout: Layout) -> None:
        self._transport, self._everyone = transport, range(transport.size)
        self._buffer = SharedBuffer(transport, layout.buckets, "gradients", result=False)
        self._read = transport.counters()
        self._rounds = 0
        self.slots = self._buffer.mine
        self.results = layout.allocate()
        self._names = [f"reduce {name}" for name in layout.bucket_names]

    def claim(self) -> None:
        what = "the end of an exchange, which others still read"
        gate, readers = self._transport.gate, list(self._everyone)
        while True:
            try:
                self._read.wait(self._rounds, readers, what)
                return
            except WorkerLost as loss:
                left = [rank for rank in readers if not gate.has_ended(rank)]
                if not loss.died or left == readers:
                    raise
                readers = left  # those that have died read no more, and are missed at the next meeting

    def finish(self) -> list[int]:
        payloads = self._transport.meet(*self._ticket)
        for bucket, result in enumerate(self.results):
            begin = time.perf_counter()
            average_into(result, [slots[bucket] for slots in self._buffer.slots])
            spans.add(spans.EXCHANGE, self._names[bucket], begin, time.perf_counter())
        self._rounds += 1
        self._read.advance(self._rounds)
        return payloads


class TwoPhase(Algorithm):
    """Every rank averages its own slice into one shared result, and a second meeting publishes it.

    Each byte is read about three times, however many ranks there are.
    """

    def __init__(self, transport: SharedMemory, layout: Layout) -> None:
        self._buffer = SharedBuffer(transport, layout.buckets, "gradients", result=True)
        self.slots = self._buffer.mine
        self.results = layout.allocate()

    def finish(self) -> list[int]:
        payloads = self._buffer.average(*self._ticket)
        begin = time.perf_counter()
        for private, shared in zip(self.results, self._buffer.results, strict=True):
            private.copy_(shared)
        spans.add(spans.EXCHANGE, "take the averages", begin, time.perf_counter())
        return payloads


class Split(Algorithm):
    """Two phases between which nobody waits: ranks may be batches apart meanwhile.

    Each rank writes its slot and says so. A rank that finds, now or later, that all slots are written averages its own
    slice of them into the one shared result, and says so. When all slices are averaged, everyone takes the result.
    """

    def __init__(self, transport: SharedMemory, layout: Layout) -> None:
        self._transport, self._everyone = transport, range(transport.size)
        self._buffer = SharedBuffer(transport, layout.buckets, "gradients", result=True)
        self._offered, self._reduced = transport.counters(), transport.counters()
        row = 2 * 8 * transport.size  # each rank's number and payload; two rows, for rounds in turn
        words = transport.allocate(2 * aligned(row), "counters").words
        self._tables = [words[start : start + row].cast("q") for start in (0, aligned(row))]
        self._rounds = 0
        self._has_reduced = True
        self.slots = self._buffer.mine
        self.results = layout.allocate()

    def begin(self, ticket: Ticket) -> None:
        self._ticket = ticket
        self._rounds += 1
        table, rank = self._tables[self._rounds & 1], self._transport.rank
        table[2 * rank], table[2 * rank + 1] = ticket.number, ticket.payload
        self._has_reduced = False
        self._offered.advance(self._rounds)
        self.progress()

    def progress(self) -> None:
        if not self._has_reduced and self._offered.reached(self._rounds, self._everyone):
            self._reduce()

    def finish(self) -> list[int]:
        what = self._ticket.what
        if not self._has_reduced:
            self._offered.wait(self._rounds, self._everyone, what)
            self._reduce()
        self._reduced.wait(self._rounds, self._everyone, what)
        found = self._tables[self._rounds & 1].tolist()
        if len(set(found[::2])) > 1:
            raise MismatchError(
                f"the ranks do not do the same: rank {self._transport.rank} does {say(what)}, and others do "
                "something else. All ranks must make the same calls in the same order, and have as many batches"
            )
        for private, shared in zip(self.results, self._buffer.results, strict=True):
            private.copy_(shared)
        return found[1::2]

    def _reduce(self) -> None:
        self._has_reduced = True
        self._buffer.reduce()
        self._reduced.advance(self._rounds)


def _bucket_tensors(area: Area, offset: int, buckets: list[Bucket]) -> list[torch.Tensor]:
    tensors = []
    for bucket in buckets:
        tensors.append(area.tensor(offset, bucket.count, bucket.dtype))
        offset += aligned(bucket.nbytes)
    return tensors
