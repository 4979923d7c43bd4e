"""Where a checkpoint's contents come from: files that every rank reads, or rank 0, which sends what it reads.

The latter is for hosts that do not see the folder of rank 0's host. Nothing is written there.
"""

from __future__ import annotations

import json
from abc import ABC, abstractmethod
from collections.abc import Collection, Iterator, Sequence
from pathlib import Path

import torch

from hocket.comm.communicator import Communicator
from hocket.job.checkpoint import store
from hocket.job.checkpoint.tensor_file import Kind, TensorFile, find_type, name_type
from hocket.job.packing import Json
from hocket.transport.tensor_bytes import view_bytes

Tensors = dict[str, torch.Tensor]
_BATCH = 1 << 22  # bytes of small tensors that travel together


class Source(ABC):
    """A checkpoint that can be read.

    Attributes:
        manifest: What is the same for all ranks.
        own: What each rank had beside it.
        kinds: The types and shapes of all tensors.
    """

    manifest: Json
    own: list[Json]
    kinds: dict[str, Kind]

    @abstractmethod
    def fetch(self, names: Sequence[str], wanted: Collection[str]) -> Tensors:
        """Those of the tensors ``names`` that are ``wanted``, each in memory of its own.

        Every rank must call it with the same names; wanted may differ.
        """


class Files(Source):
    """The files of a checkpoint that ``store.find`` has found."""

    def __init__(self, path: Path) -> None:
        self.manifest = store.read_manifest(path)
        parts = [TensorFile(path / part) for part in self.manifest["files"]]
        self.own = [json.loads(part.metadata) for part in parts]
        self.kinds = {name: kind for part in parts for name, kind in part.kinds.items()}
        self._homes = {name: part for part in parts for name in part.kinds}

    def fetch(self, names: Sequence[str], wanted: Collection[str]) -> Tensors:
        return {name: self.read(name) for name in names if name in wanted}

    def read(self, name: str) -> torch.Tensor:
        """One tensor."""
        return self._homes[name].read(name)


class Sent(Source):
    """What rank 0 reads from ``files`` and sends to all others, which have none."""

    def __init__(self, communicator: Communicator, files: Files | None) -> None:
        self._communicator, self._files = communicator, files
        told = b""
        if files is not None:
            kinds = {name: [name_type(dtype), shape] for name, (dtype, shape) in files.kinds.items()}
            told = json.dumps([files.manifest, files.own, kinds]).encode()
        self.manifest, self.own, kinds = json.loads(_send_text(communicator, told))
        self.kinds = {name: (find_type(dtype), shape) for name, (dtype, shape) in kinds.items()}

    def fetch(self, names: Sequence[str], wanted: Collection[str]) -> Tensors:
        fetched: Tensors = {}
        for batch in self._batches(names):
            tensors = {name: self._prepare(name) for name in batch}
            self._send([tensor.view(-1).view(torch.uint8) for tensor in tensors.values()])
            fetched |= {name: tensor for name, tensor in tensors.items() if name in wanted}
        return fetched

    def _batches(self, names: Sequence[str]) -> Iterator[list[str]]:
        """Many small tensors together, or one large one."""
        batch: list[str] = []
        total = 0
        for name in names:
            dtype, shape = self.kinds[name]
            nbytes = torch.Size(shape).numel() * dtype.itemsize
            if batch and total + nbytes > _BATCH:
                yield batch
                batch, total = [], 0
            batch.append(name)
            total += nbytes
        if batch:
            yield batch

    def _prepare(self, name: str) -> torch.Tensor:
        """On rank 0 the tensor, on others a place for it."""
        if self._files is not None:
            return self._files.read(name)
        dtype, shape = self.kinds[name]
        return torch.empty(shape, dtype=dtype)

    def _send(self, flats: list[torch.Tensor]) -> None:
        if len(flats) == 1:
            self._communicator.broadcast(flats[0], 0)
            return
        joined = torch.cat(flats)
        self._communicator.broadcast(joined, 0)
        for flat, part in zip(flats, joined.split([flat.numel() for flat in flats]), strict=True):
            flat.copy_(part)


def _send_text(communicator: Communicator, text: bytes) -> bytes:
    length = torch.tensor([len(text)])
    communicator.broadcast(length, 0)
    data = torch.frombuffer(bytearray(text.ljust(int(length), b"\0")), dtype=torch.uint8)
    communicator.broadcast(data, 0)
    return bytes(view_bytes(data))
