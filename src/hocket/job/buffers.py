"""The buffers of distributed models (batch norm's running statistics) while they train.

Buffers start as rank 0's, are each worker's own during an epoch, and are averaged when a training loop has come to the
end of its loader: evaluation then sees the same model on every rank, and what rank 0 saves has seen all the data.
"""

from __future__ import annotations

import zlib
from collections.abc import Callable, Iterable

import torch
from torch import nn

from hocket.comm.communicator import Communicator
from hocket.job.randomness import RandomState
from hocket.transport.tensor_bytes import view_bytes


def remember(models: Iterable[nn.Module]) -> Callable[[], None]:
    """A function that puts buffers and random numbers back to what they are now: a repeated batch leaves no trace.

    Modules that are ``synchronised`` are left out: what they learn in such a step comes from other ranks.
    """
    modules = {module for model in models for module in model.modules() if not getattr(module, "synchronised", False)}
    kept = [(b, b.detach().clone()) for module in modules for b in module._buffers.values() if b is not None]
    random = RandomState.capture()

    @torch.no_grad()
    def restore() -> None:
        random.restore()
        for buffer, value in kept:
            buffer.copy_(value)

    return restore


def fingerprint(tensors: Iterable[torch.Tensor]) -> int:
    """A number of 32 bits that differs, almost surely, if any bit of the tensors does.

    Large tensors are first added up row by row, as integers, on their own device, at the speed of its memory.
    """
    number = 0
    for tensor in tensors:
        dense = tensor.detach().contiguous()
        if dense.nbytes >= _LARGE:
            data = dense.view(-1).view(torch.uint8)
            data = data.clone() if data.storage_offset() % 8 or data.data_ptr() % 8 else data
            rows = data.numel() // _ROW * _ROW
            sums = data[:rows].view(torch.int64).view(-1, _ROW // 8).sum(1)
            number = zlib.crc32(view_bytes(sums.cpu()), number)
            dense = data[rows:]
        number = zlib.crc32(view_bytes(dense.cpu()), number)
    return number


_ROW, _LARGE = 1 << 12, 1 << 15  # bytes of a row, and of a large tensor


def differ(communicator: Communicator, model: nn.Module) -> bool:
    """Whether the buffers of ``model`` are not the same on all ranks; collective if it has any."""
    buffers = list(model.buffers())
    if not buffers or communicator.size == 1:
        return False
    mine = torch.tensor([fingerprint(buffers)])
    return len(set(communicator.allgather(mine).view(-1).tolist())) > 1


@torch.no_grad()
def average(communicator: Communicator, model: nn.Module) -> None:
    """Give every rank the mean of the buffers, or rank 0's where a buffer has no mean; collective."""
    if not differ(communicator, model):
        return  # equal buffers stay as they are: their mean may be rounded
    for buffer in model.buffers():
        dense = buffer.detach().contiguous()
        if buffer.is_floating_point():
            communicator.allreduce(dense, "mean")
        else:
            communicator.broadcast(dense, 0)
        if dense.data_ptr() != buffer.data_ptr():
            buffer.copy_(dense)
