"""Tensors in a file, in the safetensors format.

Files are read by the safetensors library. They are written here, because a checkpoint is written while the script
trains: from a copy that is laid out as the file will be, past the page cache where the system allows it (filling the
cache would take many times the processor time of the copy), and without holding the interpreter's lock.
"""

from __future__ import annotations

import errno
import fcntl
import json
import mmap
import os
import zlib
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from hocket.errors import UsageError

_TYPES = {
    torch.float64: "F64", torch.float32: "F32", torch.float16: "F16", torch.bfloat16: "BF16", torch.int64: "I64",
    torch.int32: "I32", torch.int16: "I16", torch.int8: "I8", torch.uint8: "U8", torch.bool: "BOOL",
    torch.uint16: "U16", torch.uint32: "U32", torch.uint64: "U64", torch.complex64: "C64",
    torch.float8_e4m3fn: "F8_E4M3", torch.float8_e5m2: "F8_E5M2",
}  # fmt: skip
_BY_NAME = {name: dtype for dtype, name in _TYPES.items()}
_BLOCK = 4096  # bytes of a block that goes past the page cache
_CHUNK = 1 << 22
_METADATA = "hocket"

Kind = tuple[torch.dtype, list[int]]
"""Type and shape of a tensor."""


@dataclass(frozen=True)
class Written:
    """The size and checksum of an intact file."""

    nbytes: int
    crc32: int


class Image:
    """Memory laid out as a file with the tensors that are ``described``; it can be filled and written repeatedly."""

    def __init__(self, described: tuple[tuple[str, torch.dtype, torch.Size], ...]) -> None:
        self.described = described
        # Wide types first: then every tensor is aligned, without the holes that the format forbids.
        order = sorted(range(len(described)), key=lambda i: -described[i][1].itemsize)
        self._entries: dict[str, Any] = {}
        end = 0
        for i in order:
            name, dtype, shape = described[i]
            begin, end = end, end + shape.numel() * dtype.itemsize
            self._entries[name] = {"dtype": _TYPES[dtype], "shape": list(shape), "data_offsets": [begin, end]}
        self._nbytes = end
        self._header = json.dumps(self._entries, separators=(",", ":"))[1:]
        self._memory = mmap.mmap(-1, max(_blocks(end), _BLOCK))
        self._views = [self._view(*item) for item in described]

    def _view(self, name: str, dtype: torch.dtype, shape: torch.Size) -> torch.Tensor:
        if not shape.numel():
            return torch.empty(shape, dtype=dtype)
        begin = self._entries[name]["data_offsets"][0]
        return torch.frombuffer(self._memory, dtype=dtype, count=shape.numel(), offset=begin).view(shape)

    @torch.no_grad()
    def fill(self, tensors: Iterable[torch.Tensor]) -> None:
        """Copy ``tensors``, in the order in which they were described."""
        tensors = list(tensors)
        if tensors:
            torch._foreach_copy_(self._views, tensors)

    def write(self, path: Path, metadata: str) -> Written:
        """Write the file and flush it to the disk."""
        begin = self._begin(metadata)
        start = mmap.mmap(-1, len(begin))
        start[:] = begin
        size = len(start) + self._nbytes
        descriptor = _open(path)
        try:
            crc = _write(descriptor, memoryview(start), len(start), 0)
            crc = _write(descriptor, memoryview(self._memory), self._nbytes, crc)
            os.ftruncate(descriptor, size)
            os.fsync(descriptor)
        finally:
            os.close(descriptor)
        return Written(size, crc)

    def content(self, metadata: str) -> torch.Tensor:
        """The bytes of the file, to be written elsewhere."""
        return torch.frombuffer(bytearray(self._begin(metadata) + self._memory[: self._nbytes]), dtype=torch.uint8)

    def _begin(self, metadata: str) -> bytes:
        """The header, which comes before the tensors."""
        own = json.dumps({"__metadata__": {_METADATA: metadata}})[:-1]
        header = (own + ("," if self._entries else "") + self._header).encode()
        # Padded with spaces, so that the data begins at a block.
        header = header.ljust(_blocks(len(header) + 8) - 8)
        return len(header).to_bytes(8, "little") + header


def check(tensors: Mapping[str, torch.Tensor]) -> None:
    """Raise if some of ``tensors`` cannot be in a file."""
    for name, tensor in tensors.items():
        if tensor.dtype not in _TYPES:
            raise UsageError(f"{name} has type {tensor.dtype}, which safetensors does not know: convert it")
        if tensor.layout != torch.strided or tensor.is_quantized:
            raise UsageError(f"{name} is a sparse or quantized tensor, which cannot be stored: make it dense")


def describe(tensors: Mapping[str, torch.Tensor]) -> tuple[tuple[str, torch.dtype, torch.Size], ...]:
    """The description from which an image for ``tensors`` is made."""
    return tuple((name, tensor.dtype, tensor.shape) for name, tensor in tensors.items())


def name_type(dtype: torch.dtype) -> str:
    """What the format calls a type."""
    return _TYPES[dtype]


def find_type(name: str) -> torch.dtype:
    """The type that the format calls ``name``."""
    return _BY_NAME[name]


def measure(path: Path) -> Written:
    """The size and checksum of a file."""
    crc, nbytes = 0, 0
    with path.open("rb") as file:
        while chunk := file.read(_CHUNK):
            crc, nbytes = zlib.crc32(chunk, crc), nbytes + len(chunk)
    return Written(nbytes, crc)


class TensorFile:
    """A file of tensors that is read."""

    def __init__(self, path: Path) -> None:
        from safetensors import safe_open

        opened: Any = safe_open
        self._file = opened(path, framework="pt")
        self.metadata: str = (self._file.metadata() or {}).get(_METADATA, "null")
        slices = {name: self._file.get_slice(name) for name in self._file.keys()}  # noqa: SIM118 - no dictionary
        self.kinds: dict[str, Kind] = {
            name: (find_type(part.get_dtype()), list(part.get_shape())) for name, part in slices.items()
        }

    def read(self, name: str) -> torch.Tensor:
        """Read a tensor into memory of its own."""
        tensor: torch.Tensor = self._file.get_tensor(name)
        return tensor.clone()


def _blocks(nbytes: int) -> int:
    return -(-nbytes // _BLOCK) * _BLOCK


def _open(path: Path) -> int:
    flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL
    if hasattr(os, "O_DIRECT"):
        try:
            return os.open(path, flags | os.O_DIRECT, 0o666)
        except OSError as error:
            if error.errno != errno.EINVAL:
                raise
            path.unlink(missing_ok=True)
    return os.open(path, flags, 0o666)


def _write(descriptor: int, memory: memoryview, nbytes: int, crc: int) -> int:
    """Write ``nbytes``, and what fills the last block; return the checksum of the ``nbytes``."""
    for begin in range(0, nbytes, _CHUNK):
        end = min(begin + _CHUNK, nbytes)
        crc = zlib.crc32(memory[begin:end], crc)
        chunk = memory[begin : _blocks(end)]
        while chunk:
            try:
                chunk = chunk[os.write(descriptor, chunk) :]
            except OSError as error:
                # Some file systems refuse to go past the page cache only now, or after a write cut short.
                direct = getattr(os, "O_DIRECT", 0)
                flags = fcntl.fcntl(descriptor, fcntl.F_GETFL)
                if error.errno != errno.EINVAL or not flags & direct:
                    raise
                fcntl.fcntl(descriptor, fcntl.F_SETFL, flags & ~direct)
    return crc
