"""The loader: the same samples as one process would hold, each once per epoch."""

import random
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from pool import Pool
from torch.utils.data import (
    BatchSampler,
    DataLoader,
    Dataset,
    IterableDataset,
    RandomSampler,
    Sampler,
    SequentialSampler,
    WeightedRandomSampler,
    get_worker_info,
)

import hocket
from hocket.job.loader.division import share
from hocket.job.worker import current

Epoch = list[tuple[list[int], float]]  # of each step: the samples, and what they weigh


class Numbers(Dataset[int]):
    def __init__(self, count: int) -> None:
        self.count = count

    def __len__(self) -> int:
        return self.count

    def __getitem__(self, index: int) -> int:
        return index


class Stream(IterableDataset[int]):
    def __init__(self, count: int) -> None:
        self.count = count

    def __iter__(self) -> Iterator[int]:
        yield from range(self.count)


class DividingStream(Stream):
    """Divides itself among data-loader processes, as PyTorch's documentation shows it."""

    def __iter__(self) -> Iterator[int]:
        info = get_worker_info()
        assert info is None or info.dataset is self
        yield from range(info.id if info else 0, self.count, info.num_workers if info else 1)


class SizedStream(Stream):
    def __len__(self) -> int:
        return self.count


def make(kind: str, count: int, batch: int, options: dict[str, Any]) -> DataLoader[Any]:
    if kind == "stream":
        return DataLoader(Stream(count), batch, **options)
    if kind == "dividing stream":
        return DataLoader(DividingStream(count), batch, **options)
    if kind == "sized stream":
        return DataLoader(SizedStream(count), batch, **options)
    if kind == "batch sampler":
        drop_last = options.pop("drop_last", False)
        return DataLoader(Numbers(count), batch_sampler=BatchSampler(SequentialSampler(range(count)), batch, drop_last))
    if kind == "no batches":
        return DataLoader(Numbers(count), batch_size=None, **options)
    if kind == "weighted":
        return DataLoader(Numbers(count), batch, sampler=WeightedRandomSampler(torch.ones(count), count), **options)
    if kind == "random":
        return DataLoader(Numbers(count), batch, sampler=RandomSampler(range(count)), **options)
    return DataLoader(Numbers(count), batch, **options)


def iterate(kind: str, count: int, batch: int, options: dict[str, Any], epochs: int) -> list[Epoch]:
    if options.get("generator") is not None:
        options["generator"] = torch.Generator().manual_seed(options["generator"] + hocket.rank())
    torch.manual_seed(hocket.rank())
    loader = hocket.distribute(loader=make(kind, count, batch, options))
    found = []
    for _ in range(epochs):
        epoch = [(batch.reshape(-1).tolist(), current().training.weights.now) for batch in map(torch.as_tensor, loader)]
        if kind not in ("stream", "dividing stream"):
            assert len(loader) == len(epoch)
        assert current().training.weights.now == 1.0
        found.append(epoch)
    return found


def merge(epochs: list[Epoch], *, own: bool = False) -> list[list[int]]:
    """The samples of each global step, and a check that the weights are right."""
    steps: list[list[int]] = []
    assert len({len(epoch) for epoch in epochs}) == 1, "ranks take different numbers of steps"
    for parts in zip(*epochs, strict=True):
        counted = [(samples, weight) for samples, weight in parts if weight]
        total = sum(len(samples) for samples, _ in counted)
        for samples, weight in counted:
            assert weight == pytest.approx(len(samples) * len(parts) / total)
        for samples, weight in parts:
            assert samples, "a rank has no batch"
            seen = {s for others, _ in counted for s in others} | {s for step in steps if own for s in step}
            assert weight or set(samples) <= seen, "weight 0 repeats a sample"
        steps.append([sample for samples, _ in counted for sample in samples])
    return steps


@pytest.mark.few(2)
@pytest.mark.parametrize("processes", [0, 2])
@pytest.mark.parametrize("kind", ["shuffled", "stream", "in order"])
def test_the_same_samples_as_one_process(pool: Pool, kind: str, processes: int) -> None:
    options: dict[str, Any] = {"num_workers": processes}
    if kind == "shuffled":
        options |= {"shuffle": True, "generator": 5}
    many = pool.run(3, iterate, kind, 47, 4, options, 3)
    if kind == "shuffled":
        options["generator"] = torch.Generator().manual_seed(5)
    one = make(kind, 47, 12, options if kind == "shuffled" else {})  # PyTorch would repeat a stream in each process
    for epoch in range(3):
        expected = [batch.tolist() for batch in one]
        assert merge([rank[epoch] for rank in many]) == expected


