"""What can be seen at the first step of a training that would otherwise end well, with a useless result."""

from __future__ import annotations

import gc
import sys
from typing import TYPE_CHECKING

from torch.optim import Optimizer
from torch.utils.data import DistributedSampler, IterableDataset
from torch.utils.data.dataloader import _BaseDataLoaderIter

if TYPE_CHECKING:
    from hocket.job.runtime import Runtime


class FirstStep:
    """One line on rank 0's standard error for each thing that looks forgotten; nothing is collective."""

    def __init__(self, runtime: Runtime) -> None:
        self._runtime = runtime
        self._is_new, self._is_first = True, True

    def look(self, optimizer: Optimizer) -> None:
        """Before a step of any optimizer; cheap after the first one of a distributed model."""
        if not self._is_first:
            return
        runtime, workers = self._runtime, self._runtime.config.size
        if any(optimizer in known for known in runtime.guard.optimizers.values()):
            self._is_first = False
            if runtime.config.checkpoint is not None and not runtime.resumes:
                self._say(
                    f"--checkpoint {runtime.config.checkpoint} was given, and hocket.resume() was not called before "
                    "the first step: nothing is loaded or saved; call it after hocket.distribute(), with loader=loader"
                )
            if workers > 1 and not runtime.loaders and _iterates():
                self._say(
                    "the script takes its batches from a DataLoader that was not given to hocket.distribute(): unless "
                    f"it divides the data by itself, each of the {workers} workers trains on all of it"
                )
        elif self._is_new and workers > 1 and not runtime.models and not runtime.has_met:
            self._is_new = False
            self._say(
                f"optimizer.step() before any hocket.distribute(), on {workers} workers: each trains a model of its "
                "own; call hocket.distribute(model, optimizer, loader) before the training loop"
            )

    def look_back(self) -> None:
        """The script ends: where there was a call of ``resume()``, something may have been forgotten all the same."""
        runtime, config = self._runtime, self._runtime.config
        if runtime.resumes and not runtime.asks_for_checkpoints and runtime.step >= config.checkpoint_every:
            self._say(
                f"--checkpoint {config.checkpoint} was given, and nothing was saved: call hocket.resume(…, "
                "loader=loader) before the training loop, or its result's done() after each step"
            )

    def _say(self, text: str) -> None:
        if self._runtime.config.rank == 0:
            print(f"hocket: {text}", file=sys.stderr, flush=True)


def _iterates() -> bool:
    """Whether somebody iterates over a DataLoader of torch in which all ranks may have the same samples."""
    for each in gc.get_objects():
        if issubclass(type(each), _BaseDataLoaderIter) and not isinstance(each._dataset, IterableDataset):
            sampler = getattr(each._index_sampler, "sampler", each._index_sampler)
            if not isinstance(sampler, DistributedSampler):
                return True
    return False
