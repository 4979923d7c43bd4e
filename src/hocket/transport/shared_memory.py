"""The transport of one host: workers map the same memory and meet at a gate."""

from __future__ import annotations

import socket
import time
from collections.abc import Callable, Sequence

from hocket.errors import JobError
from hocket.transport import handoff
from hocket.transport.area import Area
from hocket.transport.counters import Counters
from hocket.transport.gate import Gate, signature
from hocket.transport.waiting import Description, ranks


class SharedMemory:
    """A group of workers on one host, made by ``join`` or ``share``; all workers call each method together."""

    def __init__(
        self, gate: Gate, connections: dict[int, socket.socket], share: Callable[[int, str], Area] | None = None
    ) -> None:
        self.gate = gate
        self.rank, self.size = gate.rank, gate.size
        self._connections = connections  # on rank 0 to every peer, on the others to rank 0
        self._share = share

    @classmethod
    def join(cls, name: str, rank: int, size: int, timeout: float) -> SharedMemory:
        """Become ``rank`` of ``size`` in the group ``name``; blocks until all are there or ``timeout``.

        ``name`` is the abstract socket on which rank 0 hands out the memory; it is the same on all ranks.
        """
        deadline = time.monotonic() + timeout
        if rank == 0:
            with handoff.listen(name, size) as server:
                connections = handoff.accept(server, size - 1, deadline)
            absent = [r for r in range(1, size) if r not in connections]
            if absent:
                raise JobError(f"{ranks(absent)} did not reach hocket.init() within {timeout:g} s: see their output")
            area = Area.create(Gate.nbytes(size), "gate")
            for connection in connections.values():
                handoff.give(connection, area.descriptor)
        else:
            connections = {0: handoff.connect(name, rank, deadline)}
            area = Area(handoff.take(connections[0]))
        for connection in connections.values():
            connection.settimeout(timeout)
        area.close_descriptor()
        gate = Gate(area, rank, size, timeout)
        gate.meet(0, 0, "hocket.init()")
        gate.watch_peers()
        return cls(gate, connections)

    @classmethod
    def share(
        cls, share: Callable[[int, str], Area], rank: int, processes: Sequence[int], timeout: float
    ) -> SharedMemory:
        """Become ``rank`` of a group whose memory comes from somebody else; blocks until all are there.

        Args:
            share: Gives memory of so many bytes for a purpose; the same for all ranks that ask in the same order.
            rank: The number of this worker in the group.
            processes: The process of each rank.
            timeout: Seconds to wait for others.
        """
        area = share(Gate.nbytes(len(processes)), "gate")
        area.close_descriptor()
        gate = Gate(area, rank, len(processes), timeout)
        gate.watch_peers(processes)
        gate.meet(0, 0, "hocket.init()")
        return cls(gate, {}, share)

    def meet(self, number: int, payload: int, what: Description) -> list[int]:
        """See ``Gate.meet``."""
        return self.gate.meet(number, payload, what)

    def allocate(self, nbytes: int, purpose: str) -> Area:
        """Get one new area of ``nbytes`` that all ranks map."""
        what = f"sharing {nbytes:,} bytes for {purpose}"
        self.gate.meet(signature(what), 0, what)
        if self._share is not None:
            area = self._share(nbytes, purpose)
        elif self.rank == 0:
            area = Area.create(nbytes, purpose)
            for connection in self._connections.values():
                handoff.give(connection, area.descriptor)
        else:
            area = Area(handoff.take(self._connections[0]))
        area.close_descriptor()
        return area

    def split(self, members: Sequence[int], sizes: Sequence[int]) -> SharedMemory | None:
        """A group of some of the workers, with a gate of its own, so that other threads can meet there.

        All workers call this; those that are no members get None.

        Args:
            members: The rank here of each member, by its rank in the new group.
            sizes: How many bytes each area has that the members allocate later: they get no others.
        """
        areas = [self.allocate(nbytes, "a group") for nbytes in (Gate.nbytes(len(members)), *sizes)]
        if self.rank not in members:
            return None
        left = iter(areas)
        processes = [self.gate.process_of(member) for member in members]
        made = SharedMemory.share(lambda *_: next(left), members.index(self.rank), processes, self.gate.timeout)
        made.gate.numbers = [self.gate.numbers[member] for member in members]
        return made

    def counters(self) -> Counters:
        """One number per rank that the others see."""
        return Counters(self.allocate(Counters.nbytes(self.size), "counters"), self.gate)

    @property
    def waited(self) -> float:
        """Seconds that this rank has slept for others so far."""
        return self.gate.waited

    def leave(self, failed: bool) -> None:
        """Say goodbye: whoever still waits for this rank is told how it ended."""
        self.gate.leave(failed)
        for connection in self._connections.values():
            connection.close()
