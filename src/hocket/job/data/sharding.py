"""Which samples of a global batch belong to which rank.

In global step t the ranks together hold exactly the samples that one process with a batch as large as all of
theirs would hold. A last batch that is smaller is spread evenly; a rank left without samples repeats some with
weight 0.
"""

from __future__ import annotations

import copy
import zlib
from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import islice
from typing import Any, NamedTuple, Protocol, TypeVar

import torch
from torch.utils.data import Dataset, Sampler, get_worker_info

from hocket.job.data.rest import Rest
from hocket.job.randomness import OwnRandom, RandomState, SharedRandom, mix, reseed

T = TypeVar("T")

AHEAD = 64  # steps


class Dealer(Protocol):
    """Says which batch of an epoch is this rank's next."""

    def take(self, epoch: int, total: int | None) -> int | None:
        """Its number, or None if there is none to be had now; ``total`` is how many there are, if that is known."""

    def end(self, total: int) -> None:
        """There are only so many."""


class Counts(NamedTuple):
    """What is known of a batch beside its contents."""

    here: int  # samples on this rank
    everywhere: int  # samples on all ranks; 0 if only this rank's are known
    taken: int  # how much of the source all ranks together have taken with it, in this epoch


@dataclass
class Start:
    """How the source of a pass began, from which its order follows."""

    random: RandomState | None  # None: it has not begun
    generators: list[torch.Tensor]
    sampler: Any  # its state_dict, if it has one

    def as_data(self) -> list[Any]:
        """The same as plain data with tensors."""
        return [self.random.as_data() if self.random is not None else None, self.generators, self.sampler]

    @staticmethod
    def from_data(data: list[Any]) -> Start:
        """What ``as_data`` gave."""
        random, generators, sampler = data
        return Start(RandomState.from_data(random) if random is not None else None, generators, sampler)


@dataclass
class Plan:
    """One pass over the data: where it starts, and what is noted for each batch."""

    epoch: int
    taken: int = 0  # of a stream, in an earlier run: it is passed over
    rest: Rest = field(default_factory=Rest)  # of the indices, after an earlier run
    start: Start | None = None  # how it began
    is_resumed: bool = False
    has_begun: bool = False  # somebody has read the source, who may read it again
    random: SharedRandom | None = None  # what the source draws from, if not from what it usually does
    first: int | None = None  # a checksum of the first global batch of a sampler that is not PyTorch's
    deal: Dealer | None = None  # the queue from which batches are taken, if there is one
    in_step: bool = False  # what is taken there is a rank's share of a global batch

    def __post_init__(self) -> None:
        self.counts: deque[Counts] = deque()


class SeededIndices(NamedTuple):
    """What travels to a data-loader process: indices, and the seed of the random numbers used on them."""

    indices: Any
    seed: int


class SeededDataset(Dataset[Any]):
    """In a data-loader process, starts random numbers anew for each batch.

    A batch is then the same whichever process makes it, and whether or not batches before it were made: after a
    resumption they are not.
    """

    def __init__(self, dataset: Dataset[Any]) -> None:
        self.dataset = dataset

    def __getitem__(self, index: SeededIndices) -> Any:
        reseed(index.seed)
        return self.dataset[index.indices]

    def __getitems__(self, batch: SeededIndices) -> list[Any]:
        reseed(batch.seed)
        several = getattr(self.dataset, "__getitems__", None)
        items: list[Any] = several(batch.indices) if several else [self.dataset[i] for i in batch.indices]
        return items


def show_own_dataset(worker: int, *, init: Any = None) -> None:
    """In a data-loader process: show the user's own data set to code that asks ``get_worker_info()`` for it."""
    info = get_worker_info()
    assert info is not None
    object.__setattr__(info, "dataset", info.dataset.dataset)  # type: ignore[attr-defined]
    if init is not None:
        init(worker)


def is_of_torch(source: object) -> bool:
    """Whether ``source``, and what it may be built on, is a sampler of PyTorch's."""
    inner = getattr(source, "sampler", None)
    return type(source).__module__.startswith("torch.utils.data") and (inner is None or is_of_torch(inner))


