"""Collectives over shared memory: every rank writes a slot, then reads the others'.

Two ways. *One-phase*: one meeting, then every rank reduces all slots by itself; least latency, and least
traffic for two ranks. *Two-phase*: every rank reduces its own slice into one shared result, and a second
meeting publishes it; each byte is read about three times however many ranks there are.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence

import torch

from hocket.comm.algorithms.memory_reductions import ONE_PHASE_BYTES, SharedBuffer
from hocket.comm.alone import AloneCommunicator
from hocket.comm.bucket_layout import Bucket, Place, cut
from hocket.comm.channel import Channel
from hocket.comm.communicator import Communicator, describe, named, through_cpu
from hocket.comm.group_watch import HostWatch
from hocket.comm.kernels import reduce_into
from hocket.comm.tcp_group import TcpGroup
from hocket.transport.gate import signature
from hocket.transport.member_links import Links
from hocket.transport.shared_memory import SharedMemory
from hocket.transport.waiting import Description

_SCRATCH = 1 << 20  # bytes per slot of the memory for collectives by hand; larger tensors go through it in parts
_SCRATCH_PER_RANK = 1 << 17  # bytes of each part that every rank should have to reduce


class SharedCommunicator(Communicator):
    """The workers of one host, over shared memory."""

    way = "shared memory"

    def __init__(self, transport: SharedMemory) -> None:
        self.transport = transport
        self.rank, self.size = transport.rank, transport.size
        self._scratch: list[SharedBuffer] = []
        self._channels: list[Channel] = []
        self._groups: list[SharedCommunicator] = []
        self._scratch_bytes = _scratch_bytes(self.size)

    @property
    def memory(self) -> SharedMemory:
        return self.transport

    @property
    def waited(self) -> float:
        return self.transport.waited

    @through_cpu
    def allreduce(self, tensor: torch.Tensor, operation: str) -> None:
        what = named(f"allreduce of {describe(tensor)}, {operation}")
        one_phase = self.size == 2 or tensor.nbytes <= ONE_PHASE_BYTES
        for part in self._parts(tensor):
            buffer = self._reserve()
            slots = [_as(s[0], part) for s in buffer.slots]
            slots[self.rank].copy_(part)
            number = signature(what)
            self.transport.meet(number, 0, what)
            if one_phase:
                reduce_into(part, slots, operation)
                continue
            result = _as(buffer.results[0], part)
            start, end = cut(part.numel(), part.dtype, self.size)[self.rank]
            if end > start:
                reduce_into(result[start:end], [s[start:end] for s in slots], operation)
            self.transport.meet(number + 1, 0, what)
            part.copy_(result)

    @through_cpu
    def allgather(self, tensor: torch.Tensor) -> torch.Tensor:
        what = named(f"allgather of {describe(tensor)}")
        gathered = tensor.new_empty(self.size, tensor.numel())
        done = 0
        for part in self._parts(tensor):
            buffer = self._reserve()
            _as(buffer.mine[0], part).copy_(part)
            self.transport.meet(signature(what), 0, what)
            for row, slot in zip(gathered, buffer.slots, strict=True):
                row[done : done + part.numel()] = _as(slot[0], part)
            done += part.numel()
        return gathered.view(self.size, *tensor.shape)

    @through_cpu
    def broadcast(self, tensor: torch.Tensor, root: int) -> None:
        what = named(f"broadcast of {describe(tensor)} from rank {root}")
        for part in self._parts(tensor):
            buffer = self._reserve()
            if self.rank == root:
                _as(buffer.mine[0], part).copy_(part)
            self.transport.meet(signature(what), 0, what)
            if self.rank != root:
                part.copy_(_as(buffer.slots[root][0], part))

    def barrier(self, what: str = "hocket.barrier()") -> None:
        self.transport.meet(signature(what), 0, what)

    def meet(self, number: int, payload: int, what: Description) -> list[int]:
        return self.transport.meet(number, payload, what)

    def gather_bytes(self, data: bytes) -> list[bytes]:
        what, room = named("an exchange of descriptions"), self._scratch_bytes
        rows = self._reserve().rows
        rows[self.rank][: min(len(data), room)] = data[:room]
        lengths = self.transport.meet(signature(what), len(data), what)
        if max(lengths) <= room:
            return [bytes(row[:length]) for row, length in zip(rows, lengths, strict=False)]
        padded = torch.frombuffer(bytearray(data.ljust(max(*lengths, 1), b"\0")), dtype=torch.uint8)
        gathered = self.allgather(padded)
        return [bytes(row[:length].tolist()) for row, length in zip(gathered, lengths, strict=True)]

    def buffer(self, buckets: list[Bucket], purpose: str, *, result: bool) -> SharedBuffer:
        """Slots (and a result) in memory that all ranks map."""
        return SharedBuffer(self.transport, buckets, purpose, result=result)

    def one_copy(
        self, dtype: torch.dtype, count: int, places: Sequence[Place], purpose: str
    ) -> tuple[torch.Tensor, list[torch.Tensor]]:
        """``count`` elements, all zero, that every rank maps: flat, and as one tensor for each of ``places``.

        Those tensors have storages of their own, so that ``torch.save`` writes each in its plain size.
        """
        area = self.transport.allocate(count * dtype.itemsize, purpose)
        tensors = [area.tensor(p.start * dtype.itemsize, p.count, dtype).as_strided(p.shape, p.stride) for p in places]
        return area.tensor(0, count, dtype), tensors

    def open_channel(self, name: str, ranks: Sequence[int]) -> Channel:
        gate, rank = self.transport.gate, ranks.index(self.rank)
        watch = HostWatch(gate, ranks)
        sockets = [_socket(gate.secret, name, each) for each in range(len(ranks))]
        links = Links(name, rank, len(ranks), gate.secret, "", lambda _: False, socket=sockets[rank])
        everyone = [{"socket": each} for each in sockets]
        group = TcpGroup.connect_later(links, watch, lambda *_: everyone, watch.look_for_all)
        self._channels.append(group)
        return group

    def open_group(self, name: str, ranks: Sequence[int]) -> Communicator | None:
        if len(ranks) == 1:
            return AloneCommunicator() if self.rank in ranks else None
        area = SharedBuffer.nbytes([_scratch_bucket(len(ranks))], len(ranks), result=True)
        transport = self.transport.split(ranks, [area, area])
        if transport is None:
            return None
        self._groups.append(SharedCommunicator(transport))
        return self._groups[-1]

    def leave(self, failed: bool) -> None:
        for group in self._groups:
            group.leave(failed)
        for channel in self._channels:
            channel.close()
        self._channels.clear()
        self.transport.leave(failed)

    def _parts(self, tensor: torch.Tensor) -> Sequence[torch.Tensor]:
        """``tensor`` flat, in parts that fit into the scratch memory (and, not by chance, into the cache)."""
        flat = tensor.view(-1)
        most = self._scratch_bytes
        return flat.split(most // tensor.dtype.itemsize) if flat.nbytes > most else (flat,)

    def _reserve(self) -> SharedBuffer:
        """The scratch memory for the next meeting; two alternate, so that a fast rank does not overwrite one."""
        if not self._scratch:
            bucket = _scratch_bucket(self.size)
            self._scratch = [self.buffer([bucket], "collectives", result=True) for _ in range(2)]
        self._scratch.reverse()
        return self._scratch[0]


def _scratch_bytes(size: int) -> int:
    """Bytes per slot of the memory for collectives by hand of so many ranks."""
    return max(_SCRATCH, size * _SCRATCH_PER_RANK)


def _scratch_bucket(size: int) -> Bucket:
    return Bucket(torch.uint8, _scratch_bytes(size))


def _socket(secret: bytes, name: str, member: int) -> str:
    """The name of a member's socket, which only those know who have the secret."""
    return f"hocket-{hashlib.blake2b(f'{name} {member}'.encode(), key=secret, digest_size=16).hexdigest()}"


def _as(raw: torch.Tensor, like: torch.Tensor) -> torch.Tensor:
    """The first bytes of ``raw`` as a flat tensor with the elements of ``like``."""
    return raw[: like.nbytes].view(like.dtype)
