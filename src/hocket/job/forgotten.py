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

from collections.abc import Mapping
from pathlib import Path


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


def warn_of_copies(environ: Mapping[str, str]) -> None:
    """Say a line on standard error if this process is one of several, and nothing says how many; one copy says it."""
    if environ.get("PMIX_RANK") == "1":
        script = Path(sys.argv[0]).name or "train.py"
        print(
            "hocket: this seems to be one of several copies of the script (PMIX_RANK), and each of them trains alone, "
            f"on all the data: make them one job with 'hocket run -n 2 {script}', or set RANK, WORLD_SIZE, MASTER_ADDR "
            "and MASTER_PORT",
            file=sys.stderr,
            flush=True,
        )