@settings(max_examples=40, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    kind=st.sampled_from(["in order", "stream", "sized stream", "batch sampler", "no batches", "random"]),
    workers=st.integers(2, 5),
    count=st.integers(0, 50),
    batch=st.integers(1, 6),
    drop_last=st.booleans(),
)
def test_every_sample_counts_once(pool: Pool, kind: str, workers: int, count: int, batch: int, drop_last: bool) -> None:
    if kind == "random" and count == 0:
        return
    drop_last &= kind not in ("no batches", "batch sampler")
    options = {"drop_last": True} if drop_last else {}
    many = pool.run(workers, iterate, kind, count, batch, options, 2)
    for epoch in range(2):
        samples = [sample for step in merge([rank[epoch] for rank in many]) for sample in step]
        kept = count - count % (workers * batch) if drop_last else count
        assert len(samples) == kept
        assert set(samples) <= set(range(count)) and len(set(samples)) == len(samples)


@pytest.mark.few(1)
@pytest.mark.parametrize("kind", ["random", "weighted"])
def test_samplers_without_a_generator_agree_and_change_every_epoch(pool: Pool, kind: str) -> None:
    many = pool.run(3, iterate, kind, 40, 2, {}, 2)
    first, second = ([s for step in merge([rank[epoch] for rank in many]) for s in step] for epoch in range(2))
    assert first != second
    if kind == "random":
        assert sorted(first) == sorted(second) == list(range(40))


@pytest.mark.all_combinations
@settings(max_examples=15, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    workers=st.integers(1, 4),
    count=st.integers(1, 40),
    batch=st.integers(1, 5),
    processes=st.integers(0, 2),
    persistent=st.booleans(),
)
def test_a_stream_that_divides_itself_is_divided_among_all_processes_of_all_ranks(
    pool: Pool, workers: int, count: int, batch: int, processes: int, persistent: bool
) -> None:
    options = {"num_workers": processes, "persistent_workers": persistent and processes > 0}
    many = pool.run(workers, iterate, "dividing stream", count, batch, options, 2)
    for epoch in range(2):
        samples = [s for step in merge([rank[epoch] for rank in many], own=True) for s in step]
        assert sorted(samples) == list(range(count))


def own_data(lengths: list[int], stream: bool) -> tuple[list[Epoch], int | None]:
    count = lengths[hocket.rank()]
    dataset = Stream(count) if stream else Numbers(count)
    loader = hocket.distribute(loader=DataLoader(dataset, 3), data="local")
    epochs = [[(b.tolist(), current().training.weights.now) for b in loader] for _ in range(2)]
    with torch.no_grad():
        assert [s for b in loader for s in b.tolist()] == list(range(count)), "an evaluation repeats nothing"
    return epochs, None if stream else len(loader)


@pytest.mark.parametrize("stream", [False, True])
def test_data_that_is_divided_already_may_differ_in_length(pool: Pool, stream: bool) -> None:
    lengths = [7, 0, 12, 2]
    results = pool.run(4, own_data, lengths, stream)
    for epoch in range(2):
        epochs = [result[0][epoch] for result in results]
        merge(epochs, own=True)
        for rank, mine in enumerate(epochs):
            assert len(mine) == 4 and results[rank][1] in (None, 4)
            assert [s for samples, weight in mine if weight for s in samples] == list(range(lengths[rank]))


def evaluation(count: int, batch: int, by: str) -> list[int]:
    training = False if by == "training=False" else None
    loader = hocket.distribute(loader=DataLoader(Numbers(count), batch), training=training)
    with torch.set_grad_enabled(by != "no_grad"):
        return [sample for numbers in loader for sample in numbers.tolist()]


@pytest.mark.parametrize("by", ["no_grad", "training=False"])
def test_an_evaluation_sees_every_sample_once(pool: Pool, by: str) -> None:
    for workers, count, batch in ((3, 7, 2), (4, 2, 3), (4, 13, 4)):
        seen = [sample for part in pool.run(workers, evaluation, count, batch, by) for sample in part]
        assert sorted(seen) == list(range(count))


def different_split() -> None:
    torch.manual_seed(hocket.rank())
    train, _ = torch.utils.data.random_split(Numbers(20), [15, 5])
    hocket.distribute(loader=DataLoader(train, 2))


def test_a_split_that_differs_between_ranks_is_found(pool: Pool) -> None:
    for outcome in pool.outcomes(2, different_split):
        assert outcome.kind == "MismatchError" and "make random splits before" in outcome.message


class Noisy(Numbers):
    """Augments with numbers of all three kinds."""

    def __getitem__(self, index: int) -> Any:
        return index, float(torch.rand(())), random.random(), float(np.random.rand())


def noise(processes: int) -> list[list[float]]:
    torch.manual_seed(3)
    random.seed(3)
    np.random.seed(3)
    model = hocket.distribute(torch.nn.Linear(1, 1))
    loader = hocket.distribute(loader=DataLoader(Noisy(24), 3, num_workers=processes))
    drawn = [[float(v) for part in batch[1:] for v in part] for batch in loader]
    return [[v for row in drawn for v in row], torch.rand(3).tolist(), model.weight.flatten().tolist()]


