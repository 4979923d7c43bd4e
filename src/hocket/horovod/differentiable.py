"""The collectives through which gradients flow: what comes back is the collective's own transpose."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from hocket.horovod import operations
from hocket.horovod.compression import Compression
from hocket.horovod.operations import Average, Sum, Tensors, synchronize
from hocket.horovod.process_sets import ProcessSet, global_process_set


class _Allreduce(torch.autograd.Function):
    """A sum (or mean …) of each of several tensors; its gradient is that of all ranks, combined in the same way."""

    @staticmethod
    def forward(ctx: Any, name: str | None, how: dict[str, Any], grouped: bool, *tensors: torch.Tensor) -> Any:
        ctx.name, ctx.how, ctx.grouped = name, how, grouped
        if not grouped:
            return synchronize(operations.allreduce_async(tensors[0], name=name, **how))
        return tuple(synchronize(operations.grouped_allreduce_async(tensors, name=name, **how)))

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> Any:
        name = None if ctx.name is None else f"{ctx.name}.grad"
        if not ctx.grouped:
            found = [synchronize(operations.allreduce_async(gradients[0], name=name, **ctx.how))]
        else:
            found = synchronize(operations.grouped_allreduce_async(gradients, name=name, **ctx.how))
        return None, None, None, *found


def allreduce(
    tensor: torch.Tensor, average: bool | None = None, name: str | None = None, compression: Any = Compression.none,
    op: int | None = None, prescale_factor: float = 1.0, postscale_factor: float = 1.0,
    process_set: ProcessSet = global_process_set,
) -> torch.Tensor:  # fmt: skip
    """The average (or sum, Adasum, minimum, maximum, product) of a tensor over all ranks, as a new tensor.

    Args:
        tensor: Of the same shape and type on all ranks that submit this name.
        average: Horovod's older way to say ``op``.
        name: By which ranks find each other's; by default, calls without a name are matched in their order.
        compression: What the tensor is turned into before it travels.
        op: ``Average`` by default.
        prescale_factor: Multiplies the tensor before it travels.
        postscale_factor: Multiplies the result.
        process_set: The ranks that take part.
    """
    op = operations.chosen(op, average)
    how = {"op": op, "prescale_factor": prescale_factor, "postscale_factor": postscale_factor}
    packed, kept = compression.compress(tensor)
    found = _Allreduce.apply(name, {**how, "process_set": process_set}, False, packed)  # type: ignore[no-untyped-call]
    result = compression.decompress(found, kept)
    assert isinstance(result, torch.Tensor)
    return result


def grouped_allreduce(
    tensors: Tensors, average: bool | None = None, name: str | None = None, compression: Any = Compression.none,
    op: int | None = None, prescale_factor: float = 1.0, postscale_factor: float = 1.0,
    process_set: ProcessSet = global_process_set,
) -> list[torch.Tensor]:  # fmt: skip
    """As ``allreduce`` of each of several tensors, all of them at once or none."""
    op = operations.chosen(op, average)
    how = {"op": op, "prescale_factor": prescale_factor, "postscale_factor": postscale_factor}
    packed = [compression.compress(tensor) for tensor in tensors]
    found = _Allreduce.apply(name, {**how, "process_set": process_set}, True, *(each for each, _ in packed))  # type: ignore[no-untyped-call]
    return [compression.decompress(each, kept) for each, (_, kept) in zip(found, packed, strict=True)]


class _Allgather(torch.autograd.Function):
    """All ranks' rows; the gradient of a rank's rows is the sum of what all ranks have for them."""

    @staticmethod
    def forward(ctx: Any, name: str | None, process_set: ProcessSet, *tensors: torch.Tensor) -> Any:
        ctx.process_set = process_set
        ctx.rows = [len(tensor) if tensor.dim() else 1 for tensor in tensors]
        ctx.shapes = [tensor.shape for tensor in tensors]
        return tuple(synchronize(operations.grouped_allgather_async(tensors, name, process_set)))

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> Any:
        summed = synchronize(operations.grouped_allreduce_async(gradients, op=Sum, process_set=ctx.process_set))
        rows = torch.tensor([ctx.rows])
        everyone = synchronize(operations.allgather_async(rows, process_set=ctx.process_set))
        before = everyone[: ctx.process_set.rank()].sum(0).tolist()
        parts = [
            total.narrow(0, start, count).reshape(shape)
            for total, start, count, shape in zip(summed, before, ctx.rows, ctx.shapes, strict=True)
        ]
        return None, None, *parts


def allgather(
    tensor: torch.Tensor, name: str | None = None, process_set: ProcessSet = global_process_set
) -> torch.Tensor:
    """The rows of all ranks' tensors, one after the other; numbers of rows may differ."""
    return grouped_allgather([tensor], name, process_set)[0]


