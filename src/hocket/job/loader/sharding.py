"""Which samples of a global batch belong to which rank.

In global step t the ranks together hold exactly the samples that one process with a batch as large as all of
theirs would hold. A last batch that is smaller is spread evenly; a rank left without samples repeats some with
weight 0.
"""

from __future__ import annotations

import copy
import zlib
from collections.abc import Iterable, Iterator, Sequence
from itertools import islice
from typing import Any, NamedTuple, TypeVar

import torch
from torch.utils.data import DataLoader, Dataset, Sampler, get_worker_info

from hocket.comm.communicator import Communicator
from hocket.errors import WorkerLost
from hocket.job.loader.division import Division, Place, blame, share
from hocket.job.loader.global_batch import GlobalBatch
from hocket.job.loader.passes import BatchSource, Counts, Plan, Rest, Start
from hocket.job.notice import outlive_a_signal
from hocket.job.randomness import OwnRandom, RandomState, SharedRandom, mix, reseed

T = TypeVar("T")

AHEAD = 64  # steps for which indices are read ahead


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
    """In a data-loader process: show the user's own data set to code that asks ``get_worker_info()`` for it.

    A notice to all processes of a job is for the worker, which may still need this process for its batch.
    """
    outlive_a_signal()
    info = get_worker_info()
    assert info is not None
    object.__setattr__(info, "dataset", info.dataset.dataset)  # type: ignore[attr-defined]
    if init is not None:
        init(worker)


def is_of_torch(source: object) -> bool:
    """Whether ``source``, and what it may be built on, is a sampler of PyTorch's."""
    inner = getattr(source, "sampler", None)
    return type(source).__module__.startswith("torch.utils.data") and (inner is None or is_of_torch(inner))


