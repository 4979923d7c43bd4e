"""Workers of which the last is slow, with one strategy: samples per second of all; for ``hocket bench straggler``.

Every strategy is a job of its own; the jobs alternate.
"""

from __future__ import annotations

import json
import sys
import time
from pathlib import Path

import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from hocket.job.collectives import allreduce
from hocket.job.distribute import distribute
from hocket.job.runtime import current, init, rank, size

BATCH = 32
SLEEP = 4  # times its own step time, by the last worker in every step
_STEPS = 60  # where all are in step, and thus all leave at the same one
_WARM = 5  # steps before the clock runs


def main() -> None:
    """Measure for as many seconds as the second argument says, and write a row to the file that is the first."""
    init()
    speed = _measure(float(sys.argv[2]))
    if rank() == 0:
        Path(sys.argv[1]).write_text(json.dumps([{"samples/s": speed}]))


def _measure(seconds: float) -> float:
    model = nn.Sequential(nn.Linear(256, 512), nn.ReLU(), nn.Linear(512, 512), nn.ReLU(), nn.Linear(512, 10))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    data = TensorDataset(torch.randn(1 << 16, 256), torch.randint(0, 10, (1 << 16,)))
    model, optimizer, loader = distribute(model, optimizer, DataLoader(data, BATCH))
    uneven = any(strategy.is_uneven for strategy in current().strategies)
    begin, steps, spent = 0.0, 0, 0.0
    for x, y in loader:
        if steps == _WARM:
            begin = time.perf_counter()
        elif steps > _WARM:
            spent = time.perf_counter() - begin
            if spent > seconds if uneven else steps == _STEPS:
                break
        start = time.perf_counter()
        nn.functional.cross_entropy(model(x), y).backward()
        if rank() == size() - 1:
            time.sleep(SLEEP * (time.perf_counter() - start))
        optimizer.step()
        optimizer.zero_grad()
        steps += 1
    return float(allreduce(torch.tensor(BATCH * (steps - _WARM) / spent, dtype=torch.float64), "sum"))


if __name__ == "__main__":
    main()
