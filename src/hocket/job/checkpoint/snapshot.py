"""What a checkpoint holds: everything of a training as plain data and tensors, and how that is taken and given back.

Most of it is the same on all ranks, so each rank on rank 0's host copies and writes only its part of the tensors. What
differs (random states, batch-norm statistics in the middle of an epoch, the place in data of one's own) is in a file
for each rank.
"""

from __future__ import annotations

import zlib
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer

from hocket.errors import CheckpointError, UsageError
from hocket.job import buffers
from hocket.job.checkpoint import tensor_file
from hocket.job.checkpoint.packer import Packer, Text, join, write
from hocket.job.data.loader import Loader
from hocket.job.packing import Json, pack, unpack
from hocket.job.randomness import RandomState
from hocket.job.runtime import Runtime

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
    number: int  # the same on all ranks that save the same
    described: list[str]  # names, types and shapes of what is common


class Camera:
    """Takes snapshots of a job."""

    def __init__(self, runtime: Runtime) -> None:
        self._runtime, self._packer = runtime, Packer()
        self._writers = runtime.communicator.topology.home
        self._aliases: dict[str, str] = {}
        self._names: list[str] = []  # of all tensors that are the same everywhere,
        self._mine: list[str] = []  # and of those that this rank writes
        self._differing: list[str] = []
        self._described: list[str] = []
        self._number = 0

    def take(self, subjects: Subjects) -> Snapshot:
        """The state of everything now, not copied yet; collective."""
        runtime, packer = self._runtime, self._packer
        runtime.leave_no_trace()
        packer.is_news = False
        common: Tensors = {}
        differing = [n for n, m in subjects.modules.items() if buffers.differ(runtime.communicator, m)]
        objects = {name: packer.pack(model.state_dict(), name, common) for name, model in subjects.models.items()}
        for name, thing in subjects.stateful.items():
            if name not in objects:
                objects[name] = packer.pack_each(thing.state_dict(), name, common)
        shared = {name: loader.state() for name, loader in subjects.loaders.items() if not loader.is_per_rank}
        loaders = join({name: packer.pack_each(state, name, common) for name, state in shared.items()})
        states = [packer.pack(s.state(), f"strategy.{i}", common) for i, s in enumerate(runtime.strategies)]
        own: Tensors = {}
        extra = packer.pack(subjects.extra, "extra", own) if runtime.config.rank == 0 else "null"
        packer.is_news |= list(common) != self._names or differing != self._differing  # others than last time
        self._names, self._differing = list(common), differing
        manifest = {
            "objects": join(objects),
            "loaders": loaders,
            "strategies": "[" + ",".join(states) + "]",
            "extra": extra,
            "metrics": write(pack(runtime.metrics, "metrics", common)),
            "aliases": self._take_twins(common),
        }
        counts = {
            "size": runtime.config.size,
            "step": runtime.step,
            "batches": runtime.batches,
            "samples": runtime.samples,
            "steps": [counter.steps for counter in runtime.counters],
            "warmups": [warmup.taken for warmup in runtime.warmups],
        }
        manifest |= {name: write(value) for name, value in counts.items()}
        if packer.is_news:
            tensor_file.check(common)
            # Those that differ are rank 0's to write.
            first = {f"{name}.{key}" for name in differing for key in _kept_buffers(subjects.modules[name])}
            self._mine = _share(common, runtime.config.rank, self._writers, first)
            self._described = [f"{name} {t.dtype}{list(t.shape)}" for name, t in common.items()]
            self._number = zlib.crc32(repr(self._described).encode())
        tensors = {name: common[name] for name in self._mine} | own
        per_rank = self._take_own(subjects, differing, tensors)
        return Snapshot(runtime.step, manifest, per_rank, tensors, self._number, self._described)

    def _take_own(self, subjects: Subjects, differing: list[str], tensors: Tensors) -> Text:
        """What differs between ranks."""
        me = f"rank.{self._runtime.config.rank}"
        own = {
            "random": RandomState.capture().as_data(),
            "loaders": {name: loader.state() for name, loader in subjects.loaders.items() if loader.is_per_rank},
            "buffers": {name: _kept_buffers(subjects.modules[name]) for name in differing},
        }
        return self._packer.pack_each(own, me, tensors)

    def _take_twins(self, tensors: Tensors) -> Text:
        """Take out tensors that are the same memory as one before (tied weights); what stands for each."""
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


