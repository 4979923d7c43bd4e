"""Workers whose group changes: some are lost, others join or leave, and the rest are a new group.

A dead worker is noticed at a meeting to which it never came. All others are at the same meeting, so all of them notice
it at the same place of the script. They agree at the coordinator on who is left, are connected anew, and repeat what
they were doing. Newcomers come, and workers leave, between two batches: rank 0 asks the coordinator now and then who
wants to, and writes into shared memory after which exchange all are to heed it, before it takes part in that exchange.
"""

from __future__ import annotations

import json
import os
import signal
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from typing import Any, TypeVar, cast

import torch

from hocket.comm.algorithms.network_reductions import NetworkTimes
from hocket.comm.alone import AloneCommunicator
from hocket.comm.bucket_layout import Layout
from hocket.comm.changing_gpus import ChangingGpus, look_for_dead
from hocket.comm.channel import Channel
from hocket.comm.communicator import Communicator, ConnectGpus, calling, describe
from hocket.comm.connectors import Connector, Shares
from hocket.comm.exchange import Alone, Exchange
from hocket.comm.generation import Change, Left
from hocket.comm.kept_answers import Answers, of_parts, of_tensor, to_parts, to_tensor
from hocket.comm.shared import SharedCommunicator
from hocket.comm.topology import Topology
from hocket.errors import UsageError, WorkerLost
from hocket.transport.counters import Counters
from hocket.transport.nccl import NcclGroup
from hocket.transport.shared_memory import SharedMemory
from hocket.transport.waiting import Description

T = TypeVar("T")
_LOOK = 0.1  # seconds between two questions of rank 0 whether somebody wants to join or leave
_LOOK_ON_HOSTS = 0.5  # about as many where all have to be told


