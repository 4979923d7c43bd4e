"""What a worker does when the workers of its job have changed: it has another rank, other data, and other exchanges."""

from __future__ import annotations

import dataclasses
import sys
from typing import TYPE_CHECKING, Any

from hocket.comm.changing_group import RegroupingCommunicator
from hocket.comm.generation import Change
from hocket.errors import WorkerLost
from hocket.events import BATCHES_AGAIN, SAMPLES_AGAIN, WORKERS_CHANGED, Happening, Survival
from hocket.job.loader.division import blame
from hocket.specs import Spec
from hocket.transport.waiting import ranks

if TYPE_CHECKING:
    from hocket.job.worker import Worker


def tell_survival(worker: Worker, spec: Spec) -> None:
    """Tell the launcher whether the others go on when a worker is lost, and whether workers leave in order.

    Raises:
        UsageError: the user wants the others to go on, and the strategy cannot.
    """
    group, is_asked = worker.communicator, worker.config.on_loss != "auto"
    if group.changes and not (spec.regroups if is_asked else spec.regroups_unasked):
        group.stay(
            f"strategy {spec.name!r} cannot go on without a worker, at least not with these options: use mirrored, "
            "central, local_sgd, diloco or easgd"
        )
    group.parts = group.parts and spec.ends_after_any_batch
    if isinstance(group, RegroupingCommunicator):
        group.goes_on = group.goes_on or group.changes
        if not group.changes:
            group.ahead = max(group.ahead, spec.exchanges_under_way)
    survives_loss = spec.resolve(worker.config.size, worker.config.servers).survives_loss
    survives = group.changes or (survives_loss and worker.config.on_loss != "end")
    worker.sink.put(Survival(survives, leaves=worker.notice.is_heeded))


def follow_changes(worker: Worker) -> None:
    """Have ``worker`` go on whenever its group changes, if the group can change."""
    communicator = worker.communicator
    if not isinstance(communicator, RegroupingCommunicator):
        return

    place = _Place(worker)
    suspects: dict[int, frozenset[tuple[int, int]]] = {}  # what the last lost workers had at work, by loader

    def tell() -> dict[str, Any]:
        training = worker.training
        given = {str(loader.number): loader.given for loader in training.divided if loader.given is not None}
        return {"given": given, "weight": training.weights.now, "groups": worker.groups.tell()}

    def change(change: Change) -> None:
        nonlocal suspects
        worker.groups.regroup(change)
        config, training = worker.config, worker.training
        if change.size < config.min_workers and not change.is_planned:
            raise WorkerLost(f"workers that are left: {change.size}, and --min-workers is {config.min_workers}")
        here = communicator.topology
        worker.config = dataclasses.replace(
            config, rank=change.rank, size=change.size, local_rank=here.local_rank, local_size=len(here.local)
        )
        parts = [loader.regroup(change) for loader in sorted(training.divided, key=lambda each: each.number)]
        if change.lost and not change.is_planned:
            for loader, part in enumerate(parts):
                if again := part.last & suspects.get(loader, frozenset()):
                    raise WorkerLost(blame(part.name(again)))
            suspects = {loader: part.last for loader, part in enumerate(parts)}
        samples, lost = sum(part.total for part in parts), sum(part.samples for part in parts)
        weight = 1.0  # between two batches, all gradients are exchanged
        if not change.is_planned:
            # A worker's gradient was multiplied by its share of all samples, and by how many workers there were: the
            # factors of all workers together were as many as there were workers, and must be so again.
            weights = sum(said["weight"] for said in change.said)
            if samples > lost:
                weights = len(change.before) * (samples - lost) / samples
            weight = change.size / weights if weights else 1.0
        training.regroup(change.size, len(change.before), weight, lost)
        place.begin_anew()
        if change.joined:
            for check in training.checks.values():
                check.begin_anew()
        details: dict[str, Any] = {"generation": change.generation, "workers": change.size}
        named = {"lost": change.lost, "joined": change.joined}
        if change.is_planned:
            named["left"] = named.pop("lost")
        details |= {name: who for name, who in named.items() if who}
        if redone := sum(part.again for part in parts):
            details |= {BATCHES_AGAIN: sum(part.parts for part in parts), SAMPLES_AGAIN: redone}
        training.changes.append({**details, "step": training.counts.common_step})
        if change.rank == 0:
            worker.sink.put(Happening(WORKERS_CHANGED, details))
            if change.lost and config.events is None:  # there is no launcher that says so
                print(
                    f"hocket: {ranks(change.lost)} {'was' if len(change.lost) == 1 else 'were'} lost; "
                    f"{ranks(change.now)} go{'es' if change.size == 1 else ''} on.",
                    file=sys.stderr,
                    flush=True,
                )
        for call in training.on_change:
            call(change)

    communicator.tell, communicator.on_change, communicator.place = tell, change, place.find
    communicator.leaves = lambda: worker.notice.is_given
    communicator.on_stay = lambda: worker.sink.put(Survival(survives=False))


class _Place:
    """How many exchanges a worker has had since its group has changed, as far as its looks between batches tell."""

    def __init__(self, worker: Worker) -> None:
        self._worker = worker
        self.begin_anew()

    def begin_anew(self) -> None:
        self._count, self._mark = 0, self._worker.training.mark()

    def find(self) -> int | None:
        """The count; None if gradients, or batches, are under way. To be called at the same places on all workers."""
        training = self._worker.training
        if (mark := training.mark()) != self._mark:
            self._count, self._mark = self._count + 1, mark
        is_between = training.loops.is_between and not any(each.collector.passes for each in training.strategies)
        return self._count if is_between and training.at_one_place else None
