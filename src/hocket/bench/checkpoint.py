"""What a checkpoint every 10 steps costs: training with and without it, alternately in one run.

Started by ``hocket bench checkpoint`` on every worker.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from pathlib import Path

import torch
from torch import nn

from hocket.bench.models import MODELS, OPTIMIZERS
from hocket.bench.timing import alternate, median, ratio
from hocket.job.checkpoint.resuming import save
from hocket.job.distribute import distribute
from hocket.job.runtime import init, rank

BATCH, EVERY = 32, 10


def main() -> None:
    """Measure the models named in the arguments and write the rows to the file named first."""
    init()
    path, rounds, models, folder = sys.argv[1], int(sys.argv[2]), sys.argv[3].split(","), Path(sys.argv[4])
    rows = []
    for name in models:
        for strategy in ("mirrored", "central"):
            times, megabytes = _measure(name, strategy, rounds, folder / f"{name}-{strategy}")
            rows.append(
                {
                    "model": name,
                    "strategy": strategy,
                    "checkpoint_MB": megabytes,
                    "training_ms": median(times["training"]) * 1e3,
                    "saving_ms": median(times["saving"]) * 1e3,
                    "cost_%": (1 / ratio(times, "training", "saving") - 1) * 100,
                }
            )
    if rank() == 0:
        Path(path).write_text(json.dumps(rows))


def _measure(name: str, strategy: str, rounds: int, folder: Path) -> tuple[dict[str, list[float]], float]:
    make, shape = MODELS[name]
    random = torch.Generator().manual_seed(rank())
    x = torch.randn(BATCH, *shape, generator=random)
    y = torch.randint(10, (BATCH,), generator=random)
    model = make()
    optimizer = OPTIMIZERS["adam"](model)
    distribute(model, optimizer, strategy=strategy)

    def train() -> None:
        for _ in range(EVERY):
            optimizer.zero_grad()
            nn.functional.cross_entropy(model(x), y).backward()
            optimizer.step()

    def train_and_save() -> None:
        train()
        save(folder, model=model, optimizer=optimizer)

    ways: dict[str, Callable[[], object]] = {"training": train, "saving": train_and_save}
    times = alternate(ways, rounds, 1.0)
    save(folder, model=model, optimizer=optimizer).wait()
    parts = list(folder.glob("[0-9]*/*")) if rank() == 0 else []
    return times, sum(part.stat().st_size for part in parts) / 1e6


if __name__ == "__main__":
    main()
