"""Data without indices: which part of a stream belongs to which process of which rank.

A data set that asks ``get_worker_info()`` divides itself: it is told a number of its own in every process of every
rank, and each rank then has a stream of its own length. For any other data set, every process reads the whole stream
and keeps its part of every global batch, exactly as for data sets with indices.

Where the length differs, ranks tell each other in every step how many samples they have. A rank whose data has ended
goes on with a batch that it has had before, with weight 0, until the data of all has ended; so everyone takes the same
number of steps, and every average is over the samples that are there.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from itertools import count, islice
from typing import Any

import torch
from torch.utils.data import DataLoader, IterableDataset
from torch.utils.data._utils import worker as torch_worker

from hocket.comm.communicator import Communicator
from hocket.errors import UsageError
from hocket.job.loader.division import least, share
from hocket.job.loader.passes import Counts
from hocket.job.packing import pack, unpack
from hocket.job.randomness import RandomState, SharedRandom, mix


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
    """Return an item as it is: what comes from the stream is collated already."""
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
    """Reads a data set, and shows it its ``_Place`` while it is read."""

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


Item = tuple[Any, Counts]


def level(communicator: Communicator, items: Iterator[Item], is_uneven: Callable[[], bool]) -> Iterator[Item]:
    """``items``, with as many on all ranks as on the one with the most; every step is collective.

    Args:
        communicator: The communicator of all ranks.
        items: The items of this rank.
        is_uneven: Asked after the first item: whether the ranks may have different numbers of items.
    """
    item = next(items, None)
    if not is_uneven():
        while item is not None:
            yield item
            item = next(items, None)
        return
    spare: Any = None
    while True:
        if item is not None and spare is None:
            spare = item[0]
        here = item[1].here if item is not None else 0
        rows = communicator.allgather(torch.tensor([here, spare is not None])).tolist()
        if not any(count for count, _ in rows):
            return
        if not all(has for _, has in rows):
            lender = next(rank for rank, (_, has) in enumerate(rows) if has)
            spare = _lend(communicator, spare, lender)
        everywhere = sum(count for count, _ in rows)
        if item is None:
            yield spare, Counts(0, everywhere, 0)
        else:
            yield item[0], item[1]._replace(everywhere=everywhere)
            item = next(items, None)


def _lend(communicator: Communicator, spare: Any, lender: int) -> Any:
    """Give ranks that never had a batch one of rank ``lender``'s; collective."""
    tensors: dict[str, torch.Tensor] = {}
    described = b""
    if communicator.rank == lender:
        try:
            skeleton = pack(spare, "batch", tensors)
        except (UsageError, TypeError):
            skeleton = None
        kinds = [(name, str(t.dtype).removeprefix("torch."), list(t.shape)) for name, t in tensors.items()]
        described = json.dumps([skeleton, kinds]).encode()
    skeleton, kinds = json.loads(communicator.gather_bytes(described)[lender])
    if skeleton is None:
        raise UsageError(
            "a rank has no data at all, and the batches of the others cannot be lent to it, because they hold more "
            "than tensors and plain data: give every rank at least one batch"
        )
    for name, dtype, shape in kinds:
        lent = tensors[name].contiguous() if name in tensors else torch.empty(shape, dtype=getattr(torch, dtype))
        communicator.broadcast(lent, lender)
        tensors[name] = lent
    return unpack(skeleton, tensors.__getitem__) if spare is None else spare
