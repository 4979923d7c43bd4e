"""Collectives of workers that meet at the coordinator: dead workers are neither waited for nor counted."""

from __future__ import annotations

import json
from functools import cached_property
from typing import Generic, Protocol, TypeVar

import torch

from hocket.comm.alone import AloneCommunicator
from hocket.comm.bucket_layout import Layout
from hocket.comm.communicator import Communicator, describe, named, through_cpu
from hocket.comm.exchange import Exchange
from hocket.comm.kernels import reduce_into
from hocket.comm.topology import Topology
from hocket.errors import StrategyError
from hocket.transport.tensor_bytes import view_bytes
from hocket.transport.waiting import Description

_AT_ONCE = 1 << 26  # most bytes in one meeting


class Meets(Protocol):
    """A worker's end of the coordinator, as far as collectives need it."""

    rank: int
    workers: int
    waited: float

    def gather(self, what: str, data: bytes) -> dict[int, bytes]:
        """What all live workers give, by rank; collective."""
        ...

    def close(self) -> None:
        """Say goodbye."""
        ...


M = TypeVar("M", bound=Meets)


class MeetingCommunicator(Communicator, Generic[M]):
    """The workers of a job that goes on without lost workers.

    Args:
        client: The connection to the coordinator.
        host: Identifies this worker's host; workers with the same value are on one host.
        name: The name of this worker's host.
        way: How bytes move, in words.
    """

    def __init__(self, client: M, host: str, name: str, way: str) -> None:
        self.client, self.rank, self.size, self.way = client, client.rank, client.workers, way
        said = json.dumps([host, name]).encode()
        self._said = {rank: json.loads(part) for rank, part in client.gather("hocket.init()", said).items()}

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

    @through_cpu
    def allgather(self, tensor: torch.Tensor) -> torch.Tensor:
        rows = self._gather(named(f"allgather of {describe(tensor)}"), tensor.view(-1))
        return torch.stack([_like(data, tensor).view(tensor.shape) for data in rows.values()])

    @through_cpu
    def broadcast(self, tensor: torch.Tensor, root: int) -> None:
        what = named(f"broadcast of {describe(tensor)} from rank {root}")
        for part in _parts(tensor):
            found = self.client.gather(what, _bytes(part) if self.rank == root else b"")
            if root not in found:  # if the root is lost, the first of the others takes its place
                root = min(found)
                found = self.client.gather(f"{what}, which is lost", _bytes(part) if self.rank == root else b"")
            if self.rank != root:
                part.copy_(_like(found[root], part))

    def barrier(self, what: str = "hocket.barrier()") -> None:
        self.client.gather(what, b"")

    def meet(self, number: int, payload: int, what: Description) -> list[int]:
        said = what if isinstance(what, str) else what()
        found = self.client.gather(f"{said} ({number & 0xFFFFFFFF:x})", str(payload).encode())
        return [int(data) for data in found.values()]

    def gather_bytes(self, data: bytes) -> list[bytes]:
        return list(self.client.gather(named("an exchange of descriptions"), data).values())

    def exchange(self, layout: Layout, *, background: bool = False, turns: int = 1, private: bool = True) -> Exchange:
        raise StrategyError(
            "this job has servers, and the strategy uses none: leave out --servers, or use --strategy ps"
        )

    def leave(self, failed: bool) -> None:
        self.client.close()

    def _gather(self, what: str, flat: torch.Tensor) -> dict[int, bytes]:
        return self.client.gather(what, _bytes(flat))


def _parts(tensor: torch.Tensor) -> list[torch.Tensor]:
    flat = tensor.view(-1)
    return list(flat.split(max(1, _AT_ONCE // tensor.element_size()))) if flat.numel() else []


def _bytes(flat: torch.Tensor) -> bytes:
    return bytes(view_bytes(flat.detach().contiguous()))


def _like(data: bytes, tensor: torch.Tensor) -> torch.Tensor:
    if not data:
        return tensor.new_empty(0)
    return torch.frombuffer(bytearray(data), dtype=tensor.dtype)
