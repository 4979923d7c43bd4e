"""What a script gives to collectives, as tensors of the CPU: tensors of any device and layout, and NumPy arrays.

NumPy is never imported: a script that has arrays has imported it.
"""

from __future__ import annotations

import functools
import sys
from typing import Any

import torch

from hocket.comm.kernels import OPERATIONS, PAIRWISE
from hocket.errors import UsageError


class Given:
    """A tensor or an array that a script has given.

    Attributes:
        tensor: The same as a contiguous tensor of the CPU; not to be written to.

    Args:
        value: What the script has given.
        call: The script's call, for messages.
    """

    def __init__(self, value: Any, call: str) -> None:
        self._value, self._call = value, call
        self._is_array = not isinstance(value, torch.Tensor) and is_array(value)
        self.tensor = _read_array(value, call) if self._is_array else _read_tensor(value, call)

    @property
    def is_in_place(self) -> bool:
        """Whether ``tensor`` is the memory of what the script has given."""
        return not self._is_array and self._value.data_ptr() == self.tensor.data_ptr()

    def check_rows(self) -> None:
        """Raise if there is no first dimension."""
        if not self.tensor.dim():
            raise UsageError(f"{self._call} takes tensors with rows, and this one has no dimension: write t.view(1)")

    def like(self, result: torch.Tensor) -> Any:
        """A result as the script wants it: on the device of what it has given, or as an array."""
        if not self._is_array:
            return result if self._value.is_cpu else result.to(self._value.device)
        return result.numpy()[()] if isinstance(self._value, sys.modules["numpy"].generic) else result.numpy()

    def check_place_for(self, shape: torch.Size, dtype: torch.dtype) -> None:
        """Raise if a result of this kind cannot be written into what the script has given."""
        if (self.tensor.shape, self.tensor.dtype) != (shape, dtype):
            raise UsageError(
                f"{self._call}: out has {self.tensor.dtype}{list(self.tensor.shape)}, and the result is "
                f"{dtype}{list(shape)}: they must be equal"
            )
        if self._is_array and not (hasattr(self._value, "flags") and self._value.flags.writeable):
            raise UsageError(f"{self._call} writes into the array that it is given, and this one is read-only: copy it")

    def fill(self, result: torch.Tensor) -> Any:
        """Write a result into what the script has given, and return that."""
        if self._is_array:
            self._value[...] = result.numpy()
        else:
            with torch.no_grad():
                self._value.copy_(result)
        return self._value


def is_array(value: Any) -> bool:
    """Whether this is an array, or a scalar, of NumPy."""
    numpy = sys.modules.get("numpy")
    return numpy is not None and isinstance(value, (numpy.ndarray, numpy.generic))


def check_operation(operation: str, dtype: torch.dtype, call: str) -> None:
    """Raise if values of a type cannot be combined so."""
    if operation not in OPERATIONS:
        raise UsageError(f"{call}: operation {operation!r}: the choices are {', '.join(OPERATIONS)}")
    if operation == "mean" and not (dtype.is_floating_point or dtype.is_complex):
        raise UsageError(f"{call}: the mean of {dtype} is not exact: use operation='sum', or convert to a float type")
    if dtype.is_complex and operation in ("max", "min"):
        raise UsageError(f"{call}: complex numbers have no {operation}: use view_as_real(), or another operation")
    if not _combines(operation, dtype):
        raise UsageError(f"{call}: torch has no {operation} of {dtype}: convert to another type")


@functools.cache
def _combines(operation: str, dtype: torch.dtype) -> bool:
    try:
        one = torch.zeros(1, dtype=dtype)
        PAIRWISE["sum" if operation == "mean" else operation](one, one, out=one)
    except (RuntimeError, TypeError):
        return False
    return True


def _read_tensor(value: Any, call: str) -> torch.Tensor:
    if not isinstance(value, torch.Tensor):
        raise UsageError(
            f"{call} takes a tensor or a NumPy array, not {type(value).__name__}: write torch.tensor({_short(value)})"
        )
    if value.layout != torch.strided or value.is_meta or value.is_quantized:
        kind = "quantized" if value.is_quantized else f"{value.layout} on {value.device}"
        raise UsageError(f"{call} takes dense tensors with values, not {kind}")
    if value.is_cpu and value.is_contiguous() and not (value.is_conj() or value.is_neg()):
        return value.detach()
    return value.detach().resolve_conj().resolve_neg().to("cpu").contiguous()


def _read_array(value: Any, call: str) -> torch.Tensor:
    try:  # a copy: the array may be read-only, of the other byte order, or have negative strides
        return torch.from_numpy(value.astype(value.dtype.newbyteorder("="), order="C", copy=True)[...])
    except (TypeError, ValueError, RuntimeError) as error:
        raise UsageError(f"{call} takes arrays of numbers, not of {value.dtype}: {error}") from None


def _short(value: Any) -> str:
    return text if len(text := repr(value)) < 60 else "…"
