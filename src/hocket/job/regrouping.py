"""What a worker does when the workers of its job have changed: it has another rank, other data, and other exchanges."""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING, Any

from hocket.comm.changing_group import Change, RegroupingCommunicator
from hocket.errors import StrategyError
from hocket.events import WORKERS_CHANGED, Happening
from hocket.specs import Spec

if TYPE_CHECKING:
    from hocket.job.worker import Worker


def survives(worker: Worker, spec: Spec) -> bool:
    """Whether the others go on when a worker is lost.

    Raises:
        StrategyError: the user wants them to, and the strategy cannot.
    """
    can_change = worker.communicator.changes
    if can_change and not spec.regroups:
        raise StrategyError(
            f"--on-loss continue, and strategy {spec.name!r} cannot go on without a worker, at least not with these "
            "options: use mirrored, local_sgd(period=…), diloco without fragments, or easgd, or leave out --on-loss"
        )
    return can_change or spec.resolve(worker.config.size, worker.config.servers).survives_loss


def follow_changes(worker: Worker) -> None:
    """Have ``worker`` go on whenever its group changes, if the group can change."""
    communicator = worker.communicator
    if not isinstance(communicator, RegroupingCommunicator):
        return

    def tell() -> dict[str, Any]:
        given = {str(loader.number): loader.given for loader in worker.training.divided if loader.given is not None}
        return {"given": given, "weight": worker.training.weights.now}

    def change(change: Change) -> None:
        worker.config = dataclasses.replace(
            worker.config,
            rank=change.rank,
            size=change.size,
            local_rank=change.rank,
            local_size=change.size,
        )
        parts = [loader.regroup(change) for loader in sorted(worker.training.divided, key=lambda each: each.number)]
        samples, lost = sum(part.total for part in parts), sum(part.samples for part in parts)
        # A worker's gradient was multiplied by its share of all samples, and by how many workers there were: the
        # factors of all workers together were as many as there were workers, and must be so again.
        weights = sum(said["weight"] for said in change.said)
        if samples > lost:
            weights = len(change.before) * (samples - lost) / samples
        worker.training.regroup(change.size, len(change.before), change.size / weights if weights else 1.0, lost)
        if change.rank == 0:
            details = {"generation": change.generation, "lost": change.lost, "workers": change.size}
            worker.sink.put(Happening(WORKERS_CHANGED, details))

    communicator.tell, communicator.on_change = tell, change
