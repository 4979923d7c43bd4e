"""Inspects the loader that a script gives to ``distribute``: its counts, generators and samplers."""

from __future__ import annotations

import functools
import zlib
from collections.abc import Sized
from typing import Any

import torch
from torch.utils.data import BatchSampler, DataLoader, Dataset, DistributedSampler, IterableDataset, Subset

from hocket.comm.communicator import Communicator
from hocket.errors import MismatchError, UsageError
from hocket.job.loader.passes import Plan
from hocket.job.loader.sharding import SeededDataset, batches, show_own_dataset


def check(loader: DataLoader[Any]) -> None:
    """Raise if ``loader`` cannot be divided among workers."""
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


def check_divisible(loader: DataLoader[Any], group: Communicator, *, local: bool, training: bool | None) -> None:
    """Have the workers of ``group`` stay as they are if ``loader`` cannot be divided anew among others."""
    is_stream = isinstance(loader.dataset, IterableDataset)
    source = loader.batch_sampler if loader.batch_size is None and loader.batch_sampler is not None else loader.sampler
    is_fixed = training is not False and (local or not isinstance(source, Sized))
    if group.changes and ((is_stream and not local) or is_fixed):
        group.stay(
            "a loader is over a stream, over data of each worker's own, or has a sampler without a length, so nobody "
            "could take the place of a lost worker: use a data set with indices"
        )


def remake(loader: DataLoader[Any], dataset: Any, **options: Any) -> DataLoader[Any]:
    """A loader over another data set (and sampler, in ``options``), with processes like those of ``loader``."""
    if loader.num_workers:
        options |= {
            "timeout": loader.timeout,
            "multiprocessing_context": loader.multiprocessing_context,
            "prefetch_factor": loader.prefetch_factor,
            "persistent_workers": loader.persistent_workers,
            "worker_init_fn": functools.partial(show_own_dataset, init=loader.worker_init_fn),
        }
    return DataLoader(dataset, num_workers=loader.num_workers, pin_memory=loader.pin_memory, **options)


def remake_with(loader: DataLoader[Any], indices: Any, generator: torch.Generator | None) -> DataLoader[Any]:
    """A loader over the same data set that takes its samples, or whole batches, as ``indices`` says."""
    dataset = SeededDataset(loader.dataset) if loader.num_workers else loader.dataset
    batched = loader.batch_sampler is not None
    how = {"batch_sampler": indices} if batched else {"sampler": indices, "batch_size": None}
    return remake(loader, dataset, collate_fn=loader.collate_fn, generator=generator, **how)


def check_kind(state: dict[str, Any], *, has_indices: bool) -> None:
    """Raise if the state of a loader is of one over a data set of another kind."""
    if (state["start"] is not None) != has_indices:
        raise UsageError(
            "the checkpoint's loader is over a data set of another kind (with indices, or iterable): resume with the "
            "loader that was saved"
        )


def count_samples(loader: DataLoader[Any], whole: int) -> int | None:
    """How many samples a pass over the loader's data has, ``whole`` at a time, if its sampler tells."""
    indices = getattr(loader, "sampler", None)
    if not isinstance(indices, Sized) or loader.batch_size is None:
        return None
    return len(indices) // whole * whole if loader.drop_last else len(indices)


def count_batches(loader: DataLoader[Any], indices: Any, whole: int, local_to: Communicator | None) -> int | None:
    """How many batches one pass over the loader's data has: as many as ``indices``, if given; None if unknown.

    Args:
        loader: The loader of the script.
        indices: The indices of this rank; None for a stream.
        whole: How many samples all workers together take at once.
        local_to: The communicator, if each worker has data of its own: then the most of any worker; collective.
    """
    length: int | None = None
    try:
        if indices is not None:
            length = len(indices)
        elif isinstance(loader.dataset, Sized):
            length = batches(len(loader.dataset), whole, loader.drop_last)
    except TypeError:
        pass
    if local_to is None:
        return length
    lengths = local_to.gather_data(length)
    return None if None in lengths else max(lengths)


def find_generators(loader: DataLoader[Any]) -> list[torch.Generator]:
    """The generators that the loader's samplers draw from, each once."""
    batch_sampler = loader.batch_sampler
    found = [
        loader.generator,
        getattr(loader.sampler, "generator", None),
        getattr(batch_sampler, "generator", None),
        getattr(getattr(batch_sampler, "sampler", None), "generator", None),
    ]
    return list({id(g): g for g in found if isinstance(g, torch.Generator)}.values())


def seed_processes(
    loader: DataLoader[Any], inner: DataLoader[Any], generator: torch.Generator | None, rank: int
) -> None:
    """Draw from the user's generator what PyTorch would draw, and make of it a different seed for each rank."""
    kept = inner.persistent_workers and inner._iterator is not None
    if loader.generator is not None and generator is not None and not kept:
        base = int(torch.empty((), dtype=torch.int64).random_(generator=loader.generator))
        generator.manual_seed(base + rank)


def agree(communicator: Communicator, loader: DataLoader[Any], generators: list[torch.Generator]) -> None:
    """Give ``generators`` the states that they have on rank 0; raise if data sets seem to differ. Collective."""
    check_same_data(communicator, loader)
    for generator in generators:
        state = generator.get_state()
        communicator.broadcast(state, 0)
        generator.set_state(state)


def check_same_data(communicator: Communicator, loader: DataLoader[Any]) -> None:
    """Raise on all ranks if their data sets differ as far as that shows; collective."""
    described = communicator.gather_data(_describe(loader.dataset))
    for rank, other in enumerate(described):
        if other != described[0]:
            raise MismatchError(
                f"the data sets differ: rank 0 has {described[0]}, rank {rank} has {other}; make random splits before "
                "hocket.distribute() or with a seeded generator, or pass data='local' if every rank has its own data"
            )


def _describe(dataset: Dataset[Any]) -> str:
    length = f" with {len(dataset):,} samples" if isinstance(dataset, Sized) else ""
    if type(dataset) is Subset:
        chosen = zlib.crc32(repr(list(dataset.indices)).encode())
        return f"Subset{length} (indices {chosen:08x}) of {_describe(dataset.dataset)}"
    return f"{type(dataset).__name__}{length}"


def check_same_order(communicator: Communicator, plan: Plan) -> None:
    """Raise if a sampler of the script's own yields other indices on other ranks; collective once in a pass."""
    if plan.first is None:
        return
    everyone = communicator.allgather(torch.tensor([plan.first])).view(-1).tolist()
    plan.first = None
    others = [rank for rank, number in enumerate(everyone) if number != everyone[0]]
    if others:
        raise MismatchError(
            f"the sampler yields other indices on rank {others[0]} than on rank 0: seed its generator alike on "
            "all ranks, or let it draw from torch, random or numpy.random"
        )
