"""Takes snapshots of a training: everything that a checkpoint holds, as plain data and tensors.

Most of it is the same on all ranks, so each rank on rank 0's host copies and writes only its part of the tensors. What
differs (random states, batch-norm statistics in the middle of an epoch, the place in a rank's own data) is in a file
for each rank.
"""

from __future__ import annotations

import zlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer

from hocket.errors import UsageError
from hocket.job import buffers
from hocket.job.checkpoint import tensor_file
from hocket.job.checkpoint.tensor_file import Image
from hocket.job.loader.loader import Loader
from hocket.job.packing import Packer, Text, join, pack, write
from hocket.job.randomness import RandomState
from hocket.job.worker import Worker
from hocket.strategies.base import Why

Tensors = dict[str, torch.Tensor]


class Subjects:
    """The objects of a script that are saved and loaded, by name; each argument may be one, a list or a dictionary."""

    def __init__(self, model: Any, optimizer: Any, scheduler: Any, loader: Any, extra: Any, others: Mapping[str, Any]):
        self.models: dict[str, nn.Module] = _named("model", model, nn.Module)
        self.loaders: dict[str, Loader] = _named("loader", loader, Loader)
        self.stateful: dict[str, Any] = {
            **self.models,
            **_named("optimizer", optimizer, Optimizer),
            **_named("scheduler", scheduler),
        }
        for name, value in others.items():
            self.stateful |= _named(name, value)
        self.modules = {name: thing for name, thing in self.stateful.items() if isinstance(thing, nn.Module)}
        self.is_training = optimizer is not None or loader is not None
        self.extra = extra


@dataclass
class Snapshot:
    """What one rank contributes: the manifest (rank 0's is written), what is its own, and its part of the tensors."""

    step: int
    manifest: dict[str, Text]
    own: Text
    tensors: Tensors
    number: int  # equal on ranks that save the same things
    described: list[str]  # names, types and shapes of the tensors that all ranks have


class Camera:
    """Takes snapshots of a job.

    Args:
        worker: The worker.
        writers: The ranks among which the tensors that all have are divided, of which the first has the script's own
            ``extra``; by default those of rank 0's host.
        for_newcomer: Whether the snapshot is for a newcomer of a job with a coordinator, and not for a checkpoint.
    """

    def __init__(self, worker: Worker, writers: Sequence[int] | None = None, *, for_newcomer: bool = False) -> None:
        self._worker, self._packer, self._for_newcomer = worker, Packer(), for_newcomer
        self._writers = worker.together.topology.home if writers is None else writers
        self._aliases: dict[str, str] = {}
        self._names: list[str] = []  # names of all tensors that are the same everywhere
        self._mine: list[str] = []  # names of the tensors that this rank writes
        self._differing: list[str] = []
        self._described: list[str] = []
        self._number = 0

    def take_own(self, subjects: Subjects) -> torch.Tensor:
        """This worker's file with what differs between workers, for the one worker that saves for all."""
        self._worker.training.weights.leave_no_trace()
        tensors: Tensors = {}
        text = self._take_own(subjects, _buffered(subjects), tensors, self._worker.config.rank)
        image = Image(tensor_file.describe(tensors))
        image.fill(tensors.values())
        return image.content(text)

    def take(self, subjects: Subjects, others: int = 0) -> Snapshot:
        """The state of everything now, not copied yet; collective.

        ``others`` is how many workers, with files of ``take_own``, this one saves for.
        """
        worker, training, packer = self._worker, self._worker.training, self._packer
        training.weights.leave_no_trace()
        packer.is_news = False
        shared = {
            name: loader.newcomers.of(loader.state()) if self._for_newcomer else loader.state()
            for name, loader in subjects.loaders.items()
            if not loader.is_per_rank
        }
        if worker.client is not None and not self._for_newcomer:
            # After the queue: a batch may be done again, and none is lost.
            for strategy in training.strategies:
                strategy.settle(Why.REFRESH)
        common: Tensors = {}
        differing = [n for n, m in subjects.modules.items() if buffers.differ(worker.together, m)]
        differing = _buffered(subjects) if others else differing
        objects = {name: packer.pack(model.state_dict(), name, common) for name, model in subjects.models.items()}
        for name, thing in subjects.stateful.items():
            if name not in objects:
                objects[name] = packer.pack_each(thing.state_dict(), name, common)
        loaders = join({name: packer.pack_each(state, name, common) for name, state in shared.items()})
        states = [packer.pack(s.state(), f"strategy.{i}", common) for i, s in enumerate(training.strategies)]
        own: Tensors = {}
        extra = packer.pack(subjects.extra, "extra", own) if worker.together.rank == self._writers[0] else "null"
        packer.is_news |= list(common) != self._names or differing != self._differing  # not the same names as last time
        self._names, self._differing = list(common), differing
        manifest = {
            "objects": join(objects),
            "loaders": loaders,
            "strategies": "[" + ",".join(states) + "]",
            "extra": extra,
            "metrics": write(pack(training.metrics, "metrics", common)),
            "aliases": self._take_twins(common),
        }
        changes = [*training.changes]
        if worker.client is not None and not self._for_newcomer:
            changes += worker.client.history()
        counts = {
            "changes": changes,
            "size": worker.together.size + others,
            "step": training.counts.common_step,
            "counted step": training.counts.step,
            "batches": training.counts.batches,
            "samples": training.counts.samples,
            "steps": [counter.steps for counter in training.counts.counters],
            "warmups": [scaling.state() for scaling in training.scalings],
        }
        manifest |= {name: write(value) for name, value in counts.items()}
        if packer.is_news:
            tensor_file.check(common)
            # Rank 0 writes those that differ.
            first = {f"{name}.{key}" for name in differing for key in _kept_buffers(subjects.modules[name])}
            self._mine = _share(common, worker.together.rank, self._writers, first)
            self._described = [f"{name} {t.dtype}{list(t.shape)}" for name, t in common.items()]
            self._number = zlib.crc32(repr(self._described).encode())
        tensors = {name: common[name] for name in self._mine} | own
        per_rank = self._take_own(subjects, differing, tensors, worker.together.rank)
        return Snapshot(training.counts.common_step, manifest, per_rank, tensors, self._number, self._described)

    def _take_own(self, subjects: Subjects, differing: list[str], tensors: Tensors, rank: int) -> Text:
        """What differs between ranks."""
        me = f"rank.{rank}"
        own = {
            "random": RandomState.capture().as_data(),
            "loaders": {name: loader.state() for name, loader in subjects.loaders.items() if loader.is_per_rank},
            "buffers": {name: _kept_buffers(subjects.modules[name]) for name in differing},
        }
        return self._packer.pack_each(own, me, tensors)

    def _take_twins(self, tensors: Tensors) -> Text:
        """Take out tensors that share the memory of an earlier one (tied weights); returns that one for each."""
        if self._packer.is_news:
            first: dict[Any, str] = {}
            self._aliases = {}
            for name, tensor in tensors.items():
                if tensor.numel() and first.setdefault(_place(tensor), name) != name:
                    self._aliases[name] = first[_place(tensor)]
        elif any(_place(tensors[name]) != _place(tensors[twin]) for name, twin in self._aliases.items()):
            self._packer.is_news = True
            return self._take_twins(tensors)
        for name in self._aliases:
            del tensors[name]
        return write(self._aliases)


