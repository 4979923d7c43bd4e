"""What it costs to measure gradient noise: the same step with and without; for ``hocket bench noise``."""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Callable
from pathlib import Path

import torch
from torch import nn

from hocket.bench.models import MODELS, OPTIMIZERS
from hocket.bench.timing import alternate, median, ratio
from hocket.job.distribute import distribute
from hocket.job.runtime import current, init, rank

BATCH = 32
_STRATEGIES = ("mirrored", "central", "central(fused=True)")


def main() -> None:
    """Measure the models named in the third argument and write the rows to the file that is the first."""
    init()
    rounds, models = int(sys.argv[2]), sys.argv[3].split(",")
    rows = [_measure(model, strategy, rounds) for model in models for strategy in _STRATEGIES]
    if rank() == 0:
        Path(sys.argv[1]).write_text(json.dumps(rows))


def _measure(model: str, strategy: str, rounds: int) -> dict[str, object]:
    without, with_looks = _step(model, strategy), _step(model, strategy)
    current().strategies[-2].gauges[0].stop()
    gauge, spent = current().strategies[-1].gauges[0], 0.0

    def timed() -> None:
        nonlocal spent
        begin = time.perf_counter()
        with_looks()
        spent += time.perf_counter() - begin

    times = alternate({"without": without, "with": timed}, rounds, 1.0)
    return {
        "model": model,
        "strategy": strategy,
        "without_ms": median(times["without"]) * 1e3,
        "with_ms": median(times["with"]) * 1e3,
        "slower by_%": 100 * (ratio(times, "with", "without") - 1),
        "in looks_%": 100 * gauge.seconds / spent,
        "a look in_steps": gauge.steps / gauge.looks,
    }


def _step(model: str, strategy: str) -> Callable[[], None]:
    make, shape = MODELS[model]
    random = torch.Generator().manual_seed(rank())
    x = torch.randn(BATCH, *shape, generator=random)
    y = torch.randint(10, (BATCH,), generator=random)
    net = make()
    net, update = distribute(net, OPTIMIZERS["sgd"](net), strategy=strategy)

    def one() -> None:
        update.zero_grad()
        nn.functional.cross_entropy(net(x), y).backward()
        update.step()

    return one


if __name__ == "__main__":
    main()