def grouped_allgather(
    tensors: Tensors, name: str | None = None, process_set: ProcessSet = global_process_set
) -> list[torch.Tensor]:
    """As ``allgather`` of each of several tensors, all of them at once or none."""
    return list(_Allgather.apply(name, process_set, *tensors))  # type: ignore[no-untyped-call]


class _Broadcast(torch.autograd.Function):
    """The tensor of one rank; its gradient is the sum of all ranks', and zero elsewhere."""

    @staticmethod
    def forward(ctx: Any, tensor: torch.Tensor, root_rank: int, name: str | None, process_set: ProcessSet) -> Any:
        ctx.root_rank, ctx.process_set = root_rank, process_set
        return synchronize(operations.broadcast_async(tensor, root_rank, name, process_set))

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> Any:
        summed = synchronize(operations.allreduce_async(gradients[0], op=Sum, process_set=ctx.process_set))
        members = ctx.process_set.ranks
        is_root = members[ctx.process_set.rank()] == ctx.root_rank
        return summed if is_root else torch.zeros_like(summed), None, None, None


def broadcast(
    tensor: torch.Tensor, root_rank: int, name: str | None = None, process_set: ProcessSet = global_process_set
) -> torch.Tensor:
    """The tensor of ``root_rank``, a rank of the job, as a new one."""
    found: torch.Tensor = _Broadcast.apply(tensor, root_rank, name, process_set)  # type: ignore[no-untyped-call]
    return found


class _Alltoall(torch.autograd.Function):
    """Rows to every rank; gradients go back the same way."""

    @staticmethod
    def forward(ctx: Any, tensor: torch.Tensor, splits: Any, name: str | None, process_set: ProcessSet) -> Any:
        found, received = synchronize(operations.alltoall_async(tensor, splits, name, process_set))
        ctx.process_set, ctx.received = process_set, received
        ctx.mark_non_differentiable(received)
        return found, received

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> Any:
        back, _ = synchronize(operations.alltoall_async(gradients[0], ctx.received, process_set=ctx.process_set))
        return back, None, None, None


def alltoall(
    tensor: torch.Tensor, splits: torch.Tensor | Sequence[int] | None = None, name: str | None = None,
    process_set: ProcessSet = global_process_set,
) -> Any:  # fmt: skip
    """Send rows to every rank, and return the rows that came from every rank, in their order.

    Args:
        tensor: The rows for rank 0, then those for rank 1, …
        splits: How many rows each rank gets; then how many came from each is returned, too. By default all get as many.
        name: See ``allreduce``.
        process_set: The ranks that take part.
    """
    found, received = _Alltoall.apply(tensor, splits, name, process_set)  # type: ignore[no-untyped-call]
    return found if splits is None else (found, received)


class _Reducescatter(torch.autograd.Function):
    """A rank's rows of a sum or mean; its gradient is what each rank has for its rows."""

    @staticmethod
    def forward(ctx: Any, name: str | None, how: dict[str, Any], *tensors: torch.Tensor) -> Any:
        ctx.how, ctx.rows = how, [len(tensor) for tensor in tensors]
        return tuple(synchronize(operations.grouped_reducescatter_async(tensors, name=name, **how)))

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> Any:
        process_set = ctx.how["process_set"]
        if ctx.how["op"] not in (Average, Sum):
            raise RuntimeError("reducescatter is differentiable with op=hvd.Average and hvd.Sum")
        factor = ctx.how["prescale_factor"] * ctx.how["postscale_factor"]
        factor /= process_set.size() if ctx.how["op"] == Average else 1
        everyone = synchronize(operations.grouped_allgather_async(gradients, process_set=process_set))
        return None, None, *(each * factor if factor != 1 else each for each in everyone)


def reducescatter(
    tensor: torch.Tensor, name: str | None = None, compression: Any = Compression.none, op: int = Average,
    process_set: ProcessSet = global_process_set, prescale_factor: float = 1.0, postscale_factor: float = 1.0,
) -> torch.Tensor:  # fmt: skip
    """This rank's rows of the average (or sum …) over all ranks; the first ranks get one more if need be."""
    return grouped_reducescatter([tensor], name, compression, op, process_set, prescale_factor, postscale_factor)[0]


def grouped_reducescatter(
    tensors: Tensors, name: str | None = None, compression: Any = Compression.none, op: int = Average,
    process_set: ProcessSet = global_process_set, prescale_factor: float = 1.0, postscale_factor: float = 1.0,
) -> list[torch.Tensor]:  # fmt: skip
    """As ``reducescatter`` of each of several tensors, all of them at once or none."""
    packed = [compression.compress(tensor) for tensor in tensors]
    how = {"op": op, "prescale_factor": prescale_factor, "postscale_factor": postscale_factor}
    found = _Reducescatter.apply(name, {**how, "process_set": process_set}, *(each for each, _ in packed))  # type: ignore[no-untyped-call]
    return [compression.decompress(each, kept) for each, (_, kept) in zip(found, packed, strict=True)]
