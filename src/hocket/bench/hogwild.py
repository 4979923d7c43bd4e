"""Sparse logistic regression: Hogwild, with and without a lock, against one plain process.

Started by ``hocket bench hogwild``; one pass over the data each, alternately.
"""

from __future__ import annotations

import json
import statistics
import sys
import time
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.nn import functional
from torch.utils.data import BatchSampler, DataLoader, RandomSampler, TensorDataset

from hocket.job.collectives import allreduce, barrier
from hocket.job.distribute import distribute
from hocket.job.runtime import init, rank, size

FEATURES = 1_000_000
PER_SAMPLE = 100
BATCH = 256
RATE = 20.0
_KINDS = {"hogwild": "hogwild", "locked": "hogwild(locked=True)"}


def main() -> None:
    """Write rows to the file that is the first argument, after rounds (the second) over samples (the third)."""
    init()
    rounds, samples = int(sys.argv[2]), int(sys.argv[3])
    rows = measure(rounds, make_data(samples, FEATURES, PER_SAMPLE), FEATURES)
    if rank() == 0:
        Path(sys.argv[1]).write_text(json.dumps(rows))


def make_data(samples: int, features: int, per_sample: int) -> TensorDataset:
    """Samples with so many features each, drawn evenly, and labels of a logistic model; the same on all ranks."""
    random = torch.Generator().manual_seed(0)
    x = torch.randint(0, features, (samples, per_sample), generator=random)
    truth = torch.randn(features, generator=random)
    odds = torch.stack([truth[part].sum(1) for part in x.split(4096)] if per_sample > 4096 else [truth[x].sum(1)])
    y = torch.bernoulli(torch.sigmoid(odds.view(-1) * 4 / per_sample**0.5), generator=random)
    return TensorDataset(x, y)


def make_model(features: int) -> tuple[nn.EmbeddingBag, torch.optim.Optimizer]:
    """One weight for each feature, of which a sample adds up its own."""
    model = nn.EmbeddingBag(features, 1, mode="sum", sparse=True)
    nn.init.zeros_(model.weight)
    return model, torch.optim.SGD(model.parameters(), lr=RATE)


def make_loader(data: TensorDataset, batch: int = BATCH) -> DataLoader[Any]:
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
    """Over the data that it was trained on, or the first 20,000 samples of it."""
    x, y = (tensor[:20_000] for tensor in data.tensors)
    return float(functional.binary_cross_entropy_with_logits(model(x).view(-1), y))


def measure(rounds: int, data: TensorDataset, features: int, batch: int = BATCH) -> list[dict[str, Any]]:
    """Rounds of one pass of each kind; ``plain`` is rank 0 by itself, while the others do nothing."""
    ways: dict[str, Any] = {"plain": (*make_model(features), make_loader(data, batch))}
    for name, strategy in _KINDS.items():
        model, optimizer = make_model(features)
        ways[name] = distribute(model, optimizer, make_loader(data, batch), strategy=strategy)
    seconds: dict[str, list[float]] = {name: [] for name in ways}
    losses: dict[str, list[float]] = {name: [] for name in ways}
    for _ in range(rounds):
        for name, way in ways.items():
            barrier()
            begin = time.perf_counter()
            if name != "plain" or rank() == 0:
                train(*way)
            barrier()
            spent = allreduce(torch.tensor(time.perf_counter() - begin, dtype=torch.float64), "max")
            seconds[name].append(float(spent))
            losses[name].append(loss_of(way[0], data))
    row: dict[str, Any] = {"what": f"{size()} workers, {len(data)} samples, {data.tensors[0].shape[1]} features each"}
    for name, times in seconds.items():
        row[f"{name}_samples/s"] = len(data) / statistics.median(times)
        if name != "plain":
            row[f"{name}_ratio"] = statistics.median(a / b for a, b in zip(seconds["plain"], times, strict=True))
    against = statistics.median(a / b for a, b in zip(seconds["locked"], seconds["hogwild"], strict=True))
    return [{**row, "than locked_×": against, **{f"{name}_loss": found[-1] for name, found in losses.items()}}]


if __name__ == "__main__":
    main()
