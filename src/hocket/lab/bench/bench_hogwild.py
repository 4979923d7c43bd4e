"""Sparse logistic regression: Hogwild, with and without a lock, against one plain process.

For ``hocket bench hogwild``; one pass over the data each, alternately.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Iterable
from typing import Any

import torch
from torch import nn
from torch.nn import functional
from torch.utils.data import BatchSampler, DataLoader, RandomSampler, TensorDataset

from hocket.job.collectives import barrier
from hocket.job.distribute import distribute
from hocket.job.worker import rank, size
from hocket.lab.bench.bench_worker import ratio, slowest, total

FEATURES = 1_000_000
PER_SAMPLE = 100
BATCH = 256
_KINDS = {"hogwild": "hogwild", "locked": "hogwild(locked=True)"}


def hogwild(rounds: str, samples: str, per_sample: str = str(PER_SAMPLE), seed: str = "0") -> list[dict[str, Any]]:
    """One row, after so many rounds over so many samples, each with so many features; ``seed`` is that of the data."""
    return measure(int(rounds), make_data(int(samples), int(per_sample), int(seed)), int(per_sample))


def make_data(samples: int, per_sample: int, seed: int) -> TensorDataset:
    """Samples with so many features each, drawn evenly, and labels of a logistic model; the same on all ranks."""
    random = torch.Generator().manual_seed(seed)
    x = torch.randint(0, FEATURES, (samples, per_sample), generator=random)
    truth = torch.randn(FEATURES, generator=random)
    odds = torch.cat([truth[part].sum(1) for part in x.split(max(1, 10**7 // per_sample))])
    return TensorDataset(x, torch.bernoulli(torch.sigmoid(odds * 4 / per_sample**0.5), generator=random))


def make_model(batch: int, per_sample: int) -> tuple[nn.EmbeddingBag, torch.optim.Optimizer]:
    """One weight for each feature, of which a sample adds up its own; the rate is safe for samples one by one."""
    model = nn.EmbeddingBag(FEATURES, 1, mode="sum", sparse=True)
    nn.init.zeros_(model.weight)
    return model, torch.optim.SGD(model.parameters(), lr=2.0 * batch / per_sample)


def make_loader(data: TensorDataset, batch: int) -> DataLoader[Any]:
    """The data set is asked for whole batches: collating single samples would take longer than the training."""
    return DataLoader(data, batch_size=None, sampler=BatchSampler(RandomSampler(data), batch, drop_last=False))


def train(model: nn.Module, optimizer: torch.optim.Optimizer, loader: Iterable[Any]) -> None:
    """One pass."""
    for x, y in loader:
        functional.binary_cross_entropy_with_logits(model(x).view(-1), y).backward()
        optimizer.step()
        optimizer.zero_grad()


@torch.no_grad()
def loss_of(model: nn.Module, data: TensorDataset) -> float:
    """Over the data that it was trained on, or the first samples of it."""
    x, y = (tensor[: max(100, min(20_000, 10**7 // data.tensors[0].shape[1]))] for tensor in data.tensors)
    return float(functional.binary_cross_entropy_with_logits(model(x).view(-1), y))


def measure(rounds: int, data: TensorDataset, per_sample: int) -> list[dict[str, Any]]:
    """Rounds of one pass of each kind; ``plain`` is rank 0 by itself, while the others do nothing."""
    batch = max(1, min(BATCH, BATCH * PER_SAMPLE // per_sample))  # about as many features in all, if there are many
    ways: dict[str, Any] = {"plain": (*make_model(batch, per_sample), make_loader(data, batch))}
    for name, strategy in _KINDS.items():
        model, optimizer = make_model(batch, per_sample)
        ways[name] = distribute(model, optimizer, make_loader(data, batch), strategy=strategy)
    seconds: dict[str, list[float]] = {name: [] for name in ways}
    cpu: dict[str, list[float]] = {name: [] for name in ways}
    losses: dict[str, list[float]] = {name: [] for name in ways}
    for _ in range(rounds):
        for name, way in ways.items():
            barrier()
            begin, used = time.perf_counter(), time.process_time()
            if name != "plain" or rank() == 0:
                train(*way)
            barrier()
            seconds[name].append(slowest(time.perf_counter() - begin))
            cpu[name].append(total(time.process_time() - used))
            losses[name].append(loss_of(way[0], data))
    row: dict[str, Any] = {"what": f"{size()} workers, {len(data)} samples, {per_sample} features each"}
    for name, times in seconds.items():
        row[f"{name}_samples/s"] = len(data) / statistics.median(times)
        row[f"{name} CPU_µs/sample"] = statistics.median(cpu[name]) / len(data) * 1e6
        if name != "plain":
            row[f"{name}_ratio"] = ratio(seconds, "plain", name)
    against = ratio(seconds, "locked", "hogwild")
    return [{**row, "than locked_×": against, **{f"{name}_loss": found[-1] for name, found in losses.items()}}]
