"""A sampler that deals what is left of an epoch to the workers that there are."""

from __future__ import annotations

import random
from collections.abc import Iterator, Sized
from typing import Any

import torch

from hocket.horovod.basics import rank, size


class ElasticSampler(torch.utils.data.Sampler[int]):
    """This rank's samples of those that nobody has processed in this epoch.

    As many for each rank: if they do not come out even, some are repeated. The script says with ``record_batch`` what
    was processed, and with ``set_epoch`` that an epoch begins; give the sampler to a ``TorchState``.

    Args:
        dataset: What samples are of.
        shuffle: Whether their order is random, another one in each epoch.
        seed: What the order follows from; the same on all ranks.
    """

    def __init__(self, dataset: Sized, shuffle: bool = True, seed: int = 0) -> None:
        self.dataset, self.shuffle, self.seed = dataset, shuffle, seed
        self.epoch = self.processed_num = 0
        self.remaining_indices: list[int] = []
        self.indices: list[int] = []
        self.reset()

    def set_epoch(self, epoch: int) -> None:
        """An epoch begins, in which nothing is processed."""
        self.epoch, self.processed_num = epoch, 0
        self.reset()

    def record_batch(self, batch_idx: int, batch_size: int) -> None:
        """Every rank has processed a batch of this size."""
        self.processed_num = min(self.processed_num + batch_size * self.num_replicas, len(self.dataset))

    def get_indices(self, batch_idx: int, batch_size: int) -> list[int]:
        """The samples of one of this rank's batches."""
        return self.indices[batch_idx * batch_size : (batch_idx + 1) * batch_size]

    def state_dict(self) -> dict[str, Any]:
        """What ``load_state_dict`` takes."""
        return {"epoch": self.epoch, "processed_num": self.processed_num}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Have the epoch and what was processed from there, and deal the rest anew."""
        self.epoch, self.processed_num = state_dict["epoch"], state_dict["processed_num"]
        self.reset()

    def reset(self) -> None:
        """Deal what is left to the ranks that there are."""
        self.num_replicas, self.rank = size(), rank()
        order = list(range(len(self.dataset)))
        if self.shuffle:
            random.Random(self.seed + self.epoch).shuffle(order)
        self.remaining_indices = order[self.processed_num :]
        self.num_samples = -(-len(self.remaining_indices) // self.num_replicas)
        self.total_size = self.num_samples * self.num_replicas
        left = list(self.remaining_indices)
        while left and len(left) < self.total_size:
            left += self.remaining_indices[: self.total_size - len(left)]
        self.indices = left[self.rank :: self.num_replicas]

    def __iter__(self) -> Iterator[int]:
        return iter(self.indices)

    def __len__(self) -> int:
        return len(self.indices)