class RegroupingCommunicator(Communicator):
    """The workers of a job, as many as there are.

    Ranks are always 0 to size - 1. Rank 0 stays rank 0; the others are in the order of their numbers.

    Args:
        coordinator: This worker's connection to the coordinator.
        connector: Connects the workers of each generation.
        newcomer: Whether the job goes on already: this worker comes in with ``join``.
        replaces: Whether others may join while the job goes on.
        asked: The flag by which the user has asked for a group that changes; empty if nobody has.

    Attributes:
        members: The number of each worker, by rank: the rank that it had, or that a worker that it replaces had, when
            the job began.
        is_in: Whether this worker is one of the group: a newcomer is not until it has joined.
        goes_on: Whether the others go on now if one is lost; by default, from when a strategy allows it.
        tell: Says what the others are to know of this worker when the group changes.
        place: Says how many exchanges there were since the group has changed, between two batches; else None.
        leaves: Whether this worker is to leave.
        is_wanted: Whether anybody is to join or leave, as far as rank 0 is told.
        ahead: How many exchanges of all may be under way at once, between two batches.
        before_change: Called before newcomers come, with the rank of the first worker that stays, which is to be rank
            0; and before all leave, with None. Collective.
        hand_over: Called when newcomers are here, to give them all that the others have; collective.
        on_change: Called when the group has changed, before what was interrupted is repeated; may be collective.
        on_stay: Called when it turns out that the group cannot change.
        answers: The answers to the calls before training.
    """

    members: tuple[int, ...] = ()

    def __init__(
        self, coordinator: Shares, connector: Connector, *, newcomer: bool = False, replaces: bool = False,
        asked: str = "",
    ) -> None:  # fmt: skip
        self._coordinator, self._connector, self._asked = coordinator, connector, asked
        self.changes = self.parts = True
        self.members, self.generation, self._waited = tuple(range(coordinator.workers)), 0, 0.0
        self.tell: Callable[[], dict[str, Any]] = dict
        self.place: Callable[[], int | None] = lambda: None
        self.leaves: Callable[[], bool] = lambda: False
        self.is_wanted: Callable[[], bool] = lambda: any(coordinator.wanted(self.members).values())
        self.before_change: Callable[[int | None], None] = lambda _: None
        self.hand_over: Callable[[Change], None] = lambda _: None
        self.on_change: Callable[[Change], None] = lambda _: None
        self.on_stay: Callable[[], None] = lambda: None
        self.is_in, self.goes_on = not newcomer, bool(asked)
        self._known, self.ahead = self.members, 0  # who was in the group when it was last told of a change
        self._counters, self._next_look, self._next_place = cast(Counters | None, None), 0.0, 1
        self.answers = Answers.of_newcomer(*coordinator.kept()) if newcomer else Answers(keeps=replaces)
        self._gpus, self._is_regrouping, self._has_asked = ChangingGpus(), False, False
        self._group: Communicator = AloneCommunicator()
        if not newcomer:
            self._group = self._join(self._meet())

    def join(self) -> None:
        """Come in, as a newcomer: wait until the others are between two batches, and get all that they have."""
        told, _ = self._coordinator.join()
        self.generation, self.members = int(told["generation"]), tuple(told["members"])
        self.is_in, self._known = True, self.members
        self._become(self._meet(), told["leaving"])

    def stay(self, why: str) -> None:
        if self._asked:
            raise UsageError(f"{self._asked}: {why}, or leave out --on-loss")
        if self.changes:
            self.changes = False
            self._group.stay(why)
            self.answers.fail(why)
            self.on_stay()

    def aside(self) -> AbstractContextManager[None]:
        """Calls inside this context are not made by newcomers: their answers are not kept for them."""
        return self.answers.aside()

    @contextmanager
    def apart(self) -> Iterator[None]:
        """Inside this context, this worker is a group of its own: nothing that it does is collective."""
        group, self._group = self._group, AloneCommunicator()
        try:
            yield
        finally:
            self._group = group

    def begin(self) -> None:
        """Training begins: from now on newcomers make the same calls as the others."""
        self.answers.end(self._coordinator.keep, is_in=self.is_in)

    def regroup(self, loss: WorkerLost) -> None:
        """Go on with the workers that are left; they all call this.

        Raises:
            WorkerLost: ``loss`` itself, if nobody can go on after it.
        """
        while True:
            said = self._meet() if loss.died else {}
            if not loss.died or said.keys() >= set(self.members):
                raise loss  # a script has failed or ended; or the coordinator still hears from all of them
            now = tuple(member for member in self.members if member in said and member in self._known)
            if self._coordinator.rank not in now:  # whoever was to tell this newcomer all is gone, or others are
                os.kill(os.getpid(), signal.SIGKILL)
            try:
                self._enter(said, now)
                return
            except WorkerLost as another:
                loss = another

    def look(self) -> None:
        if not (self.goes_on if self.changes else self.parts):
            return
        try:
            if self.changes:
                look_for_dead(self._group)
        except WorkerLost as loss:
            self.regroup(loss)
        if self.leaves() and not self._has_asked:
            self._has_asked = True
            self._coordinator.leave()
        if (place := self.place()) is not None and self._is_time(place):
            if not self.changes:  # nobody can go on without anybody
                self.before_change(None)
                raise Left(0)
            self.renew()

    def _is_time(self, place: int) -> bool:
        """Whether somebody is to join or leave now; the same on all ranks that are at the same place."""
        if (counters := self._counters) is None and self.size > 1:
            return self._is_time_on_hosts(place)
        is_late = self._has_asked or time.monotonic() >= self._next_look  # of its own wish rank 0 knows
        if self.rank == 0 and is_late and (counters is None or not counters.of(0)):
            self._next_look = time.monotonic() + _LOOK
            if self.is_wanted():
                if counters is None:
                    return True
                counters.advance(place + 1 + self.ahead)
        return counters is not None and 0 < counters.of(0) <= place

    def _is_time_on_hosts(self, place: int) -> bool:
        """The same without memory that all share: rank 0 tells the others, and after how many exchanges it will again.

        Collective, at the first look after every so many exchanges: before the first one, newcomers look once more."""
        if place < self._next_place:
            return False
        now, mine, generation = time.monotonic(), b"", self.generation
        if self.rank == 0:
            each = max((now - self._next_look) / max(place, 1), 1e-4) if self._next_look else 1.0
            mine = json.dumps([self.is_wanted(), max(1, int(_LOOK_ON_HOSTS / each))]).encode()
        told = self.gather_bytes(mine)[0]
        if self.generation != generation:
            return False  # rank 0 may be another one now, which has told nothing
        is_wanted, more = json.loads(told)
        self._next_place = place + int(more)
        return bool(is_wanted)

    def renew(self) -> None:
        """All workers, between two batches, let in who wants to join, and let go who wants to leave."""
        generation = self.generation
        try:
            mine = json.dumps(self._coordinator.wanted(self.members)).encode() if self.rank == 0 else b""
            wanted = json.loads(self._group.gather_bytes(mine)[0])
            joining, leaving = wanted["joining"], wanted["leaving"]
            first = next((rank for rank, member in enumerate(self.members) if member not in leaving), None)
            if first is None:
                joining = []
            if joining or first is None:
                self.before_change(first)
        except WorkerLost as loss:
            self.regroup(loss)
        if self.generation != generation:
            return  # a worker was lost meanwhile: look again
        if self.rank == 0 and joining:
            self._coordinator.admit(joining, {"generation": generation, "members": self.members, "leaving": leaving})
        self._become(self._meet(), leaving)

    def _become(self, said: dict[int, dict[str, Any]], leaving: Sequence[int]) -> None:
        """Be the group of those who have come, but for those who leave."""
        stay = set(said) - set(leaving)
        if self._coordinator.rank not in stay:
            raise Left(0)
        there = [member for member in self.members if member in stay]
        if not there:  # all who could tell the newcomers anything are gone
            os.kill(os.getpid(), signal.SIGKILL)
        is_planned = all(member in said for member in self.members)
        try:
            self._enter(said, (there[0], *sorted(stay - {there[0]})), is_planned=is_planned)
        except WorkerLost as loss:
            self.regroup(loss)

    def _enter(self, said: dict[int, dict[str, Any]], now: tuple[int, ...], *, is_planned: bool = False) -> None:
        """Begin a new generation."""
        self.members = now
        self.generation += 1
        self._group = self._join(said)
        change = Change(self.generation, self._known, now, self.rank, tuple(said[member] for member in now), is_planned)
        self._is_regrouping, self.has_newcomers = True, bool(change.joined)
        try:
            with calling(""):  # newcomers are in hocket.resume(), the others between two batches
                if change.joined:
                    self.hand_over(change)
                self._known = now
                self.on_change(change)
        finally:
            self._is_regrouping = False

    def open_channel(self, name: str, ranks: Sequence[int]) -> Channel:
        self.answers.refuse()
        return self._group.open_channel(name, ranks)

    def persist(self, call: Callable[[], T]) -> T:
        while self.goes_on and self.changes and not self._is_regrouping:
            try:
                return call()
            except WorkerLost as loss:
                self.regroup(loss)
        return call()  # one more loss is for who regroups

    def exchange(self, layout: Layout, **options: Any) -> Exchange:
        if not self.is_in:  # another one takes its place when this worker has joined
            return Exchange(layout, [Alone(layout) for _ in range(options.get("turns", 1))])
        return self.persist(lambda: self._group.exchange(layout, **options))

    def _meet(self) -> dict[int, dict[str, Any]]:
        """What the workers that are left say of themselves."""
        mine = {**self._connector.describe(), **self.tell()}
        found = self._coordinator.gather(f"the workers of generation {self.generation}", json.dumps(mine).encode())
        return {member: json.loads(data) for member, data in found.items()}

    def _join(self, said: dict[int, dict[str, Any]]) -> Communicator:
        group = self._connector.connect(self.generation, self.members, said)
        self._gpus.join(group, self.generation, self._group)
        counters = group.transport.counters() if isinstance(group, SharedCommunicator) else None
        if self.generation:
            self._waited += self._group.waited
            self._group.leave(failed=False)
        self._counters, self._next_place, self._next_look = counters, 1, time.monotonic()
        return group

    @property
    def rank(self) -> int:  # type: ignore[override]
        return self._group.rank if self.is_in else self._coordinator.rank

    @property
    def size(self) -> int:  # type: ignore[override]
        return self._group.size if self.is_in else self._coordinator.workers

    @property
    def way(self) -> str:  # type: ignore[override]
        return self._group.way

    @property
    def topology(self) -> Topology:
        return self._group.topology if self.is_in else super().topology

    @property
    def traffic(self) -> NetworkTimes | None:  # type: ignore[override]
        return self._group.traffic

    @property
    def spreads(self) -> bool:
        return self._connector.spreads

    @property
    def group(self) -> Communicator:  # of this generation
        return self._group

    @property
    def on_host(self) -> Communicator:
        return self if self._group.on_host is self._group else self._group.on_host

    @property
    def memory(self) -> SharedMemory | None:
        return self._group.memory

    @property
    def nccl(self) -> NcclGroup | None:  # type: ignore[override]
        return self._group.nccl

    def connect_gpus(self, connect: ConnectGpus) -> None:
        if not self.changes:
            self._group.connect_gpus(connect)
            return
        self._gpus.connect = connect
        if self.is_in:
            self._gpus.join(self._group, self.generation)

    @property
    def waited(self) -> float:
        return self._waited + self._group.waited

    def allreduce(self, tensor: torch.Tensor, operation: str) -> None:
        def reduce() -> torch.Tensor:
            result = tensor.clone() if self.goes_on else tensor  # as it was, if the call has to be repeated
            self._group.allreduce(result, operation)
            return result

        self._replace(lambda: f"allreduce of {describe(tensor)}, {operation}", tensor, reduce)

    def allgather(self, tensor: torch.Tensor) -> torch.Tensor:
        return self._answer(
            lambda: f"allgather of {describe(tensor)}",
            lambda: self._group.allgather(tensor),
            of_tensor,
            lambda kept: to_tensor(kept, tensor).view(-1, *tensor.shape).to(tensor.device),
        )

    def broadcast(self, tensor: torch.Tensor, root: int) -> None:
        def send() -> torch.Tensor:
            if root >= self.size:
                raise WorkerLost(f"a broadcast from rank {root}, which is gone: there are ranks 0 to {self.size - 1}")
            self._group.broadcast(tensor, root)
            return tensor

        self._replace(lambda: f"broadcast of {describe(tensor)} from rank {root}", tensor, send)

    def barrier(self, what: str = "hocket.barrier()") -> None:
        self._answer(lambda: "a barrier", lambda: self._group.barrier(what), lambda _: b"", lambda _: None)

    def meet(self, number: int, payload: int, what: Description) -> list[int]:
        return self._answer(
            lambda: "a meeting",
            lambda: self._group.meet(number, payload, what),
            lambda found: of_parts([str(each).encode() for each in found]),
            lambda kept: [int(part) for part in to_parts(kept)],
        )

    def gather_bytes(self, data: bytes) -> list[bytes]:
        return self._answer(lambda: "an exchange of data", lambda: self._group.gather_bytes(data), of_parts, to_parts)

    def _replace(self, what: Callable[[], str], tensor: torch.Tensor, call: Callable[[], torch.Tensor]) -> None:
        """Replace ``tensor`` by what ``call``, which is collective, gives; or has given, for a newcomer."""
        result = self._answer(what, call, of_tensor, lambda kept: to_tensor(kept, tensor).view(tensor.shape))
        if result is not tensor:
            tensor.copy_(result)

    def _answer(
        self, what: Callable[[], str], call: Callable[[], T], pack: Callable[[T], bytes], unpack: Callable[[bytes], T]
    ) -> T:
        """What ``call``, which is collective, gives, and what is kept for newcomers; for a newcomer, what was kept."""
        answers = self.answers
        if answers.is_idle:
            return self.persist(call)
        name = what()
        if (kept := answers.find(name)) is not None:
            return unpack(kept)
        result = self.persist(call)
        answers.keep(name, lambda: pack(result))
        return result

    def leave(self, failed: bool) -> None:
        self._group.leave(failed)
        self._connector.leave(failed)
        self._coordinator.close()
