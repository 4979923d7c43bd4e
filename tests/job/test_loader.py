"""The loader: the same samples as one process would hold, each once per epoch."""

from collections.abc import Iterator
from typing import Any

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
    SequentialSampler,
    WeightedRandomSampler,
    get_worker_info,
)

import hocket
from hocket.job.runtime import current
from hocket.job.sharding import share

Epoch = list[tuple[list[int], float]]  # of each step: the samples, and what they weigh


class Numbers(Dataset[int]):
    def __init__(self, count: int) -> None:
        self.count = count

    def __len__(self) -> int:
        return self.count

    def __getitem__(self, index: int) -> int:
        return index


class Stream(IterableDataset[int]):
    """Divides itself among data-loader processes, as PyTorch's documentation shows it."""

    def __init__(self, count: int) -> None:
        self.count = count

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
        epoch = [(batch.reshape(-1).tolist(), current().weight) for batch in map(torch.as_tensor, loader)]
        if kind != "stream":
            assert len(loader) == len(epoch)
        assert current().weight == 1.0
        found.append(epoch)
    return found


def merge(epochs: list[Epoch]) -> list[list[int]]:
    """The samples of each global step, and a check that the weights are right."""
    steps = []
    assert len({len(epoch) for epoch in epochs}) == 1, "ranks take different numbers of steps"
    for parts in zip(*epochs, strict=True):
        counted = [(samples, weight) for samples, weight in parts if weight]
        total = sum(len(samples) for samples, _ in counted)
        for samples, weight in counted:
            assert weight == pytest.approx(len(samples) * len(parts) / total)
        for samples, weight in parts:
            assert samples, "a rank has no batch"
            assert weight or set(samples) <= {s for others, _ in counted for s in others}, "weight 0 repeats a sample"
        steps.append([sample for samples, _ in counted for sample in samples])
    return steps


@pytest.mark.parametrize("processes", [0, 2])
@pytest.mark.parametrize("kind", ["shuffled", "stream", "in order"])
def test_the_same_samples_as_one_process(pool: Pool, kind: str, processes: int) -> None:
    options: dict[str, Any] = {"num_workers": processes}
    if kind == "shuffled":
        options |= {"shuffle": True, "generator": 5}
    many = pool.run(3, iterate, kind, 47, 4, options, 3)
    if kind == "shuffled":
        options["generator"] = torch.Generator().manual_seed(5)
    one = make(kind, 47, 12, options)
    for epoch in range(3):
        expected = [batch.tolist() for batch in one]
        assert merge([rank[epoch] for rank in many]) == expected


@settings(max_examples=40, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
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


@pytest.mark.parametrize("kind", ["random", "weighted"])
def test_samplers_without_a_generator_agree_and_change_every_epoch(pool: Pool, kind: str) -> None:
    many = pool.run(3, iterate, kind, 40, 2, {}, 2)
    first, second = ([s for step in merge([rank[epoch] for rank in many]) for s in step] for epoch in range(2))
    assert first != second
    if kind == "random":
        assert sorted(first) == sorted(second) == list(range(40))


def test_persistent_processes_and_an_epoch_left_early(pool: Pool) -> None:
    pool.run(2, leave_early)


def leave_early() -> None:
    dataset = Numbers(20)
    loader = hocket.distribute(loader=DataLoader(dataset, 3, num_workers=1, persistent_workers=True))
    for step, _ in enumerate(loader):
        if step == 1:
            break
    assert current().weight == 1.0
    assert sum(len(batch) for batch in loader) == 10
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
        weights.append(current().weight)
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


@given(count=st.integers(0, 100), size=st.integers(1, 12))
def test_shares_are_even_and_complete(count: int, size: int) -> None:
    parts = [share(range(count), rank, size) for rank in range(size)]
    assert [item for part in parts for item in part] == list(range(count))
    assert max(map(len, parts)) - min(map(len, parts)) <= 1
