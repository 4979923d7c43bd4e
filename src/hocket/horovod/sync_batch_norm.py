"""Batch norm over the batches of all ranks of a process set."""

from __future__ import annotations

import torch

from hocket.horovod.operations import Sum, allgather_async, allreduce_async_, synchronize
from hocket.horovod.process_sets import ProcessSet, global_process_set
from hocket.job import batchnorm


class SyncBatchNorm(batchnorm.SyncBatchNorm):
    """Batch norm whose statistics are those of all ranks; in training every rank must call it together.

    Args:
        num_features: How many channels inputs have.
        eps: See ``torch.nn.BatchNorm2d``, like those that follow.
        momentum: See there.
        affine: See there.
        track_running_stats: See there.
        process_set: The ranks that take part.
    """

    def __init__(
        self, num_features: int, eps: float = 1e-5, momentum: float = 0.1, affine: bool = True,
        track_running_stats: bool = True, process_set: ProcessSet = global_process_set,
    ) -> None:  # fmt: skip
        super().__init__(num_features, eps, momentum, affine, track_running_stats)
        self.process_set = process_set

    @property
    def ranks(self) -> int:
        return self.process_set.size()

    def gather(self, part: torch.Tensor) -> torch.Tensor:
        found: torch.Tensor = synchronize(allgather_async(part.unsqueeze(0), process_set=self.process_set))
        return found

    def add_up(self, sums: torch.Tensor) -> None:
        synchronize(allreduce_async_(sums, op=Sum, process_set=self.process_set))
