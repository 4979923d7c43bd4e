"""The loader that ``distribute`` returns: the same data set and settings, this rank's batches."""

from __future__ import annotations

import functools
from collections import deque
from collections.abc import Callable, Iterator, Sized
from typing import Any

import torch
from torch.utils.data import BatchSampler, DataLoader, DistributedSampler, IterableDataset, get_worker_info

from hocket.errors import UsageError
from hocket.events import Progress
from hocket.job.collectives import broadcast
from hocket.job.runtime import Runtime
from hocket.job.sharding import ShardedIndices, ShardedStream, SharedRandom, batches


def distribute_loader(runtime: Runtime, original: DataLoader[Any]) -> Any:
    """This rank's loader in place of ``original``."""
    if runtime.config.size > 1:
        return ShardedLoader(runtime, original)
    if runtime.config.events is not None:
        return WatchedLoader(runtime, original)
    _check(original)
    original.weight = WatchedLoader.weight  # the script asks for it wherever it runs
    return original


class WatchedLoader:
    """The loader of a job of one worker: as it was, but the launcher hears how far it is.

    Other attributes (``dataset``, ``batch_size``, ``sampler``, …) are those of the original loader.

    Attributes:
        weight: What the batch that was yielded last counts, relative to those of other ranks; 0 if it is a
            repeated one, which an evaluation must leave out.
    """

    weight: float = 1.0

    def __init__(self, runtime: Runtime, original: DataLoader[Any]) -> None:
        _check(original)
        self.original = original
        self._runtime = runtime
        self._epoch = 0

    def __iter__(self) -> Iterator[Any]:
        self._epoch += 1
        steps = self._length()
        for step, batch in enumerate(self.original, start=1):
            self._runtime.sink.put(Progress(self._epoch, step, steps, step * (self.original.batch_size or 1)))
            yield batch

    def __len__(self) -> int:
        length = self._length()
        if length is None:
            raise TypeError(f"{type(self.original.dataset).__name__} has no length, so its loader has none either")
        return length

    def __getattr__(self, name: str) -> Any:
        if name == "original":
            raise AttributeError(name)
        return getattr(self.original, name)

    def _length(self) -> int | None:
        try:
            return len(self.original)
        except TypeError:
            return None


