"""Carries out what all ranks of a process set have decided: small things of one kind together, as one collective."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

import torch

from hocket.comm import group_operations
from hocket.comm.channel import Channel
from hocket.comm.communicator import Communicator
from hocket.comm.group_operations import Party
from hocket.comm.kernels import NARROW
from hocket.horovod.adasum import adasum
from hocket.horovod.negotiation import Decision, Request
from hocket.horovod.operation import Operation

Pair = tuple[Decision, Operation | None]
"""A decision, and what this rank has submitted; None if it has joined, and gives zeros."""

FUSION = 64 << 20
"""Bytes that travel as one, at most, by default."""


class Execution:
    """The collectives of one process set.

    Args:
        communicator: Its ranks.
        threshold: The most bytes that travel as one; 0 if each tensor travels alone.
    """

    def __init__(self, communicator: Communicator, threshold: int = FUSION) -> None:
        self._communicator, self._threshold = communicator, threshold
        self.rank, self.size = communicator.rank, communicator.size
        self._channel: Channel | None = None
        self._room: dict[torch.dtype, torch.Tensor] = {}
        self._ways: dict[str, Callable[[Sequence[Pair]], None]] = {
            "allreduce": self._allreduce,
            "reducescatter": self._allreduce,
            "allgather": self._allgather,
            "broadcast": self._broadcast,
            "alltoall": self._alltoall,
            "barrier": lambda _: None,
        }

    def carry_out(self, pairs: Sequence[Pair]) -> None:
        """Do what was decided; the same on all ranks, who all call this. Sets the results."""
        for batch in self._batches(pairs):
            self._ways[batch[0][0].request.kind](batch)

    def close(self) -> None:
        """Give back what only the collectives need."""
        if self._channel is not None:
            self._channel.close()
        self._room.clear()

    def _batches(self, pairs: Sequence[Pair]) -> Iterator[list[Pair]]:
        """What can travel as one."""
        by_way: dict[tuple[object, ...], list[Pair]] = {}
        for pair in pairs:
            request = pair[0].request
            key = request.kind, request.options
            by_way.setdefault(key, []).append(pair)
        for batch in by_way.values():
            fits: list[Pair] = []
            nbytes = 0
            for pair in batch:
                more = _nbytes(pair[0])
                if fits and (nbytes + more > self._threshold or pair[0].request.kind == "alltoall"):
                    yield fits
                    fits, nbytes = [], 0
                fits.append(pair)
                nbytes += more
            yield fits

    def _allreduce(self, batch: Sequence[Pair]) -> None:
        how, before, after = batch[0][0].request.options
        tensors = [tensor for pair in batch for tensor in _inputs(pair)]
        parts: list[torch.Tensor] = list(tensors)
        for dtype in dict.fromkeys(tensor.dtype for tensor in tensors):
            places = [place for place, tensor in enumerate(tensors) if tensor.dtype == dtype]
            whole = self._gather_up([tensors[place] for place in places], batch)
            combine = self._adasum if how == "adasum" else self._reduce
            whole = combine(whole, [tensors[place].numel() for place in places], how, before, after)
            for place, part in zip(places, whole.split([tensors[place].numel() for place in places]), strict=True):
                parts[place] = part
        self._hand_out(batch, parts)

    def _gather_up(self, tensors: Sequence[torch.Tensor], batch: Sequence[Pair]) -> torch.Tensor:
        """All elements, one after the other, in memory of the CPU that may be written to."""
        flats = [tensor.detach().reshape(-1) for tensor in tensors]
        if len(flats) == 1 and not flats[0].is_cuda:
            operation = next((each for _, each in batch if each is not None), None)
            is_own = len(batch) == 1 and operation is not None and operation.is_own(flats[0])
            return flats[0] if is_own else flats[0].clone()
        devices = {flat.device for flat in flats}
        if devices != {torch.device("cpu")}:
            return torch.cat(flats).cpu() if len(devices) == 1 else torch.cat([flat.cpu() for flat in flats])
        count, dtype = sum(flat.numel() for flat in flats), flats[0].dtype
        room = self._room.get(dtype)
        if room is None or room.numel() < count:
            room = self._room[dtype] = torch.empty(count, dtype=dtype)
        return torch.cat(flats, out=room[:count])

    def _reduce(self, whole: torch.Tensor, _: Sequence[int], how: str, before: float, after: float) -> torch.Tensor:
        """The result over all ranks; may be in ``whole``. Averages divide by all ranks, those that have joined too."""
        dtype = whole.dtype
        is_exact = not (dtype.is_floating_point or dtype.is_complex)
        if is_exact and how == "mean":
            how, after = "sum", after / self.size
        wide = whole
        if dtype is torch.bool and after != 1.0:
            wide = whole.to(torch.int64)
        if before != 1.0:
            wide = _scaled(wide, before)
        if wide.numel():
            self._communicator.allreduce(wide, how)
        if after != 1.0:
            wide = _scaled(wide, after)
        return wide if wide.dtype == dtype else wide.to(dtype)

    def _hand_out(self, batch: Sequence[Pair], parts: Sequence[torch.Tensor]) -> None:
        """Give each operation its results."""
        left, targets, sources = iter(parts), list[torch.Tensor](), list[torch.Tensor]()
        for decision, operation in batch:
            outputs: list[torch.Tensor] = []
            for index, shape in enumerate(decision.request.shapes):
                part = next(left).view(shape)
                if operation is None:
                    continue
                if decision.request.kind == "reducescatter":
                    start, end = rows_of(self.rank, self.size, shape[0])
                    part = part[start:end]
                output = operation.output(index, part.shape)
                if output.data_ptr() != part.data_ptr():
                    targets.append(output)
                    sources.append(part)
                outputs.append(output)
            if operation is not None:
                operation.result = outputs
        if targets:
            torch._foreach_copy_(targets, sources)

    def _adasum(self, whole: torch.Tensor, sizes: Sequence[int], _: str, before: float, after: float) -> torch.Tensor:
        everyone = self._communicator.allgather(_scaled(whole, before) if before != 1.0 else whole)
        each = [adasum(parts) for parts in zip(*(row.split(list(sizes)) for row in everyone), strict=True)]
        combined = torch.cat(each)  # each by itself: their sizes differ by much
        return _scaled(combined, after) if after != 1.0 else combined

    def _broadcast(self, batch: Sequence[Pair]) -> None:
        root = batch[0][0].request.options[0]
        tensors = [tensor for pair in batch for tensor in _inputs(pair)]
        mine = self.rank == root
        whole = _bytes_of(tensors) if mine else torch.empty(sum(map(_size, tensors)), dtype=torch.uint8)
        if whole.numel():
            self._communicator.broadcast(whole, root)
        offset = 0
        for _, operation in batch:
            assert operation is not None
            outputs = []
            for index, tensor in enumerate(operation.tensors):
                output = operation.output(index, tensor.shape)
                part = whole[offset : offset + _size(tensor)]
                if not mine or not operation.in_place:
                    output.copy_(_typed(part, tensor.dtype).view(tensor.shape))
                offset += _size(tensor)
                outputs.append(output)
            operation.result = outputs

    def _allgather(self, batch: Sequence[Pair]) -> None:
        totals = [sum(_nbytes_of(_of(decision, rank)) for decision, _ in batch) for rank in range(self.size)]
        mine = torch.zeros(max(totals), dtype=torch.uint8)
        mine[: totals[self.rank]] = _bytes_of([tensor for pair in batch for tensor in _inputs(pair)])
        rows = self._communicator.allgather(mine) if max(totals) else mine.expand(self.size, 0)
        offsets = [0] * self.size
        for decision, operation in batch:
            assert operation is not None
            outputs = []
            for index, tensor in enumerate(operation.tensors):
                parts = []
                for rank in range(self.size):
                    shape = _of(decision, rank).shapes[index]
                    nbytes = _count(shape) * tensor.dtype.itemsize
                    part = rows[rank][offsets[rank] : offsets[rank] + nbytes]
                    parts.append(_typed(part, tensor.dtype).view(shape if shape else (1,)))
                    offsets[rank] += nbytes
                outputs.append(torch.cat(parts).to(tensor.device))
            operation.result = outputs

    def _alltoall(self, batch: Sequence[Pair]) -> None:
        ((decision, operation),) = batch
        assert operation is not None
        tensor, splits = operation.tensors[0].detach().cpu().contiguous(), decision.by_rank[self.rank]
        assert splits is not None
        if self.size == 1:
            operation.result = [tensor.clone(), torch.tensor(splits.splits, dtype=torch.int32)]
            return
        if self._channel is None:
            self._channel = self._communicator.open_channel("horovod", range(self.size))
        found: list[tuple[torch.Tensor, list[int]]] = []
        self._channel.run(
            lambda links: found.append(
                group_operations.alltoall(
                    Party(links, range(self.size), "", range(self.size)), tensor, list(splits.splits)
                )
            ),
            tensor.nbytes,
            decision.request.describe(),
        )
        ((came, received),) = found
        operation.result = [came.to(operation.tensors[0].device), torch.tensor(received, dtype=torch.int32)]


def rows_of(rank: int, size: int, rows: int) -> tuple[int, int]:
    """The rows of a rank after a reduce-scatter: the first ones get one more if they do not come out even."""
    each, more = divmod(rows, size)
    start = rank * each + min(rank, more)
    return start, start + each + (rank < more)


def _inputs(pair: Pair) -> Sequence[torch.Tensor]:
    """The tensors of this rank; zeros if it has joined."""
    decision, operation = pair
    if operation is not None:
        return operation.tensors
    request = decision.request
    return [
        torch.zeros(shape, dtype=getattr(torch, dtype))
        for shape, dtype in zip(request.shapes, request.dtypes, strict=True)
    ]


def _of(decision: Decision, rank: int) -> Request:
    return decision.by_rank[rank] or decision.request


def _scaled(tensor: torch.Tensor, factor: float) -> torch.Tensor:
    """Multiplied; numbers without a fraction lose theirs."""
    if tensor.dtype.is_floating_point or tensor.dtype.is_complex:
        return tensor.mul_(factor) if tensor.dtype not in NARROW else tensor.copy_(tensor.float() * factor)
    return (tensor.double() * factor).to(tensor.dtype)


def _count(shape: Sequence[int]) -> int:
    count = 1
    for size in shape:
        count *= size
    return count


def _size(tensor: torch.Tensor) -> int:
    return tensor.numel() * tensor.dtype.itemsize


def _nbytes_of(request: Request) -> int:
    sizes = zip(request.shapes, request.dtypes, strict=True)
    return sum(_count(shape) * getattr(torch, dtype).itemsize for shape, dtype in sizes)


def _nbytes(decision: Decision) -> int:
    """The most bytes that a rank has."""
    return max(_nbytes_of(request) for request in (decision.request, *decision.by_rank) if request is not None)


def _bytes_of(tensors: Sequence[torch.Tensor]) -> torch.Tensor:
    """The contents of tensors, one after the other, on the CPU."""
    parts = [tensor.detach().reshape(-1).view(torch.uint8).cpu() for tensor in tensors if tensor.numel()]
    return torch.cat(parts) if parts else torch.empty(0, dtype=torch.uint8)


def _typed(part: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """Bytes, at any place in memory, as a flat tensor."""
    if part.storage_offset() % dtype.itemsize:
        part = part.clone()
    return part.view(dtype)
