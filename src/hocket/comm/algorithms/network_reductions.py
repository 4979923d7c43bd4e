"""Means over several hosts, one worker on each, bucket by bucket, while the backward pass goes on.

A bucket whose values are all there is handed over at once, in the order of the buckets. The group decides whether a
thread of its own sends it meanwhile, or who waits for it. A group adds up one bucket after the other; over long links
there are several groups of the same ranks, which take turns, so that one bucket does not wait for the way of another.
Nothing here has a thread: what is ready is moved on whenever a gradient arrives, and at the end.
"""

from __future__ import annotations

import functools
import struct
import time
from abc import abstractmethod
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple, cast

import torch

from hocket import spans
from hocket.comm.algorithms.encoded_sums import EncodedSums
from hocket.comm.bucket_layout import Bucket, Layout
from hocket.comm.exchange import Algorithm, Ticket
from hocket.comm.kernels import is_finite
from hocket.comm.topology import Topology
from hocket.specs.codecs import CodecSpec
from hocket.transport.network_group import NetworkGroup
from hocket.transport.waiting import Description

_LOOK_AT_ALL, _LOOK_EVERY = 16, 16  # exchanges whose times are taken: the first 16, then one in 16
_LATE = 0.001  # seconds from which a worker counts as late
_ENTRY = struct.Struct("<qqI?")


@dataclass
class Use:
    """What all-reduces by one algorithm have taken so far.

    Attributes:
        times: How many there were.
        nbytes: Their bytes.
        seconds: The seconds that they took on this worker, waits for late workers included.
        predicted: The seconds that were predicted, of those with a prediction.
        told: How many had one.
        least: The bytes of the smallest.
        most: The bytes of the largest.
        sent: The bytes that this worker has given to the wire, where a codec has made them.
    """

    times: int = 0
    nbytes: int = 0
    seconds: float = 0.0
    predicted: float = 0.0
    told: int = 0
    least: int = 0
    most: int = 0
    sent: int = 0


@dataclass
class NetworkTimes:
    """How much of a worker's communication between hosts was hidden behind its computation, since it started.

    Attributes:
        host: The worker's host.
        under_way: Seconds in which buckets were under way, of the exchanges that were looked at.
        exposed: Seconds of ``under_way`` in which the worker did nothing but wait.
        waited_for: Seconds that the worker waited because a host's slowest worker was not there yet, by host.
        uses: What sums between hosts have taken, by the name of the algorithm.
        links: What was measured of the links between hosts, in words.
        refused: How many strangers and messages were refused between hosts, by why.
        rates: What each carrier sends to each other one over them, in MB/s; nothing if that would be much to tell.
    """

    host: str
    under_way: float = 0.0
    exposed: float = 0.0
    waited_for: dict[str, float] = field(default_factory=dict)
    uses: dict[str, Use] = field(default_factory=dict)
    links: str = ""
    rates: list[list[float]] = field(default_factory=list)
    refused: Counter[str] = field(default_factory=Counter)

    def wait_for(self, host: str, seconds: float) -> None:
        """This worker has waited for ``host``."""
        self.waited_for[host] = self.waited_for.get(host, 0.0) + seconds

    def settle(self, trips: list[tuple[float, float]], blocked_since: float) -> None:
        """Add the times of an exchange that is over.

        Args:
            trips: From when to when each bucket was under way.
            blocked_since: When the worker began to do nothing but wait.
        """
        reached = 0.0
        for start, end in sorted(trips):
            begin = max(start, reached)
            if end > begin:
                self.under_way += end - begin
                self.exposed += max(0.0, end - max(begin, blocked_since))
                reached = end


@dataclass(frozen=True)
class Lane:
    """The part of the network that one exchange over several hosts has for itself.

    Attributes:
        topology: Which rank is on which host.
        groups: The ranks that carry the same slice as this one, as often as sums may be under way at once; empty if
            this rank carries none.
        times: The times to which this exchange adds its own.
        begin: Called when a round begins that all ranks must take part in.
        compare: Raises if the ranks' numbers differ.
    """

    topology: Topology
    groups: Sequence[NetworkGroup]
    times: NetworkTimes
    begin: Callable[[], None]
    compare: Callable[[list[int], Description], None]


class Entry(NamedTuple):
    """What one rank says in the header.

    Attributes:
        number: That of its ticket.
        payload: That of its ticket.
        busy: For how many microseconds it was busy.
        is_finite: Whether all its values are finite, as far as anybody looks.
    """

    number: int
    payload: int
    busy: int
    is_finite: bool = True


