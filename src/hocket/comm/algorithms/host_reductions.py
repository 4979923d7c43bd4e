"""Means over several hosts with several workers each: shared memory inside a host, a group between the hosts.

The worker that carries a slice first adds up that slice over the slots of its host, in shared memory, and the sum over
all hosts is published there again: each byte crosses the network once.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import NamedTuple

import torch

from hocket import spans
from hocket.comm.algorithms.memory_reductions import SharedBuffer
from hocket.comm.algorithms.network_reductions import Lane, NetworkReduction
from hocket.comm.bucket_layout import Layout, cut
from hocket.comm.kernels import scaled_sum_into
from hocket.specs.codecs import CodecSpec
from hocket.transport.shared_memory import SharedMemory
from hocket.transport.waiting import Description


class _Slice(NamedTuple):
    """The slice of a bucket that a worker carries.

    Attributes:
        whole: Where the sum over the host goes.
        pieces: The parts of ``whole``: each with the workers' values for it, and by what their sum is multiplied.
    """

    whole: torch.Tensor
    pieces: list[tuple[torch.Tensor, list[torch.Tensor], float]]


class HostSlices(NetworkReduction):
    """The algorithm on a host with several workers; ``results`` are private to each worker, or shared."""

    def __init__(
        self, lane: Lane, layout: Layout, memory: SharedMemory, *, private: bool, codec: CodecSpec | None = None
    ) -> None:
        super().__init__(lane, layout, codec)
        carriers = len(self._topology.columns)
        self._everyone, self._carriers = range(memory.size), range(carriers)
        buffer = SharedBuffer(memory, self._buckets, "gradients", result=True)
        self._mine, self._sums = buffer.mine, buffer.results
        self._slices = [
            self._slice(bucket, carriers, memory.rank, buffer.slots)
            for bucket in range(len(self._buckets))
            if self._groups
        ]
        self._offered, self._published = memory.counters(), memory.counters()
        self._base = 0  # what the counters were when this exchange began
        self._sent = self._done = 0  # buckets that this rank has sent off, and published
        self.slots = [flat[: b.count] for flat, b in zip(self._mine, self._data, strict=True)]
        self._shared = [flat[: b.count] for flat, b in zip(self._sums, self._data, strict=True)]
        self._is_private = private
        self.results = layout.allocate() if private else self._shared
        self._encode(self._own_parts(self._sums))

    def _own_parts(self, flats: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        if not self._groups:
            return []
        carriers, rank, found = len(self._topology.columns), self._topology.local_rank, list[torch.Tensor]()
        for flat, shape, data in zip(flats, self._buckets, self._data, strict=True):
            start, end = cut(shape.count, shape.dtype, carriers)[rank]
            found.append(flat[min(start, data.count) : min(end, data.count)])
        return found

    def _end(self) -> None:
        self._base += len(self._buckets)
        self._sent = self._done = 0

    def progress(self) -> None:
        super().progress()
        if not self._groups:
            return
        while self._sent < self._next and self._offered.reached(self._base + self._sent + 1, self._everyone):
            self._reduce(self._sent)
        while self._done < self._sent and ((work := self._works[self._done]) is None or work.is_completed()):
            self._publish(self._done, "an exchange of gradients")

    def _offer(self, bucket: int) -> None:
        self._offered.advance(self._base + bucket + 1)

    def _finish(self, bucket: int, what: Description) -> None:
        count = len(self._buckets)
        if self._groups:
            while self._sent < count and (
                self._sent <= bucket or self._offered.reached(self._base + self._sent + 1, self._everyone)
            ):
                self._offered.wait(self._base + self._sent + 1, self._everyone, what)
                self._reduce(self._sent)
            if self._done <= bucket:
                self._publish(bucket, what)
        self._published.wait(self._base + bucket + 1, self._carriers, what)
        if self._is_private and not self._is_idle(bucket):
            self.results[bucket].copy_(self._shared[bucket])

    def _slice(self, bucket: int, carriers: int, rank: int, slots: list[list[torch.Tensor]]) -> _Slice:
        shape, data = self._buckets[bucket], self._data[bucket].count
        start, end = cut(shape.count, shape.dtype, carriers)[rank]
        ranges = [(start, min(end, data), 1 / self._topology.size), (max(start, data), end, 1.0)]  # data, header
        return _Slice(
            self._sums[bucket][start:end],
            [
                (self._sums[bucket][a:b], [slot[bucket][a:b] for slot in slots], scale)
                for a, b, scale in ranges
                if b > a
            ],
        )

    def _reduce(self, bucket: int) -> None:
        """Add up this rank's slice of ``bucket`` over the host, and send it off."""
        self._sent += 1
        if self._is_idle(bucket):
            return
        begin = time.perf_counter()
        for out, parts, scale in self._slices[bucket].pieces:
            scaled_sum_into(out, parts, scale)
        spans.add(spans.EXCHANGE, f"reduce {self._names[bucket]} on this host", begin, time.perf_counter())
        self._send(bucket, self._slices[bucket].whole)

    def _publish(self, bucket: int, what: Description) -> None:
        self._await(bucket, what)
        self._done = bucket + 1
        self._published.advance(self._base + self._done)
