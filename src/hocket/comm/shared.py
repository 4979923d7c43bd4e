"""Collectives over shared memory: every rank writes a slot, then reads the others'.

Two algorithms. *Direct*: one meeting, then every rank reduces all slots by itself; least latency, and least
traffic for two ranks. *Two-phase*: every rank reduces its own slice into one shared result, and a second
meeting publishes it; each byte is read about three times however many ranks there are.
"""

from __future__ import annotations

import time
from collections.abc import Sequence

import torch

from hocket import spans
from hocket.comm.algorithms import average_into, reduce_into
from hocket.comm.communicator import Averager, Communicator, describe, named
from hocket.comm.layout import Bucket, Layout, Place, cut
from hocket.comm.split import SplitAverager
from hocket.comm.staging import through_cpu
from hocket.transport.area import Area, aligned
from hocket.transport.gate import Description, signature
from hocket.transport.shared_memory import SharedMemory

DIRECT_BYTES = 1 << 15  # up to here the direct algorithm is faster for any number of ranks
_SCRATCH = 1 << 20  # bytes per slot of the memory for collectives by hand; larger tensors go through it in parts,
_SCRATCH_PER_RANK = 1 << 17  # of which every rank should have this much to do


class SharedBuffer:
    """One slot per rank and, if asked for, one result, in memory that all ranks map."""

    def __init__(self, transport: SharedMemory, buckets: list[Bucket], purpose: str, *, result: bool) -> None:
        self._transport = transport
        size = transport.size
        slot_bytes = sum(aligned(b.nbytes) for b in buckets)
        area = transport.allocate((size + result) * slot_bytes, purpose)
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


class TwoPhaseAverager(Averager):
    """For three and more ranks."""

    def __init__(self, transport: SharedMemory, layout: Layout) -> None:
        self._buffer = SharedBuffer(transport, layout.buckets, "gradients", result=True)
        self.slots = self._buffer.mine
        self.all_slots = [self.slots]
        self.results = layout.allocate()

    def average(self, number: int, payload: int, what: Description) -> list[int]:
        payloads = self._buffer.average(number, payload, what)
        begin = time.perf_counter()
        for private, shared in zip(self.results, self._buffer.results, strict=True):
            private.copy_(shared)
        spans.add(spans.EXCHANGE, "take the averages", begin, time.perf_counter())
        return payloads


class DirectAverager(Averager):
    """For two ranks, and for little data. Two sets of slots alternate: one is written while the other is read."""

    def __init__(self, transport: SharedMemory, layout: Layout) -> None:
        self._transport = transport
        self._sets = [SharedBuffer(transport, layout.buckets, "gradients", result=False) for _ in range(2)]
        self.all_slots = [s.mine for s in self._sets]
        self.slots = self.all_slots[0]
        self.results = layout.allocate()
        self._names = [f"reduce {name}" for name in layout.bucket_names]

    def average(self, number: int, payload: int, what: Description) -> list[int]:
        payloads = self._transport.meet(number, payload, what)
        current = self._sets[0]
        for bucket, result in enumerate(self.results):
            begin = time.perf_counter()
            average_into(result, [slots[bucket] for slots in current.slots])
            spans.add(spans.EXCHANGE, self._names[bucket], begin, time.perf_counter())
        self._sets.reverse()
        self.slots = self._sets[0].mine
        return payloads


