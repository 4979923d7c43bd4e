"""``save``, ``load`` and ``resume``: a training can be continued, on as many workers or on others."""

from __future__ import annotations

import sys
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from hocket.errors import CheckpointError, HocketError, UsageError
from hocket.events import Facts
from hocket.job.checkpoint import checkpoint_folder, handover, reading
from hocket.job.checkpoint.restoring import Saved
from hocket.job.checkpoint.saver import Saver, Saving
from hocket.job.checkpoint.snapshot import Subjects
from hocket.job.worker import Worker, meeting, together


@dataclass
class Position:
    """Where a training goes on.

    Attributes:
        epoch: Passes over the loader's data that are complete; the loader itself goes on in the middle of the next.
        step: Steps of the optimizer so far.
        samples: Samples of all workers so far.
        metrics: The metrics that were reported last.
        extra: What was saved as ``extra``.
        path: The checkpoint that was loaded, if any; on rank 0's host.
    """

    epoch: int = 0
    step: int = 0
    samples: int = 0
    metrics: dict[str, float] = field(default_factory=dict)
    extra: Any = None
    path: Path | None = None
    _done: Callable[[], None] = field(default=lambda: None, repr=False)

    def done(self) -> None:
        """In a script without a loader: a step is complete, so a checkpoint may be written if one is due."""
        self._done()


@together("hocket.save()")
def save(
    path: str | Path,
    *,
    model: Any = None,
    optimizer: Any = None,
    scheduler: Any = None,
    loader: Any = None,
    extra: Any = None,
    keep: int = 1,
    **others: Any,
) -> Saving:
    """Save a training to a new checkpoint in the folder ``path``; every rank must call it, at the end of a step.

    Returns when everything is copied; the copy is written in the background. The checkpoint appears in the folder when
    all of it is on the disk, and only then are older ones removed.

    Args:
        path: A folder for the checkpoints of this training, on rank 0's host.
        model: The model; several as a list or a dictionary, like everything else here.
        optimizer: The optimizer.
        scheduler: The learning-rate scheduler.
        loader: The loader that ``distribute`` returned: keeps the place in the epoch and its order.
        extra: Plain data (numbers, texts, lists, dictionaries, tensors).
        keep: How many checkpoints are kept in the folder.
        others: Whatever else has ``state_dict`` and ``load_state_dict``: a GradScaler, averaged weights …

    Returns:
        A handle: ``wait()`` on rank 0 blocks until it is on the disk and raises if that failed; on other ranks of its
        host, until their part of it is. Other hosts write nothing.
    """
    if keep < 1:
        raise UsageError(f"save(keep={keep}): at least one checkpoint must be kept")
    worker = meeting()
    is_uneven = any(strategy.spec.is_uneven for strategy in worker.training.strategies)
    if worker.client is None and is_uneven and worker.training.loops.goes_on:
        raise UsageError(
            "hocket.save() in the middle of a round of local_sgd(time=…), where workers are at different batches: save "
            "after the loop, or use --checkpoint DIR and hocket.resume()"
        )
    subjects = Subjects(model, optimizer, scheduler, loader, extra, others)
    saving = _saver(worker).save(Path(path).absolute(), subjects, keep, patient=True)
    assert saving is not None
    return saving


@together("hocket.load()")
def load(
    path: str | Path,
    *,
    model: Any = None,
    optimizer: Any = None,
    scheduler: Any = None,
    loader: Any = None,
    **others: Any,
) -> Position:
    """Bring what is given to the state in the newest intact checkpoint of folder ``path``; every rank must call it.

    ``path`` may also be one checkpoint in it. Rank 0 decides which one it is; hosts that do not have it at this path
    get it from rank 0's. Call it after ``distribute``; leave out what is not needed. The number of workers and hosts
    may be another than when it was saved.
    """
    subjects = Subjects(model, optimizer, scheduler, loader, None, others)
    return _load(meeting(), Path(path).absolute(), subjects)


@together("hocket.resume()")
def resume(
    *,
    model: Any = None,
    optimizer: Any = None,
    scheduler: Any = None,
    loader: Any = None,
    extra: dict[str, Any] | None = None,
    **others: Any,
) -> Position:
    """Go on where the job was that wrote to ``--checkpoint DIR``, and write checkpoints there from now on.

    Every rank must call it, after ``distribute``. Without ``--checkpoint`` nothing is loaded or saved. A checkpoint is
    written every ``--checkpoint-every`` steps, when the training loop asks the loader for the next batch; a script
    without a loader calls ``done()`` of the result at the end of each step.

    Args:
        model: See ``save``; the same for ``optimizer``, ``scheduler``, ``loader`` and ``others``.
        extra: A dictionary of plain data that the script keeps up to date. It is saved as it then is, and updated here.
    """
    worker = meeting()
    worker.forgotten.resumes = True
    if extra is not None and not isinstance(extra, dict):
        raise UsageError(f"resume(extra=…) takes a dictionary that is saved and updated, not a {type(extra).__name__}")
    subjects = Subjects(model, optimizer, scheduler, loader, extra, others)
    position, group = Position(extra=extra), worker.communicator
    folder = None if worker.config.checkpoint is None else Path(worker.config.checkpoint).absolute()
    newcomers = handover.prepare(worker, subjects)
    with group.aside():
        if newcomers.is_due:
            position = _place(newcomers.join(), subjects, None)
            if folder is not None:
                _saver(worker).adopt(folder)
        elif folder is not None:
            position = _find_checkpoint(worker, folder, subjects) or position
    if extra is not None and position.extra is not extra:
        extra.update(position.extra or {})
        position.extra = extra
    newcomers.offer()
    position._done = worker.look
    if folder is not None:
        automatic = _Automatic(worker, folder, subjects)
        position._done = automatic.done
        worker.training.save_at_end = automatic.save_at_end
        for each in subjects.loaders.values():
            each.before_next = automatic.between_steps
    return position