class Header:
    """A few numbers of each of ``size`` ranks that travel with the data.

    Each rank has elements of its own behind the data of a bucket, one for each byte, which all others leave zero: the
    sum over the ranks then has them all, whatever floating-point type the bucket is of, and no message more is sent.

    Attributes:
        count: How many elements the header has.
    """

    def __init__(self, size: int) -> None:
        self.count = size * _ENTRY.size

    def write(self, elements: torch.Tensor, rank: int, entry: Entry) -> None:
        """Write ``entry`` to this rank's part of ``elements``, and zeros to the parts of the others."""
        raw = _ENTRY.pack(entry.number, entry.payload, min(entry.busy, 0xFFFFFFFF), entry.is_finite)
        values = bytearray(self.count)
        values[rank * len(raw) : (rank + 1) * len(raw)] = raw
        elements.copy_(torch.frombuffer(values, dtype=torch.uint8))

    def read(self, elements: torch.Tensor) -> list[Entry]:
        """What every rank has said, from the sum of their elements."""
        raw = bytes(elements.to(torch.uint8).tolist())
        return [Entry(*fields) for fields in _ENTRY.iter_unpack(raw)]


class NetworkReduction(Algorithm):
    """What ``Flat`` and ``HostSlices`` have in common: the order of buckets, the header, the times, the codec.

    With a codec, values that are not finite on some rank leave no means, and what is owed as it was.
    """

    def __init__(self, lane: Lane, layout: Layout, codec: CodecSpec | None) -> None:
        topology = lane.topology
        self.overlaps = len(layout.buckets) > 1
        self._lane, self._topology, self._groups = lane, topology, lane.groups
        self._header = Header(topology.size)
        self._data = layout.buckets
        *first, last = layout.buckets
        self._buckets = [*first, Bucket(last.dtype, last.count + self._header.count)]
        self._complete = bytearray(len(self._buckets))
        self._next = 0  # the bucket to be sent off next
        self._works: list[Any] = [None] * len(self._buckets)
        self._rounds = 0
        self._sent_at: dict[int, float] = {}  # when buckets under way were sent, if times are taken
        self._trips: list[tuple[float, float]] = []  # begin and end for buckets that arrived in this round
        self._idle_since = time.perf_counter()
        self._names = layout.bucket_names
        self._codec, self._encoded, self._counts = codec, cast(EncodedSums | None, None), True
        self._is_finite = True  # this rank's values of this round, so far

    def ready(self, bucket: int) -> None:
        self._complete[bucket] = 1
        last = len(self._buckets) - 1
        # The header, which is in the last bucket, is not known yet. Idle buckets hold up nobody.
        while self._next < last and (self._complete[self._next] or self._is_idle(self._next)):
            self._look_at(self._next)
            self._offer(self._next)
            self._next += 1
        self.progress()

    def begin(self, ticket: Ticket) -> None:
        self._ticket = ticket
        self._lane.begin()
        busy = int((time.perf_counter() - self._idle_since) * 1e6)
        for bucket in range(self._next, len(self._buckets)):
            self._look_at(bucket)
        entry = Entry(ticket.number, ticket.payload, busy, self._is_finite)
        self._header.write(self._header_of(self._mine), self._topology.rank, entry)
        for bucket in range(self._next, len(self._buckets)):
            self._offer(bucket)
        self._next = len(self._buckets)
        self.progress()

    def finish(self) -> list[int]:
        what, blocked_since = self._ticket.what, time.perf_counter()
        for bucket in range(len(self._buckets)):
            self._finish(bucket, what)
        self._complete = bytearray(len(self._buckets))
        self._next = 0
        entries = self._header.read(self._header_of(self._sums))
        self._counts, self._is_finite = all(entry.is_finite for entry in entries), True
        self._end()
        self._take_times(entries, blocked_since)
        self._lane.compare([entry.number for entry in entries], what)
        return [entry.payload for entry in entries]

    def progress(self) -> None:
        if self._sent_at:
            self._note_arrivals()

    _mine: list[torch.Tensor]
    """What this rank contributes, header included."""

    _sums: list[torch.Tensor]
    """The sums over all ranks, header included."""

    def _look_at(self, bucket: int) -> None:
        """Before values are offered: whether they are finite, which a codec could hide."""
        if self._codec is not None and not self._is_idle(bucket):
            self._is_finite = self._is_finite and is_finite(self.slots[bucket])

    def _encode(self, parts: Sequence[torch.Tensor]) -> None:
        """Have sums travel by the codec, if there is one; ``parts`` are this rank's, without the header."""
        if self._codec is not None and parts:
            self._encoded = EncodedSums(self._codec, self._topology.rank, parts)

    def end_round(self) -> bool:
        if self._encoded is not None:
            self._encoded.end_round(counts=self._counts)
        return self._counts

    def owed(self) -> list[torch.Tensor] | None:
        if self._codec is None:
            return None
        whole = [torch.zeros(bucket.count, dtype=bucket.dtype) for bucket in self._data]
        if self._encoded is not None:
            for part, owed in zip(self._own_parts(whole), self._encoded.owed(), strict=True):
                part.copy_(owed)
        return whole

    def owe(self, values: Sequence[torch.Tensor], rounds: int) -> None:
        if self._encoded is not None:
            own = self._own_parts(values)
            self._encoded.owe(own if self._topology.host == 0 else [torch.zeros_like(part) for part in own], rounds)

    @abstractmethod
    def _own_parts(self, flats: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        """What this rank carries of flat tensors, one for each bucket."""

    def close(self) -> None:
        for group in self._groups:
            group.close()

    def _end(self) -> None:
        """Called when an exchange is over, for what a subclass has to do then."""

    def _is_idle(self, bucket: int) -> bool:
        return bucket in self.idle and bucket < len(self._buckets) - 1  # the last one has the header

    @abstractmethod
    def _offer(self, bucket: int) -> None:
        """This rank's part of ``bucket`` is complete."""

    @abstractmethod
    def _finish(self, bucket: int, what: Description) -> None:
        """Wait until the sum over all ranks is there."""

    def _send(self, bucket: int, tensor: torch.Tensor) -> None:
        """Begin to add up ``tensor`` over the lane."""
        if not tensor.numel():
            return  # the same on all ranks of the lane
        is_looked_at = self._rounds < _LOOK_AT_ALL or self._rounds % _LOOK_EVERY == 0 or spans.are_kept()
        note = functools.partial(self._note_departure, bucket) if is_looked_at else None
        way = None if self._encoded is None else self._encoded.sums[bucket]
        self._works[bucket] = self._group_of(bucket).start_sum(tensor, note, way)

    def _await(self, bucket: int, what: Description) -> None:
        """Wait until what was sent of ``bucket`` has been added up."""
        work, self._works[bucket] = self._works[bucket], None
        if work is not None:
            begin = time.perf_counter()
            self._group_of(bucket).wait(work, what)
            self._note_arrivals()
            spans.add(spans.WAIT, f"wait for bucket {bucket + 1}", begin, time.perf_counter())

    def _group_of(self, bucket: int) -> NetworkGroup:
        return self._groups[bucket % len(self._groups)]

    def _note_departure(self, bucket: int) -> None:
        """Take the time at which a bucket goes off; the group's thread may call this."""
        self._sent_at[bucket] = time.perf_counter()

    def _note_arrivals(self) -> None:
        """Take the times of buckets that have arrived, when somebody looks.

        Not by a callback: threads of Gloo would call Python even when the interpreter has ended, and abort.
        """
        now = time.perf_counter()
        for bucket in list(self._sent_at):
            work = self._works[bucket]
            if work is None or work.is_completed():
                sent_at = self._sent_at.pop(bucket)
                self._trips.append((sent_at, now))
                name, track = f"{self._names[bucket]} under way", f"bucket {bucket + 1}"
                spans.add(spans.EXCHANGE, name, sent_at, now, track=track)

    def _header_of(self, tensors: list[torch.Tensor]) -> torch.Tensor:
        return tensors[-1][self._data[-1].count :]

    def _take_times(self, entries: list[Entry], blocked_since: float) -> None:
        self._rounds += 1
        slowest = max(range(len(entries)), key=lambda rank: entries[rank].busy)
        late = (entries[slowest].busy - entries[self._topology.rank].busy) / 1e6
        if late > _LATE:
            self._lane.times.wait_for(self._topology.name_of(slowest), late)
            end = min(time.perf_counter(), blocked_since + late)
            spans.add(spans.WAIT, f"{spans.WAIT_FOR} rank {slowest}", blocked_since, end, track="waiting")
        self._lane.times.settle(self._trips, blocked_since)
        self._trips.clear()
        self._idle_since = time.perf_counter()


class Flat(NetworkReduction):
    """The algorithm on a host with one worker: it adds up its slot, or a copy if the slot is to be left as it is."""

    def __init__(self, lane: Lane, layout: Layout, *, in_place: bool, codec: CodecSpec | None = None) -> None:
        super().__init__(lane, layout, codec)
        self._mine = self._allocate()
        self._sums = self._mine if in_place else self._allocate()
        self.slots = [flat[: b.count] for flat, b in zip(self._mine, self._data, strict=True)]
        self.results = [flat[: b.count] for flat, b in zip(self._sums, self._data, strict=True)]
        if in_place:
            self.results = self.slots
        self._encode(self._own_parts(self._sums))

    def _own_parts(self, flats: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        return [flat[: bucket.count] for flat, bucket in zip(flats, self._data, strict=True)]

    def _allocate(self) -> list[torch.Tensor]:
        return [torch.zeros(b.count, dtype=b.dtype) for b in self._buckets]

    def _offer(self, bucket: int) -> None:
        if self._is_idle(bucket):
            return
        mine, sums, count = self._mine[bucket], self._sums[bucket], self._data[bucket].count
        torch.mul(mine[:count], 1 / self._topology.size, out=sums[:count])
        if sums is not mine:
            sums[count:] = mine[count:]
        self._send(bucket, sums)

    def _finish(self, bucket: int, what: Description) -> None:
        self._await(bucket, what)
