"""Averages over several hosts, bucket by bucket, while the backward pass goes on.

A bucket whose gradients are all there is sent off at once, in the order of the buckets, by Gloo's own threads.
With several workers on a host, the worker that carries a slice first adds up that slice over the slots of its
host, in shared memory, and the sum over all hosts is published there again: each byte crosses the network once.
Nothing of this has a thread of its own: what is ready is moved on whenever a gradient arrives, and at the end.
"""

from __future__ import annotations

import time
from abc import abstractmethod
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch

from hocket import spans
from hocket.comm.algorithms import scaled_sum_into
from hocket.comm.communicator import Averager
from hocket.comm.header import Entry, Header
from hocket.comm.layout import Bucket, Layout, cut
from hocket.comm.shared import SharedCommunicator
from hocket.comm.topology import Topology
from hocket.comm.traffic import Stopwatch, Traffic
from hocket.transport.counters import Counters
from hocket.transport.gate import Description
from hocket.transport.process_group import ProcessGroup

_LOOK_AT_ALL, _LOOK_EVERY = 16, 16  # exchanges whose times are taken: the first ones, then one in so many
_LATE = 0.001  # seconds from which a worker counts as late


@dataclass(frozen=True)
class Column:
    """What an average needs of the communicator.

    Attributes:
        topology: Who is where.
        group: The ranks that carry the same slice as this one; None if it carries none.
        traffic: Where the times go.
        begin: To be called when an exchange begins that all ranks must take part in.
        compare: Raises if the ranks' signatures differ.
    """

    topology: Topology
    group: ProcessGroup | None
    traffic: Traffic
    begin: Callable[[], None]
    compare: Callable[[list[int], Description], None]


class NetworkAverager(Averager):
    """What both forms have in common: the order of buckets, the header, the times."""

    def __init__(self, column: Column, layout: Layout) -> None:
        topology = column.topology
        self.overlaps = len(layout.buckets) > 1
        self._column, self._topology, self._group = column, topology, column.group
        self._header = Header(topology.size)
        self._data = layout.buckets
        *first, last = layout.buckets
        self._buckets = [*first, Bucket(last.dtype, last.count + self._header.count)]
        self._complete = bytearray(len(self._buckets))
        self._next = 0  # the bucket to be sent off next
        self._what: Description = ""  # is being averaged
        self._works: list[Any] = [None] * len(self._buckets)
        self._rounds, self._stopwatch = 0, None  # type: int, Stopwatch | None
        self._sent_at: dict[int, float] = {}  # of buckets whose times are taken
        self._idle_since = time.perf_counter()
        self._names = layout.bucket_names

    def ready(self, bucket: int) -> None:
        self._complete[bucket] = 1
        last = len(self._buckets) - 1
        # Of the last one the header is not known yet; those that are idle hold up nobody.
        while self._next < last and (self._complete[self._next] or self._is_idle(self._next)):
            self._offer(self._next)
            self._next += 1
        self.progress()

    def average(self, number: int, payload: int, what: Description) -> list[int]:
        self.begin(number, payload, what)
        return self.finish()

    def begin(self, number: int, payload: int, what: Description) -> None:
        self._column.begin()
        busy = int((time.perf_counter() - self._idle_since) * 1e6)
        self._header.write(self._header_of(self._mine), self._topology.rank, Entry(number, payload, busy))
        for bucket in range(self._next, len(self._buckets)):
            self._offer(bucket)
        self._next, self._what = len(self._buckets), what
        self.progress()

    def finish(self) -> list[int]:
        what, blocked_since = self._what, time.perf_counter()
        for bucket in range(len(self._buckets)):
            self._finish(bucket, what)
        self._complete = bytearray(len(self._buckets))
        self._next = 0
        entries = self._header.read(self._header_of(self._sums))
        self._end()
        self._take_times(entries, blocked_since)
        self._column.compare([entry.number for entry in entries], what)
        return [entry.payload for entry in entries]

    def progress(self) -> None:
        if self._sent_at:
            self._note_arrivals()

    _mine: list[torch.Tensor]
    """What this rank contributes, header included."""

    _sums: list[torch.Tensor]
    """The sums over all ranks, header included."""

    def close(self) -> None:
        if self._group is not None:
            self._group.close()

    def _end(self) -> None:
        """An exchange is over."""

    def _is_idle(self, bucket: int) -> bool:
        return bucket in self.idle and bucket < len(self._buckets) - 1  # the last one has the header

    @abstractmethod
    def _offer(self, bucket: int) -> None:
        """This rank's part of ``bucket`` is complete."""

    @abstractmethod
    def _finish(self, bucket: int, what: Description) -> None:
        """Wait until the sum over all ranks is there."""

    def _send(self, bucket: int, tensor: torch.Tensor) -> None:
        """Begin to add up ``tensor`` over the column."""
        assert self._group is not None
        if not tensor.numel():
            return  # so it is for all of the column
        self._works[bucket] = self._group.start_sum(tensor)
        if self._rounds < _LOOK_AT_ALL or self._rounds % _LOOK_EVERY == 0 or spans.are_kept():
            self._stopwatch = self._stopwatch or Stopwatch()
            self._sent_at[bucket] = time.perf_counter()

    def _await(self, bucket: int, what: Description) -> None:
        """Until what was sent of ``bucket`` has been added up."""
        work, self._works[bucket] = self._works[bucket], None
        if work is not None and self._group is not None:
            begin = time.perf_counter()
            self._group.wait(work, what)
            self._note_arrivals()
            spans.add(spans.WAIT, f"wait for bucket {bucket + 1}", begin, time.perf_counter())

    def _note_arrivals(self) -> None:
        """Take the times of buckets that have arrived.

        Not by a callback of Gloo's: its threads would call Python even when the interpreter has ended, and abort.
        """
        now = time.perf_counter()
        for bucket in list(self._sent_at):
            work = self._works[bucket]
            if self._stopwatch is not None and (work is None or work.is_completed()):
                sent_at = self._sent_at.pop(bucket)
                self._stopwatch.add(sent_at, now)
                name, track = f"{self._names[bucket]} under way", f"bucket {bucket + 1}"
                spans.add(spans.EXCHANGE, name, sent_at, now, track=track)

    def _header_of(self, tensors: list[torch.Tensor]) -> torch.Tensor:
        return tensors[-1][self._data[-1].count :]

    def _take_times(self, entries: list[Entry], blocked_since: float) -> None:
        self._rounds += 1
        slowest = max(range(len(entries)), key=lambda rank: entries[rank].busy)
        late = (entries[slowest].busy - entries[self._topology.rank].busy) / 1e6
        if late > _LATE:
            self._column.traffic.wait_for(self._topology.name_of(slowest), late)
            end = min(time.perf_counter(), blocked_since + late)
            spans.add(spans.WAIT, f"{spans.WAIT_FOR} rank {slowest}", blocked_since, end, track="waiting")
        if self._stopwatch is not None:
            self._stopwatch.settle(self._column.traffic, blocked_since)
            self._stopwatch = None
        self._idle_since = time.perf_counter()