class Saved:
    """A checkpoint that can be read: its manifest, and what each rank wrote beside its part of the tensors."""

    def __init__(self, manifest: Json, own: Sequence[Json], read: Callable[[str], torch.Tensor]) -> None:
        self.manifest, self._own, self._read = manifest, own, read

    def restore(self, runtime: Runtime, subjects: Subjects, shape: Callable[[str], list[int]]) -> None:
        """Bring everything to the state that was saved; collective."""
        manifest, size = self.manifest, runtime.config.size
        for name in [*subjects.stateful, *subjects.loaders]:
            if name not in manifest["objects"] and name not in (*manifest["loaders"], *self._own[0]["loaders"]):
                known = ", ".join([*manifest["objects"], *manifest["loaders"]])
                raise CheckpointError(f"the checkpoint has no {name!r}: it has {known}; leave it out of the call")
        for name, model in subjects.models.items():
            _check_fits(name, model.state_dict(), manifest["objects"][name], shape)
        own = self._own[runtime.config.rank] if manifest["size"] == size else None
        for name, thing in subjects.stateful.items():
            self._load(name, thing, own)
        if not subjects.is_training:
            return  # weights for something else: counts and random numbers are not its business
        runtime.batches, runtime.samples = manifest["batches"], manifest["samples"]
        runtime.metrics = self.metrics()
        for counter, steps in zip(runtime.counters, manifest["steps"], strict=False):
            counter.steps = steps
        for warmup, taken in zip(runtime.warmups, manifest["warmups"], strict=False):
            warmup.taken = taken
        for strategy, state in zip(runtime.strategies, manifest["strategies"], strict=False):
            strategy.load_state(self._unpack(state))
        for name, loader in subjects.loaders.items():
            self._place(name, loader, own)
        if own is not None:
            random = RandomState.from_data(self._unpack(own["random"]))
            random.restore()
            runtime.keep_random(random)

    def metrics(self) -> dict[str, float]:
        """What was reported last."""
        metrics: dict[str, float] = self._unpack(self.manifest["metrics"])
        return metrics

    def extra(self) -> Any:
        """What the script had given."""
        return self._unpack(self.manifest["extra"])

    def epoch(self, loader: str | None) -> int:
        """Passes over the data of ``loader`` (if None: of any) that are complete."""
        states = self._own[0]["loaders"] | self.manifest["loaders"]
        state = states.get(loader) if loader is not None else next(iter(states.values()), None)
        return int(self._unpack(state)["epoch"]) - 1 if state is not None else 0

    def _load(self, name: str, thing: Any, own: Json) -> None:
        state = self._unpack(self.manifest["objects"][name])
        if own is not None and name in own["buffers"]:
            state |= self._unpack(own["buffers"][name])
        try:
            thing.load_state_dict(state)
        except (ValueError, RuntimeError, KeyError, TypeError) as error:
            raise CheckpointError(f"the checkpoint does not fit {name!r}: {error}") from error

    def _place(self, name: str, loader: Loader, own: Json) -> None:
        if name in self.manifest["loaders"]:
            loader.load_state(self._unpack(self.manifest["loaders"][name]))
            return
        state = self._unpack((own or self._own[0])["loaders"][name])
        if own is None and state["open"]:
            raise CheckpointError(
                f"the checkpoint was written by {self.manifest['size']} workers in the middle of an epoch, and every "
                f"worker had data of its own: resume with -n {self.manifest['size']}"
            )
        loader.load_state(state)

    def _unpack(self, value: Json) -> Any:
        return unpack(value, self._read)


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
    """Those that are part of its state."""
    state = module.state_dict()
    return {name: buffer for name, buffer in module.named_buffers() if name in state}


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


def _check_fits(name: str, state: Mapping[str, Any], saved: Json, shape: Callable[[str], list[int]]) -> None:
    """Raise, naming the first difference, if a model's parameters and buffers are not those that were saved."""

    def fail(difference: str) -> None:
        raise CheckpointError(
            f"the checkpoint is of another {name}: {difference}; build the model as it was when it was saved"
        )

    for key in _merge(saved, state):
        if key not in state:
            fail(f"it has {key!r}, and this one does not")
        if key not in saved:
            fail(f"this one has {key!r}, and it does not")
        reference = saved[key]
        if isinstance(state[key], torch.Tensor) and isinstance(reference, dict) and "$tensor" in reference:
            there, here = shape(reference["$tensor"]), list(state[key].shape)
            if there != here:
                fail(f"{key!r} has shape {there} there and {here} here")


def _merge(first: Iterable[str], second: Iterable[str]) -> list[str]:
    """All keys, in the order in which a reader would compare the two."""
    first, second = list(first), list(second)
    return [*dict.fromkeys(key for pair in zip(first, second, strict=False) for key in pair), *first, *second]
