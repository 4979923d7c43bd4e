"""Shared memory of simulated workers, who live in one process and meet on a virtual clock."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from hocket.errors import WorkerLost
from hocket.transport.area import Area
from hocket.transport.counters import Counters
from hocket.transport.gate import FINISHED, disagreement, signature
from hocket.transport.shared_memory import SharedMemory
from hocket.transport.simulated import Simulation
from hocket.transport.simulated_links import SimulatedWires
from hocket.transport.waiting import Description, ranks, say


class SimulatedHost:
    """What the simulated workers of one host have in common.

    Args:
        simulation: The simulation by whose clock the workers live.
        size: How many workers there are.
    """

    def __init__(self, simulation: Simulation, size: int) -> None:
        self.simulation, self.size = simulation, size
        self.condition = simulation.condition()
        self.meetings: dict[int, _Meeting] = {}  # to which a rank has come, and which not all have left
        self.areas: list[Area] = []
        self.counts: list[list[int]] = []
        self.wires: dict[str, SimulatedWires] = {}  # between the members of each group
        self.left: dict[int, bool] = {}  # ranks that have ended, and whether they failed


class _Meeting:
    def __init__(self) -> None:
        self.came: dict[int, tuple[int, int, Description, Any]] = {}  # number, payload, what for, and what was brought
        self.result: Any = None
        self.has_result = False
        self.readers = 0


class SimulatedMemory(SharedMemory):
    """One simulated worker's end of a host."""

    def __init__(self, host: SimulatedHost, rank: int) -> None:
        self.host, self.rank, self.size = host, rank, host.size
        self._sequence = self._areas = self._counters = 0
        self._waited = 0.0

    @property
    def waited(self) -> float:
        return self._waited

    def meet(self, number: int, payload: int, what: Description) -> list[int]:
        return self.bring(number, payload, what, None, lambda _: None)[0]

    def bring(
        self, number: int, payload: int, what: Description, mine: Any, combine: Callable[[list[Any]], Any]
    ) -> tuple[list[int], Any]:
        """Meet the other ranks; each rank brings something of its own.

        Returns:
            The payloads of all ranks, and what ``combine``, called once, has made of what the ranks have brought.
        """
        host = self.host
        self._sequence += 1
        with host.condition:
            meeting = host.meetings.setdefault(self._sequence, _Meeting())
            meeting.came[self.rank] = number, payload, what, mine
            begin = host.simulation.now()
            if len(meeting.came) == self.size:
                host.condition.notify_all()
            while len(meeting.came) < self.size:
                self._check_lost(meeting, what)
                host.condition.wait()
            self._waited += host.simulation.now() - begin
            meeting.readers += 1
            if meeting.readers == self.size:
                del host.meetings[self._sequence]
            came = [meeting.came[rank] for rank in range(self.size)]
            if len({each[0] for each in came}) > 1:
                said: dict[str, list[int]] = {}
                for rank, each in enumerate(came):
                    said.setdefault(say(each[2]), []).append(rank)
                raise disagreement(said)
            if not meeting.has_result:
                meeting.result, meeting.has_result = combine([each[3] for each in came]), True
            return [each[1] for each in came], meeting.result

    def allocate(self, nbytes: int, purpose: str) -> Area:
        what = f"sharing {nbytes:,} bytes for {purpose}"
        self.meet(signature(what), 0, what)
        if len(self.host.areas) == self._areas:
            area = Area.create(nbytes, purpose)
            area.close_descriptor()
            self.host.areas.append(area)
        self._areas += 1
        return self.host.areas[self._areas - 1]

    def counters(self) -> Counters:
        if len(self.host.counts) == self._counters:
            self.host.counts.append([0] * self.size)
        self._counters += 1
        return SimulatedCounters(self, self.host.counts[self._counters - 1])

    def leave(self, failed: bool) -> None:
        with self.host.condition:
            self.host.left[self.rank] = failed
            self.host.condition.notify_all()

    def await_until(self, is_so: Callable[[], bool]) -> None:
        """Wait until a condition is true, which other ranks bring about."""
        with self.host.condition:
            while not is_so():
                self.host.condition.wait()

    def _check_lost(self, meeting: _Meeting, what: Description) -> None:
        gone = sorted(rank for rank in self.host.left if rank not in meeting.came)
        if gone:
            here = sorted(meeting.came)
            how = "ended before arriving there" if any(self.host.left[rank] for rank in gone) else FINISHED
            raise WorkerLost(
                f"{ranks(here)} wait{'' if len(here) > 1 else 's'} in {say(what)}, but {ranks(gone)} {how}"
            )


class SimulatedCounters(Counters):
    """One number per simulated rank."""

    def __init__(self, memory: SimulatedMemory, counts: list[int]) -> None:
        self._memory, self._counts = memory, counts

    def advance(self, count: int) -> None:
        with self._memory.host.condition:
            self._counts[self._memory.rank] = count
            self._memory.host.condition.notify_all()

    def reached(self, count: int, ranks: Sequence[int]) -> bool:
        return all(self._counts[rank] >= count for rank in ranks)

    def wait(self, count: int, ranks: Sequence[int], what: Description) -> None:
        self._memory.await_until(lambda: self.reached(count, ranks))