class FlatAverager(NetworkAverager):
    """On a host with one worker, which adds up its own slot, or a copy of it if the slot is to be left as it is."""

    def __init__(self, column: Column, layout: Layout, *, in_place: bool) -> None:
        super().__init__(column, layout)
        self._mine = self._allocate()
        self._sums = self._mine if in_place else self._allocate()
        self.scale = 1 / self._topology.size if in_place else 1.0
        self.slots = [flat[: b.count] for flat, b in zip(self._mine, self._data, strict=True)]
        self.results = [flat[: b.count] for flat, b in zip(self._sums, self._data, strict=True)]
        self.all_slots = [self.slots]

    def _allocate(self) -> list[torch.Tensor]:
        return [torch.zeros(b.count, dtype=b.dtype) for b in self._buckets]

    def _offer(self, bucket: int) -> None:
        if self._is_idle(bucket):
            return
        mine, sums, count = self._mine[bucket], self._sums[bucket], self._data[bucket].count
        if sums is not mine:
            torch.mul(mine[:count], 1 / self._topology.size, out=sums[:count])
            sums[count:] = mine[count:]
        self._send(bucket, sums)

    def _finish(self, bucket: int, what: Description) -> None:
        self._await(bucket, what)


class _Slice(NamedTuple):
    """What a worker carries of a bucket: where its host's sum goes, and of which parts that is made, with scales."""

    whole: torch.Tensor
    pieces: list[tuple[torch.Tensor, list[torch.Tensor], float]]


class HierarchicalAverager(NetworkAverager):
    """On a host with several workers. ``results`` are private to each of them, or shared."""

    def __init__(self, column: Column, layout: Layout, local: SharedCommunicator, *, private: bool) -> None:
        super().__init__(column, layout)
        carriers = len(self._topology.columns)
        self._everyone, self._carriers = range(local.size), range(carriers)
        buffer = local.buffer(self._buckets, "gradients", result=True)
        self._mine, self._sums = buffer.mine, buffer.results
        self._slices = [
            self._slice(bucket, carriers, local.rank, buffer.slots)
            for bucket in range(len(self._buckets))
            if self._group is not None
        ]
        transport = local.transport
        nbytes = Counters.nbytes(local.size)
        self._offered = Counters(transport.allocate(nbytes, "counters"), transport.gate)
        self._published = Counters(transport.allocate(nbytes, "counters"), transport.gate)
        self._base = 0  # of the counters, in this exchange
        self._sent = self._done = 0  # buckets that this rank has sent off, and published
        self.slots = [flat[: b.count] for flat, b in zip(self._mine, self._data, strict=True)]
        self.all_slots = [self.slots]
        self._shared = [flat[: b.count] for flat, b in zip(self._sums, self._data, strict=True)]
        self._is_private = private
        self.results = layout.allocate() if private else self._shared

    def _end(self) -> None:
        self._base += len(self._buckets)
        self._sent = self._done = 0

    def progress(self) -> None:
        super().progress()
        if self._group is None:
            return
        while self._sent < self._next and self._offered.reached(self._base + self._sent + 1, self._everyone):
            self._reduce(self._sent)
        while self._done < self._sent and ((work := self._works[self._done]) is None or work.is_completed()):
            self._publish(self._done, "an exchange of gradients")

    def _offer(self, bucket: int) -> None:
        self._offered.advance(self._base + bucket + 1)

    def _finish(self, bucket: int, what: Description) -> None:
        count = len(self._buckets)
        if self._group is not None:
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
