"""A newcomer gets what the others have, from their memory: all that a checkpoint would hold, between two batches.

Where workers go on in step, all others wait meanwhile, and rank 0 sends, since it was there before. Where they meet at
the coordinator, the first worker that is left sends over the coordinator, and nobody else waits. What is each worker's
own (random numbers, batch norm's statistics in the middle of an epoch) a newcomer has from its own start, or from the
worker that sends.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import sys
import time
from abc import ABC, abstractmethod
from collections.abc import Collection, Sequence
from typing import Any

import torch

from hocket.comm.changing_group import RegroupingCommunicator
from hocket.comm.coordinator_group import MeetingCommunicator
from hocket.comm.generation import Change
from hocket.comm.kept_answers import Answers, of_parts, of_tensor, to_parts, to_tensor
from hocket.events import WORKERS_CHANGED, Happening, Stage, Survival
from hocket.job.checkpoint.reading import SentCheckpoint, Source, Tensors
from hocket.job.checkpoint.restoring import Saved
from hocket.job.checkpoint.snapshot import Camera, Snapshot, Subjects
from hocket.job.checkpoint.tensor_file import Kind, find_type, name_type
from hocket.job.packing import Json
from hocket.job.worker import Worker
from hocket.server.server_client import Client


def prepare(worker: Worker, subjects: Subjects) -> HandOver:
    """What gives newcomers the training of a script that has called ``hocket.resume()``, or takes it as a newcomer."""
    group = worker.communicator
    if isinstance(group, RegroupingCommunicator):
        return _InStep(worker, subjects, group)
    if isinstance(group, MeetingCommunicator):
        return _AtCoordinator(worker, subjects, group)
    return HandOver(worker, subjects)


class HandOver:
    """Gives newcomers the training of a worker, or takes it as a newcomer; here for a job that takes none.

    Args:
        worker: The worker.
        subjects: What the script has given to ``hocket.resume()``.
    """

    is_due = False
    """Whether this worker is a newcomer that has not joined the others."""

    def __init__(self, worker: Worker, subjects: Subjects) -> None:
        self._worker, self._subjects = worker, subjects

    def offer(self) -> None:
        """Tell the launcher whether lost workers can be replaced."""

    def join(self) -> Saved:
        """Join the others, as a newcomer; returns what they have given."""
        raise NotImplementedError


class _Possible(HandOver, ABC):
    """In a job that may take newcomers.

    Args:
        worker: The worker.
        subjects: What the script has given to ``hocket.resume()``.
        answers: The answers to the calls that workers make before they train.
    """

    def __init__(self, worker: Worker, subjects: Subjects, answers: Answers) -> None:
        super().__init__(worker, subjects)
        self._answers = answers

    def offer(self) -> None:
        def tell(obstacle: str) -> None:
            self._worker.sink.put(Survival(survives=True, replaces=not obstacle, obstacle=obstacle))

        if self._worker.config.on_loss in ("auto", "replace") and self._goes_on:
            tell(obstacle := self._answers.failure or self._find_obstacle())
            self._answers.on_failure = tell
            if not obstacle:
                self._allow()

    @property
    @abstractmethod
    def _goes_on(self) -> bool:
        """Whether the others go on when a worker is lost."""

    def _allow(self) -> None:
        """Newcomers may come from now on."""

    def _find_obstacle(self) -> str:
        training, subjects = self._worker.training, self._subjects
        known = {id(each) for each in subjects.stateful.values()}
        given = [*training.models, *(each for known in training.guard.optimizers.values() for each in known)]
        if left := [type(each).__name__ for each in given if id(each) not in known]:
            return f"hocket.resume() was not given the {left[0]}, so a new worker could not have it"
        if training.loaders and not subjects.loaders:
            return "hocket.resume() was not given the loader, so a new worker could not know which batch is next"
        if without := [each.spec.name for each in training.strategies if not each.spec.takes_newcomers]:
            return f"strategy {without[0]!r} takes no new workers"
        return ""

    def _describe(self) -> dict[str, Any]:
        """What newcomers must know beside that which a checkpoint holds."""
        training = self._worker.training
        pace = training.loops.pace
        return {
            "before": training.counts.tally.before,
            "taken": [strategy.collector.taken for strategy in training.strategies],
            "own": pace.own if training.loops.goes_on else 0,
            "schedules": {name: pace.place(each) for name, each in self._subjects.stateful.items()},
        }

    def _restore(self, source: _InMemory) -> Saved:
        """Bring this newcomer to the state of the others; nothing here may be collective."""
        training, told = self._worker.training, source.manifest["beside"]
        for state in source.manifest["loaders"].values():
            state |= {"goes on": True, "persists": False}
        taken = Saved(source, self._worker)
        taken.restore(self._subjects)
        training.counts.tally.before = told["before"]
        training.changes.extend(source.manifest["changes"])
        for strategy, steps in zip(training.strategies, told["taken"], strict=True):
            strategy.collector.taken = steps
        places = {id(self._subjects.stateful[name]): place for name, place in told["schedules"].items()}
        training.loops.pace.inherit(int(told["own"]), places)
        return taken


class _InStep(_Possible):
    """In a job whose workers are all between two batches when newcomers join."""

    def __init__(self, worker: Worker, subjects: Subjects, group: RegroupingCommunicator) -> None:
        super().__init__(worker, subjects, group.answers)
        self._group, self.is_due = group, not group.is_in
        self._given: _InMemory | None = None
        self._taken: Saved | None = None
        group.before_change, group.hand_over = self._prepare, self._hand_over

    def join(self) -> Saved:
        self._group.join()
        assert self._taken is not None
        self._worker.sink.put(Stage("joined"))
        return self._taken

    @property
    def _goes_on(self) -> bool:
        return self._group.changes

    def _prepare(self, giver: int | None) -> None:
        """Before newcomers come: have rank ``giver`` take a snapshot for them. Before all leave, when it is None: save.

        Collective."""
        if giver is None:
            self._worker.training.save_at_end()
            return
        self._given = None
        strategies = self._worker.training.strategies
        with contextlib.ExitStack() as averaged:
            for strategy in strategies:
                averaged.enter_context(strategy.merged())
            snapshot = Camera(self._worker, [giver], for_newcomer=True).take(self._subjects)
            if self._group.rank == giver:
                self._given = _InMemory.of(snapshot, self._describe())
                self._given.keep()

    def _hand_over(self, change: Change) -> None:
        """Send, or take, what newcomers need; collective."""
        begin, group = time.monotonic(), self._group
        given, self._given = self._given, None
        with group.aside():
            has = torch.tensor([given is not None])
            group.broadcast(has, 0)
            if not has:  # the worker that had it is gone: the newcomers end, and others come
                if change.is_new:
                    os.kill(os.getpid(), signal.SIGKILL)
                return
            sent = SentCheckpoint(group, given if group.rank == 0 else None)
            tensors = sent.fetch(list(sent.kinds), sent.kinds if change.is_new else ())
            if change.is_new:
                with group.apart():
                    self._taken = self._restore(_InMemory(sent.manifest, sent.own, tensors))
            group.barrier("the state of newcomers")
        if group.rank == 0 and given is not None:
            numbers, seconds = ", ".join(map(str, change.joined)), time.monotonic() - begin
            print(
                f"hocket: rank {numbers} joins in generation {change.generation}; the others waited {seconds:.2f} s to "
                f"give it {given.nbytes / 1e6:.1f} MB",
                file=sys.stderr,
                flush=True,
            )


class _AtCoordinator(_Possible):
    """In a job whose workers meet at the coordinator: one of them lets a newcomer in, and the others train on.

    From then on the newcomer is waited for in meetings. The worker that has let it in has come to all meetings before,
    and is in a training loop, so that all workers still have to come to the end of that loop, the newcomer too.
    """

    def __init__(self, worker: Worker, subjects: Subjects, group: MeetingCommunicator[Client]) -> None:
        super().__init__(worker, subjects, group.answers)
        self._group, self._client, self.is_due = group, group.client, not group.client.is_in

    def join(self) -> Saved:
        begin = time.monotonic()
        told, data = self._client.join()
        source = _InMemory.unpack(data)
        training = self._worker.training
        with contextlib.ExitStack() as apart:
            for strategy in training.strategies:
                apart.enter_context(strategy.apart())
            taken = self._restore(source)
        training.passes = int(told["passes"])
        self._client.is_in = True
        for strategy, given in zip(training.strategies, told["strategies"], strict=True):
            strategy.take(given)
        self._worker.sink.put(Stage("joined"))
        print(
            f"hocket: rank {self._client.rank} joins with {source.nbytes / 1e6:.1f} MB from rank {told['from']}, which "
            f"took {told['seconds']:.2f} s to give and {time.monotonic() - begin:.2f} s to take",
            file=sys.stderr,
            flush=True,
        )
        return taken

    @property
    def _goes_on(self) -> bool:
        return all(strategy.spec.survives_loss for strategy in self._worker.training.strategies)

    def _allow(self) -> None:
        self._group.let_in = self._let_in

    def _find_obstacle(self) -> str:
        if any(loader.newcomers.is_fixed for loader in self._subjects.loaders.values()):
            return (
                "a loader is over a stream, or over data of each worker's own, so a new worker could not know what is "
                "left of it"
            )
        return super()._find_obstacle()

    def _let_in(self, number: int) -> None:
        """Give a newcomer all that it needs, if this worker is at a place where that is possible."""
        begin, training, subjects = time.monotonic(), self._worker.training, self._subjects
        strategies, loaders = training.strategies, [loader.newcomers for loader in subjects.loaders.values()]
        is_between = training.loops.is_between and not any(each.collector.passes for each in strategies)
        if not is_between or (loaders and not any(each.can_give for each in loaders)):
            return
        if not all(each.can_give for each in strategies):
            return
        with contextlib.ExitStack() as apart:
            for strategy in strategies:
                apart.enter_context(strategy.apart())
            snapshot = Camera(self._worker, for_newcomer=True).take(subjects)
            given = _InMemory.of(snapshot, self._describe())
            data = given.pack()
        told = {
            "from": self._client.rank,
            "passes": training.passes - sum(loader.queue is not None for loader in loaders),
            "strategies": [strategy.give() for strategy in strategies],
            "seconds": time.monotonic() - begin,
        }
        queues = [queue for loader in loaders if (queue := loader.queue) is not None]
        if (admitted := self._client.admit([number], told, data, queues)) is None:
            return  # there are no batches for it in this epoch
        for strategy in strategies:
            strategy.has_given()
        generation, workers = admitted
        details = {"generation": generation, "workers": workers, "joined": [number]}
        self._worker.sink.put(Happening(WORKERS_CHANGED, details))


class _InMemory(Source):
    """What a checkpoint holds, in memory."""

    def __init__(self, manifest: Json, own: list[Json], tensors: Tensors) -> None:
        self.manifest, self.own, self._tensors = manifest, own, tensors
        self.kinds: dict[str, Kind] = {name: (each.dtype, list(each.shape)) for name, each in tensors.items()}

    @classmethod
    def of(cls, snapshot: Snapshot, beside: dict[str, Any]) -> _InMemory:
        """What one worker has, for workers that have nothing of their own in it."""
        manifest = {name: json.loads(text) for name, text in snapshot.manifest.items()}
        return cls({**manifest, "size": 0, "beside": beside}, [json.loads(snapshot.own)], snapshot.tensors)

    @property
    def nbytes(self) -> int:
        """Bytes of all tensors."""
        return sum(tensor.nbytes for tensor in self._tensors.values())

    def keep(self) -> None:
        """Keep the tensors as they are now."""
        self._tensors = {name: tensor.detach().cpu().clone() for name, tensor in self._tensors.items()}

    def pack(self) -> bytes:
        """All that there is, as bytes."""
        kinds = [[name, name_type(dtype), shape] for name, (dtype, shape) in self.kinds.items()]
        head = json.dumps([self.manifest, self.own, kinds]).encode()
        return of_parts([head, *map(of_tensor, self._tensors.values())])

    @classmethod
    def unpack(cls, data: bytes) -> _InMemory:
        """What ``pack`` was called on."""
        head, *parts = to_parts(data)
        manifest, own, kinds = json.loads(head)
        tensors = {}
        for (name, dtype, shape), part in zip(kinds, parts, strict=True):
            tensors[name] = to_tensor(part, torch.empty(0, dtype=find_type(dtype))).view(shape)
        return cls(manifest, own, tensors)

    def fetch(self, names: Sequence[str], wanted: Collection[str]) -> Tensors:
        return {name: self._tensors[name] for name in names if name in wanted}

    def read(self, name: str) -> torch.Tensor:
        return self._tensors[name].contiguous()
