"""The collectives that a script calls by hand."""

from __future__ import annotations

import torch

from hocket import spans
from hocket.comm.kernels import OPERATIONS
from hocket.errors import UsageError
from hocket.job.worker import meeting, together


@together("hocket.allreduce()")
def allreduce(tensor: torch.Tensor, operation: str = "mean", *, out: torch.Tensor | None = None) -> torch.Tensor:
    """The mean (or sum, max, min, product) of ``tensor`` over all ranks; every rank must call it.

    Args:
        tensor: Same shape and type on every rank; not changed.
        operation: ``mean``, ``sum``, ``max``, ``min`` or ``product``.
        out: Where to put the result instead of a new tensor; may be ``tensor`` itself.
    """
    if operation not in OPERATIONS:
        raise UsageError(f"allreduce operation {operation!r}: the choices are {', '.join(OPERATIONS)}")
    _check(tensor)
    if operation == "mean" and not tensor.is_floating_point():
        raise UsageError(f"the mean of {tensor.dtype} is not exact: use operation='sum', or convert to a float type")
    if out is not None and (out.shape != tensor.shape or out.dtype != tensor.dtype):
        raise UsageError(
            f"out has {out.dtype}{list(out.shape)}, the tensor {tensor.dtype}{list(tensor.shape)}: they must be equal"
        )
    if out is not None and out.is_contiguous():
        if out is not tensor:
            out.copy_(tensor)
        with spans.span(spans.EXCHANGE, "hocket.allreduce()"):
            meeting().communicator.allreduce(out.detach(), operation)
        return out
    result = tensor.detach().clone(memory_format=torch.contiguous_format)
    with spans.span(spans.EXCHANGE, "hocket.allreduce()"):
        meeting().communicator.allreduce(result, operation)
    return result if out is None else out.copy_(result)


@together("hocket.allgather()")
def allgather(tensor: torch.Tensor) -> torch.Tensor:
    """The tensors of all ranks, stacked in a new first dimension; every rank must call it, with the same shape."""
    _check(tensor)
    with spans.span(spans.EXCHANGE, "hocket.allgather()"):
        return meeting().communicator.allgather(tensor.detach().contiguous())


@together("hocket.broadcast()")
def broadcast(tensor: torch.Tensor, root: int = 0) -> torch.Tensor:
    """Replace ``tensor``, in place, by that of rank ``root``, and return it; every rank must call it."""
    _check(tensor)
    worker = meeting()
    if not 0 <= root < worker.config.size:
        raise UsageError(f"broadcast from rank {root}, but there are ranks 0 to {worker.config.size - 1}")
    with torch.no_grad():
        dense = tensor.detach().contiguous()
        with spans.span(spans.EXCHANGE, "hocket.broadcast()"):
            worker.communicator.broadcast(dense, root)
        if dense.data_ptr() != tensor.data_ptr():
            tensor.copy_(dense)
    return tensor


@together("hocket.barrier()")
def barrier() -> None:
    """Wait until every rank has called this."""
    with spans.span(spans.WAIT, "hocket.barrier()"):
        meeting().communicator.barrier()


def _check(tensor: torch.Tensor) -> None:
    if not isinstance(tensor, torch.Tensor):
        raise UsageError(f"collectives take tensors, not {type(tensor).__name__}: write torch.tensor({tensor!r})")
    if tensor.layout != torch.strided or tensor.device.type == "meta":
        raise UsageError(f"collectives take dense tensors with values, not {tensor.layout} on {tensor.device}")
