"""The workers of one host that go on when one of them dies: the others meet at the coordinator, and are a new group.

A dead worker is noticed at a meeting to which it never came. All others are at the same meeting, so all of them notice
it at the same place of the script. They agree at the coordinator on who is left, share new memory, and repeat what they
were doing.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Protocol, TypeVar

import torch

from hocket.comm.alone import AloneCommunicator
from hocket.comm.bucket_layout import Layout
from hocket.comm.communicator import Communicator
from hocket.comm.coordinator_group import Meets
from hocket.comm.exchange import Exchange
from hocket.comm.shared import SharedCommunicator
from hocket.errors import WorkerLost
from hocket.transport.area import Area
from hocket.transport.shared_memory import SharedMemory
from hocket.transport.waiting import Description

T = TypeVar("T")


class Shares(Meets, Protocol):
    """A worker's end of the coordinator, which keeps memory for the workers of its host."""

    def begin_generation(self, generation: int) -> None:
        """The workers that are left share other memory from now on."""

    def share(self, nbytes: int) -> Area:
        """Memory that is the same for all workers that ask in the same order."""
        ...


@dataclass(frozen=True)
class Change:
    """A new generation of a job: who is in it, and who is not any more.

    Attributes:
        generation: The number of the generation; the job begins with 0.
        before: Who was in the generation before: the number that each worker had when the job began, by rank.
        now: Who is in the job now, in the same way.
        rank: The rank of this worker now.
        said: What each worker of ``now`` has said of itself.
    """

    generation: int
    before: tuple[int, ...]
    now: tuple[int, ...]
    rank: int
    said: tuple[dict[str, Any], ...]

    @property
    def size(self) -> int:
        """How many workers there are now."""
        return len(self.now)

    @property
    def lost(self) -> list[int]:
        """Who is gone: the numbers that they had when the job began."""
        return [each for each in self.before if each not in self.now]


class RegroupingCommunicator(Communicator):
    """Workers of one host over shared memory, as many as are left.

    Ranks are always 0 to size - 1, in the order in which workers were ranked when the job began.

    Args:
        coordinator: This worker's connection to the coordinator.
        timeout: Seconds to wait for a worker that is alive.

    Attributes:
        members: The number that each worker had when the job began, by rank.
        generation: How often the group has changed.
        tell: Says what the others are to know of this worker when the group changes.
        on_change: Called when the group has changed, before what was interrupted is repeated; may be collective.
    """

    way = "shared memory"
    changes = True

    def __init__(self, coordinator: Shares, timeout: float) -> None:
        self._coordinator, self._timeout = coordinator, timeout
        self.members, self.generation, self._waited = tuple(range(coordinator.workers)), 0, 0.0
        self.tell: Callable[[], dict[str, Any]] = dict
        self.on_change: Callable[[Change], None] = lambda _: None
        self._is_regrouping = False
        self._group = self._join(self._meet())

    def regroup(self, loss: WorkerLost) -> None:
        """Go on with the workers that are left; they all call this.

        Raises:
            WorkerLost: ``loss`` itself, if nobody can go on after it.
        """
        before = self.members
        while True:
            said = self._meet() if loss.died else {}
            if not loss.died or said.keys() >= set(self.members):
                raise loss  # a script has failed or ended; or the coordinator still hears from all of them
            self.members = tuple(member for member in self.members if member in said)
            self.generation += 1
            try:
                self._group = self._join(said)
                told = tuple(said[member] for member in self.members)
                change, before = Change(self.generation, before, self.members, self.rank, told), self.members
                self._is_regrouping = True
                self.on_change(change)
                return
            except WorkerLost as another:
                loss = another
            finally:
                self._is_regrouping = False

    def look(self) -> None:
        memory = self.memory
        if memory is not None and any(memory.gate.has_died(rank) for rank in range(self.size)):
            loss = WorkerLost("a worker has ended, and others still hear from it: see its output")
            loss.died = True
            self.regroup(loss)

    def persist(self, call: Callable[[], T]) -> T:
        while not self._is_regrouping:
            try:
                return call()
            except WorkerLost as loss:
                self.regroup(loss)
        return call()  # one more loss is for who regroups

    def exchange(self, layout: Layout, *, background: bool = False, turns: int = 1, private: bool = True) -> Exchange:
        make = super().exchange
        return self.persist(lambda: make(layout, background=background, turns=turns, private=private))

    def _meet(self) -> dict[int, dict[str, Any]]:
        """What the workers that are left say of themselves."""
        mine = json.dumps({"process": os.getpid(), **self.tell()}).encode()
        found = self._coordinator.gather(f"the workers of generation {self.generation}", mine)
        return {member: json.loads(data) for member, data in found.items()}

    def _join(self, said: dict[int, dict[str, Any]]) -> Communicator:
        rank = self.members.index(self._coordinator.rank)
        processes = [int(said[member]["process"]) for member in self.members]
        self._coordinator.begin_generation(self.generation)
        group: Communicator = AloneCommunicator()
        if len(processes) > 1:
            memory = SharedMemory.share(self._coordinator.share, rank, processes, self._timeout)
            memory.gate.numbers = list(self.members)
            group = SharedCommunicator(memory)
        if self.generation:
            self._waited += self._group.waited
            self._group.leave(failed=False)
        return group

    @property
    def rank(self) -> int:  # type: ignore[override]
        return self._group.rank

    @property
    def size(self) -> int:  # type: ignore[override]
        return self._group.size

    @property
    def memory(self) -> SharedMemory | None:
        return self._group.memory

    @property
    def waited(self) -> float:
        return self._waited + self._group.waited

    def allreduce(self, tensor: torch.Tensor, operation: str) -> None:
        def reduce() -> torch.Tensor:
            result = tensor.clone()
            self._group.allreduce(result, operation)
            return result

        tensor.copy_(self.persist(reduce))

    def allgather(self, tensor: torch.Tensor) -> torch.Tensor:
        return self.persist(lambda: self._group.allgather(tensor))

    def broadcast(self, tensor: torch.Tensor, root: int) -> None:
        def send() -> None:
            if root >= self.size:
                raise WorkerLost(f"a broadcast from rank {root}, which is gone: there are ranks 0 to {self.size - 1}")
            self._group.broadcast(tensor, root)

        self.persist(send)

    def barrier(self, what: str = "hocket.barrier()") -> None:
        self.persist(lambda: self._group.barrier(what))

    def meet(self, number: int, payload: int, what: Description) -> list[int]:
        return self.persist(lambda: self._group.meet(number, payload, what))

    def gather_bytes(self, data: bytes) -> list[bytes]:
        return self.persist(lambda: self._group.gather_bytes(data))

    def leave(self, failed: bool) -> None:
        self._group.leave(failed)
        self._coordinator.close()