class ShardedLoader(WatchedLoader):
    """Iterates over this rank's share of ``original``; every rank sees the same number of batches."""

    def __init__(self, runtime: Runtime, original: DataLoader[Any]) -> None:
        super().__init__(runtime, original)
        self._generator = torch.Generator() if original.generator is not None else None
        self._seed = int(broadcast(torch.randint(2**62, (1,))))
        self._is_stream = isinstance(original.dataset, IterableDataset)
        self._share_generators()
        self._inner = self._make_stream() if self._is_stream else self._make_indexed()

    def __iter__(self) -> Iterator[Any]:
        self._seed_data_processes()
        self._epoch += 1
        counts: deque[tuple[int, int]] = deque()
        if self._is_stream:
            self._stream.epoch = self._epoch
        else:
            self._sampler.counts = counts
        return self._iterate(iter(self._inner), counts, self._epoch)

    def _iterate(self, batches: Iterator[Any], counts: deque[tuple[int, int]], epoch: int) -> Iterator[Any]:
        runtime = self._runtime
        before, steps, samples = runtime.weight, self._length(), 0
        try:
            for step, item in enumerate(batches, start=1):
                batch, here, everywhere = item if self._is_stream else (item, *counts.popleft())
                self.weight = here * runtime.config.size / everywhere
                runtime.weigh(self.weight)
                samples += everywhere
                runtime.sink.put(Progress(epoch, step, steps, samples))
                yield batch
        finally:
            self.weight = 1.0
            runtime.weigh(before)

    def _length(self) -> int | None:
        original, size = self.original, self._runtime.config.size
        if self._is_stream:
            if not isinstance(original.dataset, Sized):
                return None
            return batches(len(original.dataset), size * (original.batch_size or 1), original.drop_last)
        try:
            return len(self._sampler)
        except TypeError:
            return None

    def _make_indexed(self) -> DataLoader[Any]:
        original = self.original
        ready_made = original.batch_size is None  # one sample at a time, or a batch sampler of the user's own
        source = original.sampler if original.batch_sampler is None or not ready_made else original.batch_sampler
        config = self._runtime.config
        self._sampler = ShardedIndices(
            source,
            original.batch_size,
            original.drop_last,
            config.rank,
            config.size,
            SharedRandom(self._seed),
        )
        batched = original.batch_sampler is not None
        return self._make(
            original.dataset,
            collate_fn=original.collate_fn,
            worker_init_fn=original.worker_init_fn,
            **({"batch_sampler": self._sampler} if batched else {"sampler": self._sampler, "batch_size": None}),
        )

    def _make_stream(self) -> DataLoader[Any]:
        original, config = self.original, self._runtime.config
        assert isinstance(original.dataset, IterableDataset)
        self._stream = ShardedStream(
            original.dataset,
            original.batch_size,
            original.drop_last,
            config.rank,
            config.size,
            original.collate_fn,
            self._seed,
        )
        return self._make(
            self._stream,
            batch_size=None,
            collate_fn=_keep,
            worker_init_fn=functools.partial(_init_stream_process, original.worker_init_fn),
        )

    def _make(self, dataset: Any, **options: Any) -> DataLoader[Any]:
        original = self.original
        if original.num_workers:
            options |= {
                "timeout": original.timeout,
                "multiprocessing_context": original.multiprocessing_context,
                "prefetch_factor": original.prefetch_factor,
                "persistent_workers": original.persistent_workers,
            }
        return DataLoader(
            dataset,
            num_workers=original.num_workers,
            pin_memory=original.pin_memory,
            generator=self._generator,
            **options,
        )

    def _share_generators(self) -> None:
        """Give the user's generators the state that they have on rank 0."""
        found = [self.original.generator, getattr(self.original.sampler, "generator", None)]
        batch_sampler = self.original.batch_sampler
        found += [
            getattr(batch_sampler, "generator", None),
            getattr(getattr(batch_sampler, "sampler", None), "generator", None),
        ]
        for generator in {id(g): g for g in found if isinstance(g, torch.Generator)}.values():
            generator.set_state(broadcast(generator.get_state()))

    def _seed_data_processes(self) -> None:
        """Draw from the user's generator what PyTorch would draw, and make of it a different seed for each rank."""
        generator = self.original.generator
        kept = self._inner.persistent_workers and self._inner._iterator is not None
        if generator is not None and self._generator is not None and not kept:
            base = int(torch.empty((), dtype=torch.int64).random_(generator=generator))
            self._generator.manual_seed(base + self._runtime.config.rank)


def _check(loader: DataLoader[Any]) -> None:
    if not isinstance(loader, DataLoader):
        raise UsageError(f"distribute() takes a torch DataLoader, not {type(loader).__name__}")
    if isinstance(loader.sampler, DistributedSampler):
        raise UsageError(
            "the loader has a DistributedSampler, and Hocket divides the data by itself: make it with shuffle=True or "
            "a plain sampler instead"
        )
    if (
        loader.batch_sampler is not None
        and loader.batch_size is not None
        and type(loader.batch_sampler) is not BatchSampler
    ):
        raise UsageError(
            f"cannot divide the batches of {type(loader.batch_sampler).__name__}: pass it as batch_sampler="
        )


def _keep(item: Any) -> Any:
    return item


def _init_stream_process(init: Callable[[int], None] | None, worker: int) -> None:
    """Show the user's own data set to code that asks ``get_worker_info()`` for it."""
    info = get_worker_info()
    assert info is not None
    object.__setattr__(info, "dataset", info.dataset.dataset)  # type: ignore[attr-defined]
    if init is not None:
        init(worker)