class SharedCommunicator(Communicator):
    """The workers of one host, over shared memory."""

    way = "shared memory"

    def __init__(self, transport: SharedMemory) -> None:
        self.transport = transport
        self.rank, self.size = transport.rank, transport.size
        self._scratch: list[SharedBuffer] = []
        self._scratch_bytes = max(_SCRATCH, self.size * _SCRATCH_PER_RANK)

    @property
    def waited(self) -> float:
        return self.transport.gate.waited

    @through_cpu
    def allreduce(self, tensor: torch.Tensor, operation: str) -> None:
        what = named(f"allreduce of {describe(tensor)}, {operation}")
        direct = self.size == 2 or tensor.nbytes <= DIRECT_BYTES
        for part in self._parts(tensor):
            buffer = self._reserve()
            slots = [_as(s[0], part) for s in buffer.slots]
            slots[self.rank].copy_(part)
            number = signature(what)
            self.transport.meet(number, 0, what)
            if direct:
                reduce_into(part, slots, operation)
                continue
            result = _as(buffer.results[0], part)
            start, end = cut(part.numel(), part.dtype, self.size)[self.rank]
            if end > start:
                reduce_into(result[start:end], [s[start:end] for s in slots], operation)
            self.transport.meet(number + 1, 0, what)
            part.copy_(result)

    @through_cpu
    def allgather(self, tensor: torch.Tensor) -> torch.Tensor:
        what = named(f"allgather of {describe(tensor)}")
        gathered = tensor.new_empty(self.size, tensor.numel())
        done = 0
        for part in self._parts(tensor):
            buffer = self._reserve()
            _as(buffer.mine[0], part).copy_(part)
            self.transport.meet(signature(what), 0, what)
            for row, slot in zip(gathered, buffer.slots, strict=True):
                row[done : done + part.numel()] = _as(slot[0], part)
            done += part.numel()
        return gathered.view(self.size, *tensor.shape)

    @through_cpu
    def broadcast(self, tensor: torch.Tensor, root: int) -> None:
        what = named(f"broadcast of {describe(tensor)} from rank {root}")
        for part in self._parts(tensor):
            buffer = self._reserve()
            if self.rank == root:
                _as(buffer.mine[0], part).copy_(part)
            self.transport.meet(signature(what), 0, what)
            if self.rank != root:
                part.copy_(_as(buffer.slots[root][0], part))

    def barrier(self, what: str = "hocket.barrier()") -> None:
        self.transport.meet(signature(what), 0, what)

    def meet(self, number: int, payload: int, what: Description) -> list[int]:
        return self.transport.meet(number, payload, what)

    def gather_bytes(self, data: bytes) -> list[bytes]:
        what = named("an exchange of descriptions")
        lengths = self.transport.meet(signature(what), len(data), what)
        padded = torch.frombuffer(bytearray(data.ljust(max(*lengths, 1), b"\0")), dtype=torch.uint8)
        rows = self.allgather(padded)
        return [bytes(row[:length].tolist()) for row, length in zip(rows, lengths, strict=True)]

    def averager(self, layout: Layout, *, private: bool = True) -> Averager:
        total = sum(b.nbytes for b in layout.buckets)
        direct = self.size == 2 or total <= DIRECT_BYTES
        return (DirectAverager if direct else TwoPhaseAverager)(self.transport, layout)

    def split_averager(self, layout: Layout) -> Averager:
        return SplitAverager(self.transport, self.buffer(layout.buckets, "gradients", result=True), layout)

    def buffer(self, buckets: list[Bucket], purpose: str, *, result: bool) -> SharedBuffer:
        """Slots (and a result) in memory that all ranks map."""
        return SharedBuffer(self.transport, buckets, purpose, result=result)

    def one_copy(
        self, dtype: torch.dtype, count: int, places: Sequence[Place], purpose: str
    ) -> tuple[torch.Tensor, list[torch.Tensor]]:
        """``count`` elements, all zero, that every rank maps: flat, and as one tensor for each of ``places``.

        Those tensors have storages of their own, so that ``torch.save`` writes each in its plain size.
        """
        area = self.transport.allocate(count * dtype.itemsize, purpose)
        tensors = [area.tensor(p.start * dtype.itemsize, p.count, dtype).as_strided(p.shape, p.stride) for p in places]
        return area.tensor(0, count, dtype), tensors

    def leave(self, failed: bool) -> None:
        self.transport.leave(failed)

    def _parts(self, tensor: torch.Tensor) -> Sequence[torch.Tensor]:
        """``tensor`` flat, in parts that fit into the scratch memory (and, not by chance, into the cache)."""
        flat = tensor.view(-1)
        most = self._scratch_bytes
        return flat.split(most // tensor.dtype.itemsize) if flat.nbytes > most else (flat,)

    def _reserve(self) -> SharedBuffer:
        """The scratch memory for the next meeting; two alternate, so that a fast rank does not overwrite one."""
        if not self._scratch:
            bucket = Bucket(torch.uint8, self._scratch_bytes)
            self._scratch = [self.buffer([bucket], "collectives", result=True) for _ in range(2)]
        self._scratch.reverse()
        return self._scratch[0]


def _bucket_tensors(area: Area, offset: int, buckets: list[Bucket]) -> list[torch.Tensor]:
    tensors = []
    for bucket in buckets:
        tensors.append(area.tensor(offset, bucket.count, bucket.dtype))
        offset += aligned(bucket.nbytes)
    return tensors


def _as(raw: torch.Tensor, like: torch.Tensor) -> torch.Tensor:
    """The first bytes of ``raw`` as a flat tensor with the elements of ``like``."""
    return raw[: like.nbytes].view(like.dtype)
