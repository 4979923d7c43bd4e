"""Iterable data sets: which part of a stream belongs to which process of which rank.

A data set that asks ``get_worker_info()`` divides itself: it is told a number of its own in every process of every
rank, and each rank then has a stream of its own length. Of any other, every process reads the whole stream and
keeps its part of every global batch, exactly as for data sets with indices.
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import count, islice
from typing import Any

from torch.utils.data import DataLoader, IterableDataset
from torch.utils.data._utils import worker as torch_worker

from hocket.job.data.sharding import Counts, least, share
from hocket.job.randomness import RandomState, SharedRandom, mix

Item = tuple[Any, Counts]


class ShardedStream(IterableDataset[Any]):
    """The batches of one rank from a stream: (batch, counts), and None where the stream divides itself.

    Batches are collated here, so inside a data-loader process if there are any.
    """

    def __init__(self, original: DataLoader[Any], rank: int, size: int, seed: int) -> None:
        assert isinstance(original.dataset, IterableDataset)
        self.dataset = original.dataset
        self._batch_size, self._drop_last = original.batch_size, original.drop_last
        self._rank, self._size, self._collate, self.seed = rank, size, original.collate_fn, seed
        self._epoch, self._taken, self._passes = 0, 0, 0

    def prepare(self, epoch: int, taken: int) -> None:
        """The next pass has this number, and passes over the first ``taken`` samples."""
        self._epoch, self._taken, self._passes = epoch, taken, 0

    def __iter__(self) -> Iterator[Item | None]:
        # A data-loader process that persists does not hear of later passes, so it counts them.
        epoch, taken = self._epoch + self._passes, 0 if self._passes else self._taken
        self._passes += 1
        info = torch_worker._worker_info
        process, processes = (info.id, info.num_workers) if info is not None else (0, 1)
        place = _Place(self._rank * processes + process, self._size * processes, info, self.dataset)
        # What a stream draws must be the same wherever the whole of it is read, and when it is read again.
        stream = _Watched(self.dataset, place, SharedRandom(RandomState.from_seed(mix(self.seed, epoch))))
        first = stream.take(1)
        if place.was_asked:
            stream.random = SharedRandom(RandomState.from_seed(mix(self.seed, epoch, place.number)))
            return self._divided(stream, first)
        return self._whole(stream, first, taken, process, processes)

    def _whole(
        self, stream: _Watched, first: list[Any], taken: int, process: int, processes: int
    ) -> Iterator[Item | None]:
        """Every process reads everything; the processes of a rank take global batches in turn."""
        whole = self._size * (self._batch_size or 1)
        if taken:
            first = []
            stream.skip(taken - 1)
        for number in count():
            batch = first + stream.take(whole - len(first))
            first = []
            taken += len(batch)
            if not batch or (self._drop_last and len(batch) < whole):
                return
            if number % processes == process:
                fewest = least(self._batch_size)
                mine = share(batch, self._rank, self._size, fewest)
                shown = mine or batch[:fewest]
                made = self._collate(shown[0] if self._batch_size is None else list(shown))
                yield made, Counts(len(mine), len(batch), taken)

    def _divided(self, stream: _Watched, first: list[Any]) -> Iterator[Item | None]:
        """The data set yields what belongs to this process only."""
        size = self._batch_size or 1
        yield None  # tells the rank, even if nothing else comes, that ranks do not know of each other's batches
        while batch := first + stream.take(size - len(first)):
            first = []
            if not self._drop_last or len(batch) == size:
                yield self._collate(batch[0] if self._batch_size is None else batch), Counts(len(batch), 0, 0)


def as_it_is(item: Any) -> Any:
    """What comes from the stream is collated already."""
    return item


class _Place:
    """What the data set is told of where it runs: PyTorch's WorkerInfo, with numbers over all ranks."""

    def __init__(self, number: int, total: int, info: Any, dataset: Any) -> None:
        self.number, self.total, self._info = number, total, info
        self.dataset = dataset
        self.was_asked = False

    @property
    def id(self) -> int:
        self.was_asked = True
        return self.number

    @property
    def num_workers(self) -> int:
        self.was_asked = True
        return self.total

    @property
    def seed(self) -> int:
        return self._info.seed if self._info is not None else 0


class _Watched:
    """Reads a data set that believes in its place while it is read."""

    def __init__(self, dataset: IterableDataset[Any], place: _Place, random: SharedRandom) -> None:
        self._place, self.random = place, random
        self._items: Iterator[Any] | None = None
        self._dataset = dataset

    def skip(self, number: int) -> None:
        """Pass over items."""
        while number > 0 and self.take(min(number, 1024)):
            number -= 1024

    def take(self, number: int) -> list[Any]:
        """The next items, as many as there are."""
        real = torch_worker._worker_info
        shown: Any = self._place if self._place.total > 1 or real is not None else None
        torch_worker._worker_info = shown
        try:
            with self.random:
                if self._items is None:
                    self._items = iter(self._dataset)
                return list(islice(self._items, number))
        finally:
            torch_worker._worker_info = real
