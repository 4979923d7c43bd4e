"""What a timeline costs: training with and without it, alternately in one run.

Started by ``hocket bench timeline`` on every worker, in a job whose launcher writes a timeline.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

import torch
from torch import nn

from hocket import spans
from hocket.bench.models import MODELS, OPTIMIZERS
from hocket.bench.timing import alternate, median, ratio
from hocket.job.distribute import distribute
from hocket.job.runtime import init, rank

BATCH, STEPS = 32, 10


def main() -> None:
    """Measure the models named in the arguments and write the rows to the file named first."""
    init()
    path, rounds, models = sys.argv[1], int(sys.argv[2]), sys.argv[3].split(",")
    rows = []
    for name in models:
        for strategy in ("mirrored", "central"):
            times = _measure(name, strategy, rounds)
            rows.append(
                {
                    "model": name,
                    "strategy": strategy,
                    "plain step_ms": median(times["plain"]) * 1e3 / STEPS,
                    "with timeline_ms": median(times["watched"]) * 1e3 / STEPS,
                    "cost_%": (1 / ratio(times, "plain", "watched") - 1) * 100,
                }
            )
    if rank() == 0:
        Path(path).write_text(json.dumps(rows))


def _measure(name: str, strategy: str, rounds: int) -> dict[str, list[float]]:
    make, shape = MODELS[name]
    random = torch.Generator().manual_seed(rank())
    x = torch.randn(BATCH, *shape, generator=random)
    y = torch.randint(10, (BATCH,), generator=random)
    model = make()
    optimizer = OPTIMIZERS["sgd"](model)
    distribute(model, optimizer, strategy=strategy)

    def watched() -> None:
        for _ in range(STEPS):
            optimizer.zero_grad()
            nn.functional.cross_entropy(model(x), y).backward()
            optimizer.step()

    def plain() -> None:
        with spans.silence():
            watched()

    return alternate({"plain": plain, "watched": watched}, rounds, 0.3)  # short, so that a round has one load


if __name__ == "__main__":
    main()
