"""Collectives of workers that meet at the coordinator: dead workers are neither waited for nor counted."""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from functools import cached_property
from typing import Any, Generic, Protocol, TypeVar

import torch

from hocket.comm.alone import AloneCommunicator
from hocket.comm.bucket_layout import Layout
from hocket.comm.channel import Channel, Channels
from hocket.comm.communicator import Communicator, describe, named, through_cpu
from hocket.comm.exchange import Exchange
from hocket.comm.kept_answers import Answers, of_parts, to_parts
from hocket.comm.kernels import reduce_into
from hocket.comm.topology import Topology
from hocket.errors import StrategyError
from hocket.transport.tensor_bytes import view_bytes
from hocket.transport.waiting import Description

_AT_ONCE = 1 << 26  # most bytes in one meeting
_LOOK, _LOOK_OF_OTHERS = 0.1, 0.5  # seconds between two questions whether somebody waits to join, of rank 0 and others


class Meets(Protocol):
    """A worker's end of the coordinator, as far as collectives need it."""

    rank: int
    workers: int
    waited: float
    is_in: bool

    def gather(self, what: str, data: bytes) -> dict[int, bytes]:
        """What all live workers give, by rank; collective."""
        ...

    def close(self) -> None:
        """Say goodbye."""
        ...

    def keep(self, answers: bytes, failure: str = "") -> None: ...
    def kept(self) -> tuple[bytes, str]: ...
    def waiting(self) -> list[int]: ...


M = TypeVar("M", bound=Meets)


class MeetingCommunicator(Communicator, Generic[M]):
    """The workers of a job that goes on without lost workers.

    Args:
        client: The connection to the coordinator.
        host: Identifies this worker's host; workers with the same value are on one host.
        name: The name of this worker's host.
        way: How bytes move, in words.
        channels: Makes what carries messages between any ranks, if anything does.
        replaces: Whether others may join while the job goes on.

    Attributes:
        let_in: Lets a newcomer in, between two batches; None if nobody can.
        answers: The answers to the calls before training.
    """

    def __init__(
        self, client: M, host: str, name: str, way: str, channels: Channels | None = None, *, replaces: bool = False
    ) -> None:
        self.client, self.rank, self.size, self.way = client, client.rank, client.workers, way
        self._channels, self._open = channels, list[Channel]()
        self.let_in: Callable[[int], None] | None = None
        self.answers = Answers(keeps=replaces) if client.is_in else Answers.of_newcomer(*client.kept())
        self._next_look = 0.0
        said = json.dumps([host, name]).encode()
        self._said = {rank: json.loads(part) for rank, part in self._meet("hocket.init()", said).items()}
        self._said[self.rank] = [host, name]

    def begin(self) -> None:
        """Training begins: from now on newcomers make the same calls as the others."""
        self.answers.end(self.client.keep, is_in=self.client.is_in)

    def aside(self) -> AbstractContextManager[None]:
        """Calls inside this context are not made by newcomers: their answers are not kept for them."""
        return self.answers.aside()

    def look(self) -> None:
        now = time.monotonic()
        if self.let_in is not None and now >= self._next_look:
            self._next_look = now + (_LOOK if self.rank == 0 else _LOOK_OF_OTHERS)
            for number in self.client.waiting():
                self.let_in(number)

    @cached_property
    def topology(self) -> Topology:
        hosts: dict[str, list[int]] = {}
        for rank, (host, _) in self._said.items():
            hosts.setdefault(host, []).append(rank)
        names = tuple(self._said[ranks[0]][1] for ranks in hosts.values())
        return Topology(self.rank, tuple(map(tuple, hosts.values())), names)

    @property
    def on_host(self) -> Communicator:
        return AloneCommunicator()

    @property
    def waited(self) -> float:
        return self.client.waited

    @through_cpu
    def allreduce(self, tensor: torch.Tensor, operation: str) -> None:
        what = named(f"allreduce of {describe(tensor)}, {operation}")
        for part in _parts(tensor):
            given = [_like(data, part) for data in self._gather(what, part).values()]
            if len(given) > 1:
                reduce_into(part, given, operation)
            elif not self.answers.is_idle:  # a newcomer is told what the only worker had
                part.copy_(given[0])

    @through_cpu
    def allgather(self, tensor: torch.Tensor) -> torch.Tensor:
        rows = self._gather(named(f"allgather of {describe(tensor)}"), tensor.view(-1))
        return torch.stack([_like(data, tensor).view(tensor.shape) for data in rows.values()])

    @through_cpu
    def broadcast(self, tensor: torch.Tensor, root: int) -> None:
        what = named(f"broadcast of {describe(tensor)} from rank {root}")
        for part in _parts(tensor):
            found = self._meet(what, _bytes(part) if self.rank == root else b"")
            if root not in found:  # if the root is lost, the first of the others takes its place
                root = min(found)
                found = self._meet(f"{what}, which is lost", _bytes(part) if self.rank == root else b"")
            if self.rank != root or not self.answers.is_idle:
                part.copy_(_like(found[root], part))

    def barrier(self, what: str = "hocket.barrier()") -> None:
        self._meet(what, b"")

    def meet(self, number: int, payload: int, what: Description) -> list[int]:
        said = what if isinstance(what, str) else what()
        found = self._meet(f"{said} ({number & 0xFFFFFFFF:x})", str(payload).encode())
        return [int(data) for data in found.values()]

    def gather_bytes(self, data: bytes) -> list[bytes]:
        return list(self._meet(named("an exchange of descriptions"), data).values())

    def exchange(self, layout: Layout, **options: Any) -> Exchange:
        raise StrategyError(
            "this job has servers, and the strategy uses none: leave out --servers, or use --strategy ps"
        )

    def open_channel(self, name: str, ranks: Sequence[int]) -> Channel:
        if self._channels is None:
            return super().open_channel(name, ranks)
        self.answers.refuse()
        self._open.append(self._channels(name, ranks))
        return self._open[-1]

    def leave(self, failed: bool) -> None:
        while self._open:
            self._open.pop().close()
        self.client.close()

    def _gather(self, what: str, flat: torch.Tensor) -> dict[int, bytes]:
        return self._meet(what, _bytes(flat))

    def _meet(self, what: str, data: bytes) -> dict[int, bytes]:
        """What all live workers give, by rank; or have given, for a newcomer that does not train yet."""
        answers = self.answers
        if answers.is_idle:
            return self.client.gather(what, data)
        if (kept := answers.find(what)) is not None:
            ranks, *parts = to_parts(kept)
            return dict(zip(json.loads(ranks), parts, strict=True))
        found = self.client.gather(what, data)
        answers.keep(what, lambda: of_parts([json.dumps(list(found)).encode(), *found.values()]))
        return found


def _parts(tensor: torch.Tensor) -> list[torch.Tensor]:
    flat = tensor.view(-1)
    return list(flat.split(max(1, _AT_ONCE // tensor.element_size()))) if flat.numel() else []


def _bytes(flat: torch.Tensor) -> bytes:
    return bytes(view_bytes(flat.detach().contiguous()))


def _like(data: bytes, tensor: torch.Tensor) -> torch.Tensor:
    if not data:
        return tensor.new_empty(0)
    return torch.frombuffer(bytearray(data), dtype=tensor.dtype)