def _find_checkpoint(worker: Worker, folder: Path, subjects: Subjects) -> Position | None:
    """Go on from the newest checkpoint in a folder, if there is one; collective."""
    _saver(worker).open(folder)
    reading.warn_of_others(worker, folder)
    if not reading.on_rank_0(worker.communicator, lambda: bool(checkpoint_folder.committed(folder))):
        return None
    position = _load(worker, folder, subjects, resumes=True)
    if worker.config.rank == 0:
        _tell_changes(worker)
        topology = worker.communicator.topology
        host = f" on {topology.name_of(0)}" if len(topology.hosts) > 1 else ""
        print(f"hocket: going on from {position.path}{host}", file=sys.stderr, flush=True)
    return position


def _tell_changes(worker: Worker) -> None:
    """Note in the record how workers have come and gone in the runs from which this one goes on."""
    kinds = ("lost", "left", "joined")
    counts = {kind: sum(len(each.get(kind, ())) for each in worker.training.changes) for kind in kinds}
    if told := ", ".join(f"{count} {kind}" for kind, count in counts.items() if count):
        worker.sink.put(Facts({"workers before the checkpoint": told}))


class _Automatic:
    """Saves a checkpoint every ``--checkpoint-every`` steps."""

    def __init__(self, worker: Worker, folder: Path, subjects: Subjects) -> None:
        self._worker, self._folder, self._subjects = worker, folder, subjects
        self._last = worker.training.counts.common_step
        self._said = ""  # why there is no checkpoint; each reason is printed once

    def between_steps(self) -> None:
        """Save a checkpoint if one is due; collective then."""
        self._worker.forgotten.asks_for_checkpoints = True
        config, step = self._worker.config, self._worker.training.counts.common_step
        if step // config.checkpoint_every > self._last // config.checkpoint_every:
            self._last = step
            try:
                _saver(self._worker).save(self._folder, self._subjects, config.checkpoint_keep, patient=False)
            except CheckpointError as error:  # on all ranks; the training is worth more than this checkpoint
                if config.rank == 0 and str(error) != self._said:
                    self._said = str(error)
                    print(f"hocket: {error}; training goes on", file=sys.stderr, flush=True)

    def done(self) -> None:
        """In a script without a loader, the same, and workers may come and go; collective."""
        self.between_steps()
        self._worker.look()

    def save_at_end(self) -> None:
        """Save a checkpoint, and wait until it is written, because all workers leave; collective."""
        config = self._worker.config
        try:
            saving = _saver(self._worker).save(self._folder, self._subjects, config.checkpoint_keep, patient=True)
            if saving is not None:
                saving.wait()
        except CheckpointError as error:
            print(f"hocket: {error}; nothing is saved at the end", file=sys.stderr, flush=True)


def _saver(worker: Worker) -> Saver:
    if worker.training.saver is None:
        worker.training.saver = Saver(worker)
    assert isinstance(worker.training.saver, Saver)
    return worker.training.saver


def _place(saved: Saved, subjects: Subjects, path: Path | None) -> Position:
    """Where a training goes on that was brought to a saved state."""
    epoch, manifest = saved.epoch(next(iter(subjects.loaders), None)), saved.manifest
    return Position(epoch, manifest["step"], manifest["samples"], saved.metrics(), saved.extra(), path)


def _load(worker: Worker, path: Path, subjects: Subjects, *, resumes: bool = False) -> Position:
    if worker.training.saver is not None:
        _saver(worker).settle()
    chosen, source = reading.find(worker, path)
    try:
        saved = Saved(source, worker)
        saved.restore(subjects)
        if resumes:
            worker.training.changes.extend(saved.manifest.get("changes", []))
        position = _place(saved, subjects, chosen)
    except (KeyError, TypeError, ValueError, IndexError, AttributeError) as error:
        if isinstance(error, HocketError):
            raise
        raise CheckpointError(
            f"checkpoint {chosen} has contents that make no sense ({type(error).__name__}: {error}): load another one"
        ) from error
    worker.communicator.barrier("loading a checkpoint")
    return position
