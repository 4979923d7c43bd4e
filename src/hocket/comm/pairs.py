"""Averages of two workers at a time, for which nobody waits (AD-PSGD, Lian et al. 2018).

A sends a copy of its vector a to B. The thread of B that hears A moves B's vector b to the middle, under B's lock, and
answers with the step d = (a − b) / 2 that it has made; when that arrives, A moves by −d, under its own lock, whatever
has become of its vector meanwhile. The two move by opposite amounts, so that the sum over all workers is preserved. No
lock is held while anything travels, so nothing can deadlock, for odd and even numbers of workers.

Workers of one host do not send vectors: A's copy and B's answer are in memory that A has made and both have mapped.
"""

from __future__ import annotations

import os

import torch

from hocket.comm.neighbour_rounds import Flats, PeerKind
from hocket.comm.peers import Peers, Sending
from hocket.errors import DeadlineExceeded
from hocket.messages import Message, WireError
from hocket.transport import handoff
from hocket.transport.area import Area, aligned
from hocket.transport.tensor_bytes import as_bytes
from hocket.transport.waiting import Condition
from hocket.transport.wire import Wire

_EVERY = 1.0  # seconds between two measurements


class Pairs:
    """This worker's vector, and its part in the averages.

    Args:
        peers: The links; handlers are set here.
        flats: The vector, as flat tensors of the CPU: to be read and written with ``lock`` held.
        lock: Guards the vector.

    Attributes:
        distance: The last measurement, if any: half the square of the distance from the other worker's vector.
        averages: How many averages there have been, asked for by this worker or by others.
    """

    def __init__(self, peers: Peers, flats: Flats, lock: Condition) -> None:
        self._peers, self.flats = peers, flats
        self._condition = lock
        self._nbytes = sum(flat.nbytes for flat in flats)
        self._area: Area | None = None  # for the copy that others read, and their answer; made at first use
        self._outgoing: Flats = []
        self._answer: Flats = []
        self._given: set[int] = set()  # ranks that have the area
        self._theirs: dict[int, tuple[Flats, Flats]] = {}  # other workers' copies, and where the answers go
        self._free: list[Flats] = []
        self._number = 0
        self._pending: int | None = None  # the rank whose answer is under way
        self._unsent = False
        self._pass = -1  # none: the vector is not to be changed by others
        self._next = 0.0
        self.distance: float | None = None
        self.averages = 0
        peers.handlers |= {
            PeerKind.PAIR: self._take_pair, PeerKind.DELTA: self._take_delta, PeerKind.AREA: self._take_area,
        }  # fmt: skip
        peers.on_loss.append(self._lose)

    @property
    def is_open(self) -> bool:
        """Whether others may average with this worker."""
        return self._pass >= 0

    def open(self, number: int) -> None:
        """From now on others of the same pass may average with this worker."""
        with self._condition:
            self._pass = number

    def close(self, timeout: float) -> None:
        """Let nobody average with this worker; returns when nothing is under way. The sum of all vectors is preserved.

        Raises:
            DeadlineExceeded: a worker that is alive has not answered.
        """
        with self._condition:
            pending = self._pending
            if not self._condition.wait_for(lambda: self._pending is None, timeout):
                raise DeadlineExceeded(
                    f"rank {pending} has not answered in gossip within {timeout:g} s: see its output, or give it more "
                    "time with --timeout"
                )
            self._pass = -1

    def average(self, rank: int) -> bool:
        """Begin to average with ``rank``; False, and nothing happens, if one is under way, or this worker is closed."""
        with self._condition:
            if self._pending is not None or self._unsent or self._pass < 0:
                return False
            self._pending, self._number = rank, self._number + 1
            is_beside = self._peers.is_beside(rank) and hasattr(os, "memfd_create")
            self._unsent = not is_beside  # shared memory is read before the answer comes
            self._make_room(shared=is_beside)
            for copy, flat in zip(self._outgoing, self.flats, strict=True):
                copy.copy_(flat)
            if is_beside and rank not in self._given:
                self._given.add(rank)
                self._peers.send(rank, PeerKind.AREA, {}, area=self._area)
            sent = Sending(1, self._note_sent) if not is_beside else None
            parts = as_bytes(self._outgoing) if not is_beside else []
            told = {"pass": self._pass}
            self._peers.send(rank, PeerKind.PAIR, told, parts, sequence=self._number, sent=sent)
        if rank not in self._peers.live:
            self._lose(rank)
        return True

    def _make_room(self, *, shared: bool) -> None:
        """Make room for the copy: in shared memory, which serves all workers once it is there, or in private memory."""
        if shared and self._area is None:
            self._area = Area.create(2 * _extent(self.flats), "gossip")
            self._outgoing, self._answer = _in_area(self._area, self.flats)
        elif not self._outgoing:
            self._outgoing = [torch.empty_like(flat) for flat in self.flats]

    def _take_area(self, rank: int, _: Message, wire: Wire) -> None:
        area = Area(handoff.take(wire.connection))
        area.close_descriptor()
        if area.nbytes < 2 * _extent(self.flats):
            raise WireError(f"shared memory of {area.nbytes:,} bytes, which is too little")
        self._theirs[rank] = _in_area(area, self.flats)

    def _take_pair(self, rank: int, message: Message, wire: Wire) -> None:
        if message.body:
            copy = self._receive(message, wire)
            answer = copy  # the answer takes the place of the copy
        else:
            copy, answer = self._theirs[rank]
        with self._condition:
            agrees = message.head["pass"] == self._pass >= 0
            if agrees:
                for theirs, flat, step in zip(copy, self.flats, answer, strict=True):
                    torch.sub(theirs, flat, out=step)
                    step.mul_(0.5)
                    flat.add_(step)
                self.averages += 1
        parts = as_bytes(answer) if agrees and message.body else []
        sent = Sending(1, lambda: self._free.append(answer)) if message.body else None
        self._peers.send(rank, PeerKind.DELTA, {"agrees": agrees}, parts, sequence=message.sequence, sent=sent)

    def _take_delta(self, rank: int, message: Message, wire: Wire) -> None:
        step = self._receive(message, wire) if message.body else self._answer
        with self._condition:
            if message.sequence > self._number:
                raise WireError(f"an answer to average {message.sequence} of rank {rank}, which was not asked for")
            if self._pending != rank or message.sequence < self._number:
                return  # the link was lost while the message was received
            if message.head["agrees"]:
                for each, flat in zip(step, self.flats, strict=True):
                    flat.sub_(each)
                self._measure(step)
                self.averages += 1
            if message.body:
                self._free.append(step)
            self._pending = None
            self._condition.notify_all()

    def _measure(self, step: Flats) -> None:
        now = self._peers.now()
        if now >= self._next:
            self._next = now + _EVERY
            self.distance = 2 * squares(step)

    def _receive(self, message: Message, wire: Wire) -> Flats:
        if message.body != self._nbytes:
            raise WireError(f"{message.body:,} bytes came, and {self._nbytes:,} were expected")
        try:
            flats = self._free.pop()
        except IndexError:
            flats = [torch.empty_like(flat) for flat in self.flats]
        wire.receive_into(as_bytes(flats))
        return flats

    def _note_sent(self) -> None:
        with self._condition:
            self._unsent = False

    def _lose(self, rank: int) -> None:
        with self._condition:
            if rank in self._given:
                # If it is alive, it may still write its answer: there is other memory for what comes next. The
                # descriptor stays open, as it may be on its way to somebody.
                self._area, self._outgoing, self._answer, self._given = None, [], [], set()
            if self._pending == rank:
                self._pending = None
                self._condition.notify_all()


def squares(flats: Flats) -> float:
    """The square of the length of a vector."""
    return sum(float(torch.linalg.vector_norm(flat, dtype=torch.float64)) ** 2 for flat in flats)


def _extent(flats: Flats) -> int:
    """Bytes that a vector takes in shared memory."""
    return sum(aligned(flat.nbytes) for flat in flats)


def _in_area(area: Area, flats: Flats) -> tuple[Flats, Flats]:
    """Two vectors like ``flats``, one after the other."""
    found: list[Flats] = []
    offset = 0
    for _ in range(2):
        found.append([])
        for flat in flats:
            found[-1].append(area.tensor(offset, flat.numel(), flat.dtype))
            offset += aligned(flat.nbytes)
    return found[0], found[1]