class ShardedIndices(Sampler[Any]):
    """The batches (lists of indices, or what a batch sampler yields) of one rank.

    Args:
        source: Yields indices, or ready batches.
        batch: How many of them all workers together take at once.
        random: What the source draws from.
        generators: Generators that the source draws from, too.
        seed: The seed of the random numbers in data-loader processes, if there are any.
    """

    def __init__(
        self,
        source: Iterable[Any],
        batch: GlobalBatch,
        drop_last: bool,
        rank: int,
        size: int,
        random: SharedRandom | OwnRandom,
        generators: Sequence[torch.Generator] = (),
        seed: int | None = None,
    ) -> None:
        self._source, self._batch, self._drop_last = source, batch, drop_last
        self._rank, self._size = rank, size
        self._random, self._generators, self.seed = random, generators, seed
        self.plan = Plan(0)
        """The plan of the pass that the next iterator makes."""

    @property
    def is_alone(self) -> bool:
        """Whether the source draws from the process's own numbers, as in a plain script."""
        return isinstance(self._random, OwnRandom)

    def __iter__(self) -> Iterator[Any]:
        plan = self.plan
        return self._divide(plan) if plan.deal is None else self._deal(plan, plan.deal)

    def _divide(self, plan: Plan) -> Iterator[Any]:
        """This rank's share of every global batch."""
        if not plan.size:
            plan.rank, plan.size, plan.whole = self.place
        taken, rank, size, whole = 0, plan.rank, plan.size, plan.whole
        for batch in self._in_order(plan, whole):
            if self._drop_last and len(batch) < whole:
                return
            taken += len(batch)
            yield self._give(plan, batch, taken - len(batch), rank, size, taken)

    def _deal(self, plan: Plan, dealer: BatchSource) -> Iterator[Any]:
        """The batches that this worker takes from the queue that all workers share.

        A slow worker takes fewer; batches of a lost one are dealt again. Only numbers travel: every worker knows the
        order of the samples. Where workers are in step, a number stands for one rank's share of a global batch; else
        for a batch of one worker.
        """
        each, whole = self._units(plan)
        order, at, batch = self._in_order(plan, whole), 0, list[Any]()
        left = self._left(plan)
        total = None if left is None else batches(left, whole, self._drop_last) * each
        while (number := dealer.take(plan.epoch, total)) is not None:
            which, rank = divmod(number, each)
            if which < at - 1:  # a worker that is lost had it before
                order, at = self._in_order(plan, whole), 0
            if which >= at:
                batch, at = next(islice(order, which - at, None), []), which + 1
            if not batch or (self._drop_last and len(batch) < whole):
                dealer.end(which * each)
                continue
            yield self._give(plan, batch, which * whole, rank, each, number + 1)
        for _ in order:  # generators of the script's own must be where those of other ranks are
            pass

    def _give(self, plan: Plan, batch: list[Any], first: int, rank: int, size: int, taken: int) -> Any:
        """The share of a rank in a batch of ``size`` ranks; notes how much it counts, and how much was ``taken``.

        ``first`` is how many samples come before the batch, of those that were left.
        """
        mine = share(batch, rank, size, self._batch.least)
        indices: Any
        if self._batch.part is None:
            sizes = [samples(item) for item in batch]
            plan.counts.append(Counts(sizes[rank] if mine else 0, sum(sizes), taken))
            indices = mine[0] if mine else batch[0]
        else:
            plan.counts.append(Counts(len(mine), len(batch), taken))
            indices = list(mine) or batch[: self._batch.least]
        if self.seed is None:
            return indices
        return SeededIndices(indices, mix(self.seed, plan.epoch, plan.rest.place(first), rank))

    def _in_order(self, plan: Plan, whole: int) -> Iterator[list[Any]]:
        """What is left of the epoch, ``whole`` samples at a time; drawn with the random state that all share.

        To put the random state in place takes longer than many indices, so PyTorch's samplers, which nothing during an
        epoch influences, are read ahead.
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

    def divide(self, plan: Plan, members: Sequence[int]) -> Division:
        """How the batches of a pass are divided among ``members``, now and until ``regroup``."""
        left = self._left(plan)
        assert left is not None
        return Division(plan, members, plan.whole, left, self._batch.least)

    def numbers(self, plan: Plan, places: Sequence[int]) -> list[int]:
        """The numbers in the data set of the samples at some places in the order of a pass, where they are numbers."""
        if plan.start is None or plan.start.random is None or not is_of_torch(self._source):
            return []
        states = [generator.get_state() for generator in self._generators]
        for generator, state in zip(self._generators, plan.start.generators, strict=False):
            generator.set_state(state)
        with SharedRandom(plan.start.random):
            order = list(self._source)
        for generator, state in zip(self._generators, states, strict=True):
            generator.set_state(state)
        return sorted(order[place] for place in places if isinstance(order[place], int))

    def blame(self, batches: Sequence[int]) -> None:
        """Workers have died with these batches of the queue.

        Raises:
            WorkerLost: always, with the numbers of the samples.
        """
        plan = self.plan
        spans = [self._span(plan, number) for number in batches]
        places = [plan.rest.place(at) for start, stop in spans for at in range(start, stop)]
        raise WorkerLost(blame(self.numbers(plan, places)))

    @property
    def place(self) -> Place:
        """How passes that begin now are divided."""
        return self._rank, self._size, self._batch.whole

    def regroup(self, rank: int, size: int) -> int:
        """The workers have changed, and passes from now on are divided among them.

        Returns:
            How many items are divided at once.

        Raises:
            WorkerLost: each worker would have much more to hold in memory than at the start.
        """
        self._rank, self._size = rank, size
        self._batch.regroup(size)
        return self._batch.whole

    def begin(self) -> Start:
        """How a pass would begin now."""
        state = copy.deepcopy(self._source.state_dict()) if hasattr(self._source, "state_dict") else None
        return Start(None, [g.get_state() for g in self._generators], state)

    def note(self, plan: Plan) -> None:
        """The pass of ``plan`` begins now."""
        plan.start = self.begin()
        plan.start.random = (plan.random or self._random).capture()

    def restore(self, start: Start) -> None:
        """Have the next pass begin as an earlier one did, or would have."""
        for generator, state in zip(self._generators, start.generators, strict=False):
            generator.set_state(state)
        if start.sampler is not None:
            self._source.load_state_dict(start.sampler)  # type: ignore[attr-defined]

    def _begin(self, plan: Plan) -> SharedRandom | OwnRandom:
        """Note how this pass begins, or begin it as it began before, perhaps in an earlier run."""
        is_new, plan.has_begun = not plan.is_resumed and not plan.has_begun, True
        if is_new:
            self.note(plan)
            return plan.random or self._random
        assert plan.start is not None and plan.start.random is not None
        self.restore(plan.start)
        return SharedRandom(plan.start.random)

    def rest(self, plan: Plan, state: dict[str, Any]) -> Rest:
        """What is left of a pass, from the state of its queue: numbers from ``next`` on, and some before."""
        if state["epoch"] != plan.epoch:
            return plan.rest  # no batch was taken yet
        each, whole = self._units(plan)
        next_one = state["next"]
        begun = next_one // each * each
        taken = max([begun // each * whole, *(self._span(plan, number)[1] for number in range(begun, next_one))])
        return plan.rest.only([*(self._span(plan, number) for number in state["again"]), (taken, None)])

    def _span(self, plan: Plan, number: int) -> tuple[int, int]:
        """The samples of a batch of the queue, among those that are left of the pass."""
        each, whole = self._units(plan)
        left = self._left(plan)
        which, rank = divmod(number, each)
        start = which * whole
        end = start + whole if left is None else min(start + whole, left)
        mine = share(range(start, end), rank, each, self._batch.least)
        return (mine[0], mine[-1] + 1) if mine else (start, start)

    def _units(self, plan: Plan) -> tuple[int, int]:
        """How many numbers stand for the samples that are divided at once, and how many samples these are."""
        return (self._size, self._batch.whole) if plan.in_step else (1, self._batch.part or 1)

    def _left(self, plan: Plan) -> int | None:
        try:
            return plan.rest.count(len(self._source))  # type: ignore[arg-type]
        except TypeError:
            return None

    def __len__(self) -> int:
        return batches(len(self._source), self._batch.whole, self._drop_last)  # type: ignore[arg-type]


def divide(
    original: DataLoader[Any],
    batch: GlobalBatch,
    group: Communicator,
    generators: Sequence[torch.Generator],
    seed: int,
    *,
    alone: bool,
) -> ShardedIndices:
    """The batches of one worker of ``group``, of a loader over a data set with indices.

    Where the worker is ``alone`` with the data, PyTorch's samplers draw from the process's own numbers, as in a plain
    script. What another one draws in the middle of an epoch could not be found again after a resumption.
    """
    ready_made = original.batch_size is None  # one sample at a time, or a batch sampler of the user's own
    source = original.sampler if original.batch_sampler is None or not ready_made else original.batch_sampler
    random = OwnRandom() if alone and is_of_torch(source) else SharedRandom(RandomState.from_seed(seed))
    own = seed if original.num_workers else None
    return ShardedIndices(source, batch, original.drop_last, group.rank, group.size, random, generators, own)


def samples(batch: Any) -> int:
    """How many samples an item of a batch sampler, or of a sampler without batches, stands for."""
    counts = hasattr(batch, "__len__") and not isinstance(batch, str) and getattr(batch, "ndim", None) != 0
    return len(batch) if counts else 1


def batches(count: int, whole: int, drop_last: bool) -> int:
    """How many batches of ``whole`` samples there are."""
    return count // whole if drop_last else -(-count // whole)


def total(original: DataLoader[Any]) -> int | None:
    """How many batches all workers together take of a loader, if that is known."""
    ready_made = original.batch_size is None and original.batch_sampler is not None
    source = original.batch_sampler if ready_made else original.sampler
    try:
        return batches(len(source), original.batch_size or 1, original.drop_last)  # type: ignore[arg-type]
    except TypeError:
        return None
