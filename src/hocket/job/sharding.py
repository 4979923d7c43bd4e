"""Which samples of a global batch belong to which rank.

In global step t the ranks together hold exactly the samples that one process with a batch as large as all of
theirs would hold. A last batch that is smaller is spread evenly; a rank left without a sample repeats one with
weight 0.
"""

from __future__ import annotations

import random
import sys
from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from itertools import islice
from typing import Any, TypeVar

import torch
from torch.utils.data import IterableDataset, Sampler, get_worker_info

T = TypeVar("T")

_AHEAD = 64  # steps


def share(items: Sequence[T], rank: int, size: int) -> Sequence[T]:
    """The part of ``items`` for ``rank``: contiguous, and as even as possible; may be empty."""
    each, more = divmod(len(items), size)
    start = rank * each + min(rank, more)
    return items[start : start + each + (rank < more)]


class SharedRandom:
    """A random state that is the same on all ranks, put in place of the process's own for a moment.

    It covers torch, ``random`` and, where it is loaded, numpy.
    """

    def __init__(self, seed: int) -> None:
        self._seed = seed
        self._torch = torch.Generator().manual_seed(seed).get_state()
        self._python = random.Random(seed).getstate()
        self._numpy: Any = None

    def __enter__(self) -> None:
        numpy = sys.modules.get("numpy")
        self._own = torch.get_rng_state(), random.getstate(), numpy.random.get_state() if numpy else None
        torch.set_rng_state(self._torch)
        random.setstate(self._python)
        if numpy:
            if self._numpy is None:
                numpy.random.seed(self._seed % 2**32)
            else:
                numpy.random.set_state(self._numpy)

    def __exit__(self, *_: object) -> None:
        numpy = sys.modules.get("numpy")
        self._torch, self._python = torch.get_rng_state(), random.getstate()
        torch.set_rng_state(self._own[0])
        random.setstate(self._own[1])
        if numpy and self._own[2] is not None:
            self._numpy = numpy.random.get_state()
            numpy.random.set_state(self._own[2])


class ShardedIndices(Sampler[Any]):
    """The batches (lists of indices, or what a batch sampler yields) of one rank.

    Args:
        source: Yields indices, of which ``batch_size`` make a batch, or ready batches if that is None.
    """

    def __init__(
        self,
        source: Iterable[Any],
        batch_size: int | None,
        drop_last: bool,
        rank: int,
        size: int,
        shared_random: SharedRandom,
    ) -> None:
        self._source, self._batch_size, self._drop_last = source, batch_size, drop_last
        self._rank, self._size = rank, size
        self._random = shared_random
        self.counts: deque[tuple[int, int]] = deque()
        """The next iterator fills it with (samples here, samples on all ranks) for every batch."""

    def __iter__(self) -> Iterator[Any]:
        return self._iterate(self.counts)

    def _iterate(self, counts: deque[tuple[int, int]]) -> Iterator[Any]:
        whole = self._size * (self._batch_size or 1)
        for batch in self._global_batches(whole):
            if self._drop_last and len(batch) < whole:
                return
            mine = share(batch, self._rank, self._size)
            if self._batch_size is None:
                sizes = [_samples(item) for item in batch]
                counts.append((sizes[self._rank] if mine else 0, sum(sizes)))
                yield mine[0] if mine else batch[0]
            else:
                counts.append((len(mine), len(batch)))
                yield list(mine) or batch[:1]

    def _global_batches(self, whole: int) -> Iterator[list[Any]]:
        """The samples of all ranks in one step; drawn with the random state that all share.

        To put that in place takes longer than many indices, so PyTorch's samplers, which nothing during an epoch
        influences, are read ahead.
        """
        ahead = _AHEAD if type(self._source).__module__.startswith("torch.utils.data") else 1
        with self._random:
            indices = iter(self._source)
        while True:
            with self._random:
                block = list(islice(indices, ahead * whole))
            if not block:
                return
            for start in range(0, len(block), whole):
                yield block[start : start + whole]

    def __len__(self) -> int:
        whole = self._size * (self._batch_size or 1)
        return batches(len(self._source), whole, self._drop_last)  # type: ignore[arg-type]


class ShardedStream(IterableDataset[Any]):
    """The batches of one rank from a stream that every rank reads whole; yields (batch, samples here, samples in all).

    Batches are collated here, so inside a data-loader process if there are any. Each such process deals out its
    own stream, as PyTorch does. What the stream draws at random is the same on all ranks.
    """

    def __init__(
        self,
        dataset: IterableDataset[Any],
        batch_size: int | None,
        drop_last: bool,
        rank: int,
        size: int,
        collate: Any,
        seed: int,
    ) -> None:
        self.dataset = dataset
        self._batch_size, self._drop_last = batch_size, drop_last
        self._rank, self._size, self._collate = rank, size, collate
        self._seed = seed
        self.epoch = 0
        self._random: SharedRandom | None = None

    def __iter__(self) -> Iterator[tuple[Any, int, int]]:
        info = get_worker_info()
        if info is None or self._random is None:  # a process that persists goes on with the state that it has
            self._random = SharedRandom(self._seed + 1_000_003 * self.epoch + (info.id if info else 0))
        with self._random:
            stream = iter(self.dataset)
        whole = self._size * (self._batch_size or 1)
        while True:
            with self._random:
                batch = list(islice(stream, whole))
            if not batch or (self._drop_last and len(batch) < whole):
                return
            mine = share(batch, self._rank, self._size)
            shown = mine or batch[:1]
            yield self._collate(shown[0] if self._batch_size is None else list(shown)), len(mine), len(batch)


def _samples(batch: Any) -> int:
    """How many samples an item of a batch sampler, or of a sampler without batches, stands for."""
    counts = hasattr(batch, "__len__") and not isinstance(batch, str) and getattr(batch, "ndim", None) != 0
    return len(batch) if counts else 1


def batches(samples: int, whole: int, drop_last: bool) -> int:
    """How many batches of ``whole`` samples there are."""
    return samples // whole if drop_last else -(-samples // whole)