@pytest.mark.few(1)
@pytest.mark.parametrize("processes", [0, 2])
def test_random_numbers_differ_between_ranks_and_follow_from_the_seed(pool: Pool, processes: int) -> None:
    first, again = pool.run(2, noise, processes), pool.run(2, noise, processes)
    assert first == again
    assert not set(first[0][0]) & set(first[1][0]) and not set(first[0][1]) & set(first[1][1])
    assert first[0][2] == first[1][2], "the same initial weights"
    assert len(set(first[0][0])) == 36, "and no number twice"


def test_persistent_processes_and_an_epoch_left_early(pool: Pool) -> None:
    pool.run(2, leave_early)


def leave_early() -> None:
    dataset = Numbers(22)
    loader = hocket.distribute(loader=DataLoader(dataset, 3, num_workers=1, persistent_workers=True))
    for step, _ in enumerate(loader):
        if step == 1:
            break
    assert current().training.weights.now == 1.0
    assert sum(len(batch) for batch in loader) == 11
    assert loader.dataset is dataset and loader.num_workers == 1 and loader.batch_size == 3
    del loader


def evaluate_in_between() -> list[float]:
    """An inner loop over another loader does not change what the outer batch weighs."""
    training = hocket.distribute(loader=DataLoader(Numbers(5), 4))
    evaluation = hocket.distribute(loader=DataLoader(Numbers(3), 1))
    weights = []
    for _ in training:
        seen = sum(1 for _ in evaluation)
        assert seen == 2
        weights.append(current().training.weights.now)
    return weights


def test_loaders_can_be_nested(pool: Pool) -> None:
    assert pool.run(2, evaluate_in_between) == [[1.2], [0.8]]


def scaled() -> list[float]:
    parameter = torch.nn.Parameter(torch.zeros(1))
    optimizer = torch.optim.SGD([parameter], lr=0.1)
    model = torch.nn.ParameterList([parameter])
    hocket.distribute(model, optimizer, scale_lr="linear", warmup=2)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 3, 0.5)
    moved = []
    for _ in range(5):
        before = float(parameter.detach())
        optimizer.zero_grad()
        parameter.sum().backward()
        optimizer.step()
        scheduler.step()
        moved.append(before - float(parameter.detach()))
    return moved


def test_learning_rates_are_scaled_with_warmup(pool: Pool) -> None:
    for moved in pool.run(3, scaled):
        assert moved == pytest.approx([0.1, 0.2, 0.3, 0.15, 0.15], rel=1e-5)


@given(count=st.integers(0, 100), size=st.integers(1, 12), least=st.integers(1, 2))
def test_shares_are_even_and_complete(count: int, size: int, least: int) -> None:
    parts = [share(range(count), rank, size, least) for rank in range(size)]
    assert [item for part in parts for item in part] == list(range(count))
    some = [len(part) for part in parts if part] or [0]
    assert max(some) - min(some) <= 1 and (min(some) >= least or len(some) == 1)
    if least == 1:
        assert max(map(len, parts)) - min(map(len, parts)) <= 1


def one_batch(strategy: str) -> list[float]:
    """A batch taken by hand, with fewer samples than ranks would have, and a weight given by hand."""
    torch.manual_seed(0)
    model = torch.nn.Linear(1, 1, dtype=torch.float64)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    hocket.distribute(model, optimizer, strategy=strategy)
    loader = hocket.distribute(loader=DataLoader(Numbers(5), 4))
    for step in range(3):
        x = next(iter(loader)).double().view(-1, 1)
        if step == 2:
            hocket.weight(len(x))
        optimizer.zero_grad()
        (model(x) ** 2).mean().backward()
        optimizer.step()
    return [float(p.detach()) for p in model.parameters()]


def test_a_batch_taken_by_hand_has_its_weight(pool: Pool) -> None:
    (alone,) = pool.run(1, one_batch_of_all)
    for strategy in ("mirrored", "central"):
        for result in pool.run(3, one_batch, strategy):
            assert result == pytest.approx(alone, rel=1e-9)


def one_batch_of_all() -> list[float]:
    torch.manual_seed(0)
    model = torch.nn.Linear(1, 1, dtype=torch.float64)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for _ in range(3):
        optimizer.zero_grad()
        (model(torch.arange(5).double().view(-1, 1)) ** 2).mean().backward()
        optimizer.step()
    return [float(p.detach()) for p in model.parameters()]


class Unseeded(Sampler[int]):
    def __iter__(self) -> Iterator[int]:
        return iter(np.random.default_rng().permutation(12).tolist())

    def __len__(self) -> int:
        return 12


def unseeded() -> None:
    for _ in hocket.distribute(loader=DataLoader(Numbers(12), 2, sampler=Unseeded())):
        pass


def test_a_sampler_that_differs_between_ranks_is_found(pool: Pool) -> None:
    for outcome in pool.outcomes(2, unseeded):
        assert outcome.kind == "MismatchError" and "seed its generator alike" in outcome.message
