"""The memory of tensors as bytes, to be sent from and received into; without numpy, which need not be installed."""

from __future__ import annotations

import ctypes
import functools
from collections.abc import Iterable
from typing import Any

import torch


def as_bytes(tensors: Iterable[torch.Tensor]) -> list[memoryview]:
    """The memory of each tensor that is not empty."""
    return [view_bytes(tensor) for tensor in tensors if tensor.numel()]


def view_bytes(tensor: torch.Tensor) -> memoryview:
    """The memory of a contiguous tensor of the CPU, which lives as long as the view."""
    if not tensor.is_contiguous() or tensor.device.type != "cpu":
        raise ValueError(f"bytes of a tensor that is on {tensor.device} or not contiguous")
    if not tensor.numel():
        return memoryview(b"")
    memory: Any = _array(tensor.nbytes).from_address(tensor.data_ptr())
    memory.owner = tensor
    return memoryview(memory).cast("B")


@functools.lru_cache(maxsize=1024)
def _array(nbytes: int) -> type[ctypes.Array[ctypes.c_ubyte]]:
    """The type of an array of bytes; cached, because making a type takes far longer than using it."""
    return ctypes.c_ubyte * nbytes
