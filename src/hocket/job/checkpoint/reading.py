"""Which checkpoint is loaded, and how its contents come to each host.

Rank 0 decides which one. A host that finds the very same checkpoint at its own path (on a shared file system, or as a
copy) reads it there. If one host does not, rank 0 sends to all what it reads. Every rank knows the way before
anything is read, and nothing is written.
"""

from __future__ import annotations

import contextlib
import json
import sys
from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Iterator, Sequence
from pathlib import Path
from typing import TypeVar, cast

import torch

from hocket.comm.communicator import Communicator
from hocket.errors import CheckpointError
from hocket.job.checkpoint import checkpoint_folder
from hocket.job.checkpoint.tensor_file import Kind, TensorFile, find_type, name_type
from hocket.job.packing import Json
from hocket.job.worker import Worker
from hocket.transport.tensor_bytes import view_bytes

T = TypeVar("T")
Tensors = dict[str, torch.Tensor]
_BATCH = 1 << 22  # bytes of small tensors that travel together


class Source(ABC):
    """A checkpoint that can be read.

    Attributes:
        manifest: The part that is the same for all ranks.
        own: The part of each rank that differs between ranks.
        kinds: The types and shapes of all tensors.
    """

    manifest: Json
    own: list[Json]
    kinds: dict[str, Kind]

    @abstractmethod
    def fetch(self, names: Sequence[str], wanted: Collection[str]) -> Tensors:
        """The tensors among ``names`` that are ``wanted``, each in memory of its own.

        Every rank must call this with the same ``names``; ``wanted`` may differ.
        """

    def read(self, name: str) -> torch.Tensor:
        """One tensor, where this worker has the contents itself."""
        raise NotImplementedError


class Files(Source):
    """The files of a checkpoint that ``checkpoint_folder.find`` has found."""

    def __init__(self, path: Path) -> None:
        self.manifest = checkpoint_folder.read_manifest(path)
        parts = [TensorFile(path / part) for part in self.manifest["files"]]
        self.own = [json.loads(part.metadata) for part in parts]
        self.kinds = {name: kind for part in parts for name, kind in part.kinds.items()}
        self._homes = {name: part for part in parts for name in part.kinds}

    def fetch(self, names: Sequence[str], wanted: Collection[str]) -> Tensors:
        return {name: self.read(name) for name in names if name in wanted}

    def read(self, name: str) -> torch.Tensor:
        return self._homes[name].read(name)


class SentCheckpoint(Source):
    """A checkpoint that rank 0 reads from ``files``, or has in memory, and sends to all others, which have nothing."""

    def __init__(self, communicator: Communicator, files: Source | None) -> None:
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
        """The tensors in batches: many small ones together, or one large one."""
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
        """The tensor on rank 0, and memory for it on other ranks."""
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


def find(worker: Worker, path: Path) -> tuple[Path, Source]:
    """The newest intact checkpoint in ``path``, or at ``path`` itself: its path for rank 0, and its contents.

    Collective; errors are raised on all ranks.
    """

    def look() -> tuple[str, str, str]:
        chosen = checkpoint_folder.find(path, _say)
        return str(chosen), str(chosen.relative_to(path)), checkpoint_folder.identify(chosen)

    found, below, identity = on_rank_0(worker.communicator, look)
    return Path(found), _open(worker, Path(found), path / below, identity)


def _open(worker: Worker, found: Path, mine: Path, identity: str) -> Source:
    communicator, topology = worker.communicator, worker.communicator.topology
    told = ""
    if topology.rank == 0:
        told = str(found)
    elif topology.local_rank == 0 and _is_intact(mine, identity):  # the first worker of a host looks for all
        told = str(mine)
    here = communicator.gather_bytes(told.encode())[topology.local[0]].decode()
    files, reason = None, "it is not there, or another one"
    if here:
        try:
            files, reason = Files(Path(here)), ""
        except Exception as error:  # of the system, safetensors or JSON: it cannot be read here
            reason = f"{type(error).__name__}: {error}"
    reasons = [told.decode() for told in communicator.gather_bytes(reason.encode())]
    if reasons[0]:
        raise CheckpointError(f"checkpoint {found} on {topology.name_of(0)} cannot be read: {reasons[0]}")
    if files is not None and not any(reasons):
        return files
    if topology.rank == 0:
        without = dict.fromkeys(topology.name_of(rank) for rank, reason in enumerate(reasons) if reason)
        _say(f"hocket: {found} is sent from {topology.name_of(0)}: not found on {', '.join(without)}")
    return SentCheckpoint(communicator, files if topology.rank == 0 else None)


def warn_of_others(worker: Worker, folder: Path) -> None:
    """Say so if another host has a newer checkpoint in its ``folder`` than rank 0, where the decision is; collective.

    The newer checkpoint is not loaded; the line is for a user who has listed the hosts in another order than before.
    """
    topology = worker.communicator.topology
    if len(topology.hosts) == 1:
        return
    mine = ""
    if topology.local_rank == 0:
        with contextlib.suppress(OSError, IndexError):
            mine = checkpoint_folder.committed(folder)[-1].name
    names = [told.decode() for told in worker.communicator.gather_bytes(mine.encode())]
    newest = checkpoint_folder.step_of(names[0])
    if topology.rank == 0 and (
        newer := [rank for rank, name in enumerate(names) if checkpoint_folder.step_of(name) > newest]
    ):
        host = topology.name_of(newer[0])
        _say(
            f"hocket: {host} has a newer checkpoint in {folder} ({names[newer[0]]}) than {topology.name_of(0)}, where "
            f"rank 0 is: to go on from it, list {host} first, or copy it to {topology.name_of(0)}"
        )


def _is_intact(path: Path, identity: str) -> bool:
    try:
        return checkpoint_folder.identify(path) == identity and not checkpoint_folder.inspect(path)
    except CheckpointError:
        return False


def _say(line: str) -> None:
    print(line, file=sys.stderr, flush=True)


def on_rank_0(communicator: Communicator, work: Callable[[], T]) -> T:
    """What ``work`` returns on rank 0 (plain data), or its error, on all ranks; collective.

    If rank 0 is lost before it has told, the next worker is rank 0 and works.
    """
    heard = b""
    while not heard:
        told = b""
        if communicator.rank == 0:
            try:
                told = json.dumps([work(), ""]).encode()
            except (CheckpointError, OSError) as error:
                told = json.dumps([None, str(error)]).encode()
        heard = communicator.gather_bytes(told)[0]
    result, failure = json.loads(heard)
    if failure:
        topology = communicator.topology
        raise CheckpointError(failure if len(topology.hosts) == 1 else f"on {topology.name_of(0)}: {failure}")
    return cast(T, result)
