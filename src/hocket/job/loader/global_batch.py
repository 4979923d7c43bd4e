"""How many samples all workers together take at once from a loader, as ``--batch`` says, whoever the workers are."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING, Any

from torch.utils.data import DataLoader, IterableDataset

from hocket.comm.communicator import Communicator
from hocket.errors import UsageError, WorkerLost
from hocket.events import Facts
from hocket.job.loader.division import least

if TYPE_CHECKING:
    from hocket.job.worker import Worker


class GlobalBatch:
    """The batch of all workers together, of one loader.

    Args:
        part: The batch size of the script's loader; None for batches that the script itself has made.
        workers: How many workers there are at the start.
        told: What ``--batch`` says.
        most_times: How many times the samples of a worker at the start it may get when others are gone.

    Attributes:
        whole: Samples of all workers at once; ready batches, where ``part`` is None.
        trains: Whether the loader is known to be one that trains, and not one of an evaluation.
        has_begun: Whether it has trained in this process.
    """

    def __init__(self, part: int | None, workers: int, told: str | int = "auto", most_times: int = 4) -> None:
        self.part, self.told, self._most_times = part, told, most_times
        self.whole = told if isinstance(told, int) else workers * (part or 1)
        self.trains = self.has_begun = False
        self._first = max(part or 1, -(-self.whole // workers))

    @property
    def least(self) -> int:
        """The fewest samples that a worker gets."""
        return least(None if self.part is None else self._first)

    @property
    def times(self) -> float:
        """How many times the batch of the script's loader it is."""
        return self.whole / (self.part or 1)

    def regroup(self, size: int) -> None:
        """The workers have changed, and there are ``size`` of them.

        Raises:
            WorkerLost: each worker would have much more to hold in memory than at the start.
        """
        if self.part is None or self.told == "per-worker":
            self.whole = size * (self.part or 1)
        elif self._is_too_much_for(size):
            raise WorkerLost(
                f"{size} of the workers are left, and each would have more than {self._most_times} times its batch of "
                f"{self._first} samples: raise --max-part, or start the job again with smaller batches"
            )

    def adopt(self, kept: dict[str, Any], group: Communicator) -> str:
        """Take the batch of a checkpoint, if it is to stay; what is said of it, where that is not what one expects.

        Args:
            kept: The state of the loader that was saved; ``goes on`` in it says that it comes from other workers of
                this job, as which a newcomer does.
            group: The workers that there are now.
        """
        if self.part is None:
            return ""
        before, part, self.trains = int(kept["whole"]), kept["part"], True
        if kept.get("goes on"):
            self.whole = before
            return ""
        size, stays = group.size, group.changes
        own, workers = self.whole, f"{size} worker{'s' if size > 1 else ''}"
        was = f"in the checkpoint it was {before}"
        if isinstance(self.told, int):
            return f"the global batch is {own} samples, as --batch says; {was}" if own != before else ""
        if self.told == "per-worker" or (self.told == "auto" and not stays):
            text = f"the global batch is {own} samples, {self.part} from each of {workers}; {was}"
            return f"{text} (--batch fixed keeps it)" if own != before else ""
        if part != self.part:
            text = f"the script's batch is {self.part} samples now, so the global batch is {own} with {workers}; {was}"
            return f"{text} (--batch {before} keeps it)" if own != before else ""
        self.whole = before
        if self._is_too_much_for(size):
            raise UsageError(
                f"the checkpoint's global batch of {before} samples would give each of {workers} more than "
                f"{self._most_times} times the script's batch of {part}: start more workers, raise --max-part, or "
                "leave the checkpoint's batch with --batch per-worker"
            )
        text = f"the global batch stays {before} samples, as in the checkpoint; with {workers} it would begin as {own}"
        return f"{text} (--batch per-worker has it so)" if own != before else ""

    def _is_too_much_for(self, size: int) -> bool:
        return -(-self.whole // size) > self._most_times * self._first

    def describe(self, size: int, *, changes: bool) -> str:
        """What a user wants to know of it at the start; ``changes`` is whether workers may come and go."""
        low, high = self.whole // size, -(-self.whole // size)
        if self.part is None or (self.told == "per-worker" and changes):
            what = "one of the script's own batches" if self.part is None else f"{self.part} samples"
            return f"each worker's part of a global batch is {what}: the whole changes with the workers, now {size}"
        each = f"{high}" if low == high else f"{low} or {high}"
        of = f"{each} from each of {size} workers" if size > 1 else "all from one worker"
        stays = "; it stays so when workers come or go" if changes else ""
        return f"the global batch is {self.whole} samples, {of}{stays}"


def choose(worker: Worker, part: int | None, group: Communicator, *, shares: bool) -> GlobalBatch:
    """The global batch of a loader with batches of ``part`` samples, as ``--batch`` says if ``group`` shares them."""
    told = worker.config.batch if shares and part is not None else "auto"
    return GlobalBatch(part, group.size, told, worker.config.max_part)


def begin(worker: Worker, batch: GlobalBatch, loader: DataLoader[Any], *, local: bool, uneven: bool) -> None:
    """A loader trains: say, the first time, how large its global batch is.

    Args:
        worker: The worker.
        batch: The global batch of the loader.
        loader: The loader of the script.
        local: Whether its data is the worker's own.
        uneven: Whether each worker takes its next batch as it gets ready.

    Raises:
        UsageError: ``--batch`` asks for what is impossible with the loader.
    """
    if batch.has_begun:
        return
    batch.has_begun = batch.trains = True
    told, group, obstacle = worker.config.batch, worker.communicator, _find_obstacle(loader, local=local, uneven=uneven)
    if obstacle and told not in ("auto", "per-worker"):
        raise UsageError(f"--batch {told}: {obstacle}; leave out --batch, and set the size of batches in the script")
    if obstacle and batch.part is not None:
        return
    if isinstance(told, int) or group.changes:
        say(worker, batch.describe(group.size, changes=group.changes))
    if batch.part is not None and worker.config.rank == 0:
        worker.sink.put(Facts({"global batch": batch.whole}))


def _find_obstacle(loader: DataLoader[Any], *, local: bool, uneven: bool) -> str:
    """Why nobody but the script can say how large batches are; empty if Hocket can."""
    if isinstance(loader.dataset, IterableDataset):
        return "the data is a stream"
    if local:
        return "each worker has data of its own (data='local')"
    if loader.batch_size is None:
        return "the script makes the batches itself (batch_sampler=, or batch_size=None)"
    return "workers of this strategy take their batches one by one, as they get ready" if uneven else ""


def say(worker: Worker, text: str) -> None:
    """Print a line about batches, once and on rank 0."""
    if text and worker.config.rank == 0 and text not in worker.training.said:
        worker.training.said.add(text)
        print(f"hocket: {text}", file=sys.stderr, flush=True)
