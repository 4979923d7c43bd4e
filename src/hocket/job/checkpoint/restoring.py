"""Brings a training to the state that is in a checkpoint, on as many workers or on others."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import torch

from hocket.errors import CheckpointError
from hocket.job.checkpoint.reading import Source
from hocket.job.checkpoint.snapshot import Subjects
from hocket.job.loader.loader import Loader
from hocket.job.packing import Json, references, unpack
from hocket.job.randomness import RandomState
from hocket.job.worker import Worker
from hocket.strategies.base import Why


class Saved:
    """A checkpoint, for the workers that there are now. All ranks call the same methods in the same order."""

    def __init__(self, source: Source, worker: Worker) -> None:
        self._source, self._own, self.manifest = source, source.own, source.manifest
        self._worker = worker
        # Random numbers and the like are each rank's own, for ranks that were there when it was saved.
        self._rank = worker.config.rank if self.manifest["size"] == worker.config.size else None

    def restore(self, subjects: Subjects) -> None:
        """Bring everything to the state that was saved; collective."""
        manifest, worker, training = self.manifest, self._worker, self._worker.training
        for name in [*subjects.stateful, *subjects.loaders]:
            if name not in manifest["objects"] and name not in (*manifest["loaders"], *self._own[0]["loaders"]):
                known = ", ".join([*manifest["objects"], *manifest["loaders"]])
                raise CheckpointError(f"the checkpoint has no {name!r}: it has {known}; leave it out of the call")
        for name, model in subjects.models.items():
            _check_fits(name, model.state_dict(), manifest["objects"][name], self._shape)
        for name, thing in subjects.stateful.items():
            self._load(name, thing)
        if not subjects.is_training:
            return  # only weights are wanted: counts and random numbers stay
        training.metrics = self.metrics()
        for scaling, state in zip(training.scalings, manifest["warmups"], strict=False):
            scaling.load_state(state)
        counts = {"steps": manifest["step"], "batches": manifest["batches"]}  # all that one worker has, who needs none
        states = manifest["strategies"] or [counts] * len(training.strategies)
        for strategy, state in zip(training.strategies, states, strict=False):
            strategy.load_state(self._unpack(state))
            if worker.config.rank == 0 and not strategy.holds and "late" in (state | state.get("within", {})):
                print(
                    "hocket: the checkpoint has a gradient that was still to be applied, by 'delayed' or 'dmb'; this "
                    "strategy leaves it out",
                    file=sys.stderr,
                    flush=True,
                )
        common, steps = manifest["step"], manifest["steps"]
        step = manifest.get("counted step", max(steps, default=common))
        training.counts.restart(manifest["batches"], manifest["samples"], steps, step, common)
        for name, loader in subjects.loaders.items():
            self._place(name, loader)
        training.follow_batch()
        if worker.client is not None and worker.client.is_in:
            for turn in ("rank 0 brings it to the servers", "the others have it from there"):
                if worker.config.rank == 0 or "others" in turn:
                    for strategy in training.strategies:
                        strategy.settle(Why.REFRESH)
                worker.communicator.barrier(f"the end of a resumption: {turn}")
        if self._rank is not None:
            random = RandomState.from_data(self._unpack_own(lambda own: own["random"]))
            random.restore()
            training.keep_random(random)

    def metrics(self) -> dict[str, float]:
        """The metrics that were reported last."""
        metrics: dict[str, float] = self._unpack(self.manifest["metrics"])
        return metrics

    def extra(self) -> Any:
        """What the script had given as ``extra``."""
        return self._unpack(self.manifest["extra"])

    def epoch(self, loader: str | None) -> int:
        """Complete passes over the data of ``loader``; of any loader if it is None."""
        states = self._own[0]["loaders"] | self.manifest["loaders"]
        state = states.get(loader) if loader is not None else next(iter(states.values()), None)
        return int(state["epoch"]) - 1 if state is not None else 0

    def _load(self, name: str, thing: Any) -> None:
        state = self._unpack(self.manifest["objects"][name])
        if self._rank is not None and name in self._own[0]["buffers"]:
            state |= self._unpack_own(lambda own: own["buffers"][name])
        try:
            thing.load_state_dict(state)
        except (ValueError, RuntimeError, KeyError, TypeError) as error:
            raise CheckpointError(f"the checkpoint does not fit {name!r}: {error}") from error

    def _place(self, name: str, loader: Loader) -> None:
        if name in self.manifest["loaders"]:
            loader.load_state(self._unpack(self.manifest["loaders"][name]))
            return
        if self._rank is not None:
            loader.load_state(self._unpack_own(lambda own: own["loaders"][name]))
            return
        state = self._unpack(self._own[0]["loaders"][name])
        if state["open"]:
            raise CheckpointError(
                f"the checkpoint was written by {self.manifest['size']} workers in the middle of an epoch, and every "
                f"worker had data of its own: resume with -n {self.manifest['size']}"
            )
        loader.load_state(state)

    def _shape(self, name: str) -> list[int]:
        return self._source.kinds[self._home(name)][1]

    def _home(self, name: str) -> str:
        """The name under which a tensor is stored, which several may share."""
        home: str = self.manifest["aliases"].get(name, name)
        return home

    def _unpack_own(self, pick: Callable[[Json], Json]) -> Any:
        """What ``pick`` finds for this rank in the parts that differ between ranks."""
        assert self._rank is not None
        everyone = [pick(own) for own in self._own]
        return self._unpack(everyone[self._rank], everyone)

    def _unpack(self, value: Json, everyone: Json = None) -> Any:
        """``value`` with its tensors; ``everyone`` is what all ranks together ask for, if not the same."""
        wanted = {self._home(name) for name in references(value)}
        names = dict.fromkeys(self._home(name) for name in references(value if everyone is None else everyone))
        fetched = self._source.fetch(list(names), wanted)
        given: set[str] = set()

        def give(name: str) -> torch.Tensor:
            home = self._home(name)
            if home in given:
                return fetched[home].clone()
            given.add(home)
            return fetched[home]

        return unpack(value, give)


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