def _named(kind: str, given: Any, expected: type = object) -> dict[str, Any]:
    if given is None:
        return {}
    things = {kind: given}
    if isinstance(given, dict):
        things = {f"{kind}.{name}": thing for name, thing in given.items()}
    elif isinstance(given, (list, tuple)):
        things = {f"{kind}.{i}": thing for i, thing in enumerate(given)}
    for name, thing in things.items():
        if expected is Loader and not isinstance(thing, Loader):
            raise UsageError(f"{name} is a {type(thing).__name__}: pass the loader that hocket.distribute() returned")
        if not isinstance(thing, expected) or (expected is object and not hasattr(thing, "load_state_dict")):
            raise UsageError(
                f"{name} is a {type(thing).__name__}, which has no state_dict() to save: pass plain data as extra="
            )
    return things


def _kept_buffers(module: nn.Module) -> Tensors:
    """The buffers that are part of the module's ``state_dict``."""
    state = module.state_dict()
    return {name: buffer for name, buffer in module.named_buffers() if name in state}


def _buffered(subjects: Subjects) -> list[str]:
    """The modules that have buffers, which may differ between ranks."""
    return [name for name, module in subjects.modules.items() if _kept_buffers(module)]


def _place(tensor: torch.Tensor) -> Any:
    return tensor.data_ptr(), tensor.dtype, tensor.shape, tensor.stride()


def _share(tensors: Tensors, rank: int, writers: Sequence[int], first: set[str]) -> list[str]:
    """Which of ``tensors`` are for ``rank`` to write: neighbours, about the same number of bytes for each writer.

    Those named in ``first`` are rank 0's.
    """
    total = sum(tensor.nbytes for tensor in tensors.values()) + 1
    mine, before = [], 0
    for name, tensor in tensors.items():
        writer = 0 if name in first else (before + tensor.nbytes // 2) * len(writers) // total
        if writers[writer] == rank:
            mine.append(name)
        before += tensor.nbytes
    return mine