def share(items: Sequence[T], rank: int, size: int, least: int = 1) -> Sequence[T]:
    """The part of ``items`` for ``rank``: contiguous, as even as possible, and at least ``least`` or none."""
    size = min(size, max(1, len(items) // least))
    if rank >= size:
        return items[:0]
    each, more = divmod(len(items), size)
    start = rank * each + min(rank, more)
    return items[start : start + each + (rank < more)]


def least(batch_size: int | None) -> int:
    """The fewest samples that a rank gets: not a single one of many, which batch norm refuses to train on."""
    return 2 if batch_size is not None and batch_size > 2 else 1


class ShardedIndices(Sampler[Any]):
    """The batches (lists of indices, or what a batch sampler yields) of one rank.

    Args:
        source: Yields indices, of which ``batch_size`` make a batch, or ready batches if that is None.
        random: What the source draws from.
        generators: Generators that the source draws from, too.
        seed: If there are data-loader processes: of the random numbers there.
    """

    def __init__(
        self,
        source: Iterable[Any],
        batch_size: int | None,
        drop_last: bool,
        rank: int,
        size: int,
        random: SharedRandom | OwnRandom,
        generators: Sequence[torch.Generator] = (),
        seed: int | None = None,
    ) -> None:
        self._source, self._batch_size, self._drop_last = source, batch_size, drop_last
        self._rank, self._size, self._whole = rank, size, size * (batch_size or 1)
        self._random, self._generators, self.seed = random, generators, seed
        self.plan = Plan(0)
        """Of the pass that the next iterator makes."""

    @property
    def is_alone(self) -> bool:
        """Whether the source draws from the process's own numbers, as in a plain script."""
        return isinstance(self._random, OwnRandom)

    def __iter__(self) -> Iterator[Any]:
        return self._iterate(self.plan)

    def _iterate(self, plan: Plan) -> Iterator[Any]:
        taken = 0
        for batch in self._in_order(plan, self._whole):
            if self._drop_last and len(batch) < self._whole:
                return
            taken += len(batch)
            yield self._give(plan, batch, taken - len(batch), self._rank, self._size, taken)

    def _give(self, plan: Plan, batch: list[Any], first: int, rank: int, size: int, taken: int) -> Any:
        """The share of a rank in a batch of ``size`` ranks; noted is what it counts, and how much was ``taken``.

        ``first`` is how many samples come before the batch, of those that were left.
        """
        mine = share(batch, rank, size, least(self._batch_size))
        indices: Any
        if self._batch_size is None:
            sizes = [samples(item) for item in batch]
            plan.counts.append(Counts(sizes[rank] if mine else 0, sum(sizes), taken))
            indices = mine[0] if mine else batch[0]
        else:
            plan.counts.append(Counts(len(mine), len(batch), taken))
            indices = list(mine) or batch[: least(self._batch_size)]
        if self.seed is None:
            return indices
        return SeededIndices(indices, mix(self.seed, plan.epoch, plan.rest.place(first), rank))

    def _in_order(self, plan: Plan, whole: int) -> Iterator[list[Any]]:
        """What is left of the epoch, ``whole`` samples at a time; drawn with the random state that all share.

        To put that in place takes longer than many indices, so PyTorch's samplers, which nothing during an epoch
        influences, are read ahead.
        """
        fresh, random = not plan.has_begun, self._begin(plan)
        ahead = AHEAD if is_of_torch(self._source) else 1
        with random:
            indices = plan.rest.pick(iter(self._source))
        while True:
            with random:
                block = list(islice(indices, ahead * whole))
            if not block:
                return
            if fresh and ahead == 1:
                plan.first = zlib.crc32(repr(block).encode())
            fresh = False
            for start in range(0, len(block), whole):
                yield block[start : start + whole]

    def begin(self) -> Start:
        """How a pass would begin now."""
        state = copy.deepcopy(self._source.state_dict()) if hasattr(self._source, "state_dict") else None
        return Start(None, [g.get_state() for g in self._generators], state)

    def note(self, plan: Plan) -> None:
        """The pass of ``plan`` begins now."""
        plan.start = self.begin()
        plan.start.random = (plan.random or self._random).capture()

    def restore(self, start: Start) -> None:
        """Have the next pass begin as another one did, or would have."""
        for generator, state in zip(self._generators, start.generators, strict=False):
            generator.set_state(state)
        if start.sampler is not None:
            self._source.load_state_dict(start.sampler)  # type: ignore[attr-defined]

    def _begin(self, plan: Plan) -> SharedRandom | OwnRandom:
        """Note how this pass begins, or begin as it did before, or in an earlier run."""
        is_new, plan.has_begun = not plan.is_resumed and not plan.has_begun, True
        if is_new:
            self.note(plan)
            return plan.random or self._random
        assert plan.start is not None and plan.start.random is not None
        self.restore(plan.start)
        return SharedRandom(plan.start.random)

    def __len__(self) -> int:
        return batches(len(self._source), self._whole, self._drop_last)  # type: ignore[arg-type]


def samples(batch: Any) -> int:
    """How many samples an item of a batch sampler, or of a sampler without batches, stands for."""
    counts = hasattr(batch, "__len__") and not isinstance(batch, str) and getattr(batch, "ndim", None) != 0
    return len(batch) if counts else 1


def batches(count: int, whole: int, drop_last: bool) -> int:
    """How many batches of ``whole`` samples there are."""
    return count // whole if drop_last else -(-count // whole)
