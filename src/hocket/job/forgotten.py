"""Warns of what a script seems to have forgotten, so that training would end well with a useless result.

At the first step of a training: a model or a loader that was not distributed, a checkpoint that nobody loads, a loss
that is a sum over the batch. At ``hocket.init()``: copies of the script that do not know of each other, because they
were not started by Hocket.
"""

from __future__ import annotations

import gc
import sys
from typing import TYPE_CHECKING

from torch.optim import Optimizer
from torch.utils.data import DistributedSampler, IterableDataset
from torch.utils.data.dataloader import _BaseDataLoaderIter

from hocket.capture import summed_losses

if TYPE_CHECKING:
    from hocket.job.worker import Worker
    from hocket.strategies.base import Strategy

import json
from collections import Counter
from collections.abc import Mapping
from pathlib import Path
from typing import NamedTuple


class Forgotten:
    """One line on rank 0's standard error for each thing that looks forgotten; nothing is collective.

    Attributes:
        has_met: Whether the script has made calls of all ranks.
        resumes: Whether the script has called ``hocket.resume()``.
        asks_for_checkpoints: Whether the training loop says when a step is complete.
    """

    def __init__(self, worker: Worker) -> None:
        self._worker = worker
        self.has_met = self.resumes = self.asks_for_checkpoints = False
        self._is_new, self._is_first, self._is_sum = True, True, False

    def look(self, optimizer: Optimizer) -> None:
        """Before a step of any optimizer; cheap after the first one of a distributed model."""
        if not self._is_first:
            return
        training, config = self._worker.training, self._worker.config
        if any(optimizer in known for known in training.guard.optimizers.values()):
            self._is_first = False
            if config.checkpoint is not None and not self.resumes:
                self._say(
                    f"--checkpoint {config.checkpoint} was given, and hocket.resume() was not called before "
                    "the first step: nothing is loaded or saved; call it after hocket.distribute(), with loader=loader"
                )
            if config.size > 1 and not training.loaders and _iterates():
                self._say(
                    "the script takes its batches from a DataLoader that was not given to hocket.distribute(): unless "
                    f"it divides the data by itself, each of the {config.size} workers trains on all of it"
                )
        elif self._is_new and config.size > 1 and not training.models and not self.has_met:
            self._is_new = False
            self._say(
                f"optimizer.step() before any hocket.distribute(), on {config.size} workers: each trains a model of "
                "its own; call hocket.distribute(model, optimizer, loader) before the training loop"
            )

    def watch_losses(self, strategy: Strategy) -> None:
        """Losses are said to be means: look whether the first ones of ``strategy`` are sums."""
        config, spec = self._worker.config, strategy.at_work.spec
        # Where workers advance unevenly, gradients are not averaged; some strategies add up losses by themselves.
        if config.rank == 0 and config.size > 1 and not spec.is_uneven and not spec.has_reduction:
            summed_losses.watch(strategy.collector, self._say_sum)

    def _say_sum(self, loss: str) -> None:
        size = self._worker.config.size
        if not self._is_sum:
            self._is_sum = True
            self._say(
                f"the loss seems to be a sum over the batch ({loss} with reduction='sum'), of which the average over "
                f"{size} workers is 1/{size} of the sum over all their samples: add reduction='sum' to "
                "hocket.distribute(), or divide the loss by the number of samples in the batch"
            )

    def look_back(self) -> None:
        """The script ends: even if it called ``resume()``, something may have been forgotten."""
        config, step = self._worker.config, self._worker.training.counts.step
        if self.resumes and not self.asks_for_checkpoints and step >= config.checkpoint_every:
            self._say(
                f"--checkpoint {config.checkpoint} was given, and nothing was saved: call hocket.resume(…, "
                "loader=loader) before the training loop, or its result's done() after each step"
            )

    def _say(self, text: str) -> None:
        if self._worker.config.rank == 0:
            print(f"hocket: {text}", file=sys.stderr, flush=True)


def _iterates() -> bool:
    """Whether somebody iterates over a DataLoader of torch in which all ranks may have the same samples."""
    for each in gc.get_objects():
        if issubclass(type(each), _BaseDataLoaderIter) and not isinstance(each._dataset, IterableDataset):
            sampler = getattr(each._index_sampler, "sampler", each._index_sampler)
            if not isinstance(sampler, DistributedSampler):
                return True
    return False


_STEP = 1 << 31  # from here on, Slurm's step numbers are no steps of srun but batch scripts and shells


class Copies(NamedTuple):
    """How many copies there seem to be, which one this is, by what sign, and on which hosts if that is known."""

    total: int
    number: int
    sign: str
    hosts: dict[str, int] | None = None  # copies by host; empty if there are several unknown hosts


def warn_of_copies(environ: Mapping[str, str]) -> None:
    """Say a line on standard error if the environment shows that this process is one of several; one copy says it."""
    found = find_copies(environ)
    if found is None or found.total < 2:
        return
    speaker = 0
    many = str(found.total)
    if found.sign == "PMIX_RANK":  # it does not say how many copies there are
        speaker, many = 1, "several"
    # What mpirun or srun starts has one screen; what TF_CONFIG describes may have as many as there are hosts.
    if found.number == speaker or found.sign == "TF_CONFIG":
        print(
            f"hocket: this seems to be one of {many} copies of the script ({found.sign}), and each of them trains "
            f"alone, on all the data: make them one job with '{_command(found)}'",
            file=sys.stderr,
            flush=True,
        )


def find_copies(environ: Mapping[str, str]) -> Copies | None:
    """What the environment says of copies; None if it says nothing."""
    for sign, rank, here in (
        ("OMPI_COMM_WORLD_SIZE", "OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_LOCAL_SIZE"),
        ("PMI_SIZE", "PMI_RANK", "MPI_LOCALNRANKS"),
    ):
        if count := _number(environ, sign):
            spread = 0 < _number(environ, here) < count
            return Copies(count, _number(environ, rank), f"{sign}={count}", {} if spread else None)
    if "SLURM_PROCID" in environ and 0 <= _number(environ, "SLURM_STEP_ID", -1) < _STEP:
        count = _number(environ, "SLURM_STEP_NUM_TASKS") or _number(environ, "SLURM_NTASKS")
        spread = (_number(environ, "SLURM_STEP_NUM_NODES") or _number(environ, "SLURM_NNODES")) > 1
        return Copies(count, _number(environ, "SLURM_PROCID"), f"SLURM_NTASKS={count}", {} if spread else None)
    if "PMIX_RANK" in environ:
        number = _number(environ, "PMIX_RANK")
        return Copies(number + 1, number, "PMIX_RANK")  # at least so many
    return _of_tensorflow(environ.get("TF_CONFIG", ""))


def _of_tensorflow(text: str) -> Copies | None:
    try:
        told = json.loads(text)
        tasks = [str(address) for addresses in told["cluster"].values() for address in addresses]
    except (ValueError, KeyError, TypeError, AttributeError):
        return None
    hosts = Counter(address.rpartition(":")[0] or address for address in tasks)
    return Copies(len(tasks), 0, "TF_CONFIG", dict(hosts) if len(hosts) > 1 else None)


def _command(found: Copies) -> str:
    script = Path(sys.argv[0]).name or "train.py"
    if found.hosts is None:
        return f"hocket run -n {found.total} {script}"
    hosts = ",".join(f"{host}:{count}" for host, count in found.hosts.items())
    return f"hocket run -H {hosts or 'HOST1:N1,HOST2:N2'} {script}"


def _number(environ: Mapping[str, str], name: str, default: int = 0) -> int:
    text = environ.get(name, "")
    return int(text) if text.isdecimal() else default
