"""Local steps over slow links against DistributedDataParallel: samples per second, in one run.

Started by ``hocket bench local`` on every worker. A unit of each strategy is a whole round, its exchange included.
"""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Callable
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from hocket.bench.models import mlp
from hocket.bench.timing import median
from hocket.job.collectives import allreduce, barrier
from hocket.job.distribute import distribute
from hocket.job.runtime import init, rank, size

BATCH = 32
PERIOD = 64


def main() -> None:
    """Measure as often as the second argument says, and write the rows to the file named first."""
    init()
    path, rounds = sys.argv[1], int(sys.argv[2])
    dist.init_process_group("gloo")
    units = {"ddp": 1, "mirrored": 1, f"local_sgd(period={PERIOD})": PERIOD, f"diloco(period={PERIOD})": PERIOD}
    ways = {name: _way(name) for name in units}
    times: dict[str, list[float]] = {name: [] for name in units}
    for name, way in ways.items():
        for _ in range(units[name]):
            way()
    for _ in range(rounds):
        for name, way in ways.items():
            barrier()
            start = time.perf_counter()
            for _ in range(units[name]):
                way()
            spent = torch.tensor((time.perf_counter() - start) / units[name], dtype=torch.float64)
            times[name].append(float(allreduce(spent, "max")))
    row: dict[str, object] = {"model": "mlp", "workers": str(size())}
    for name, found in times.items():
        row[f"{name}_samples/s"] = BATCH * size() / median(found)
        row[f"{name}_ratio"] = median(times["ddp"]) / median(found)
    if rank() == 0:
        Path(path).write_text(json.dumps([row]))
    dist.destroy_process_group()


def _way(name: str) -> Callable[[], None]:
    """One step; the strategies count them, as there is no loader."""
    random = torch.Generator().manual_seed(rank())
    x, y = torch.randn(BATCH, 784, generator=random), torch.randint(10, (BATCH,), generator=random)
    net: nn.Module = mlp()
    if name == "ddp":
        net = DistributedDataParallel(net)
    optimizer = torch.optim.SGD(net.parameters(), lr=1e-3)
    if name != "ddp":
        distribute(net, optimizer, strategy=name)

    def step() -> None:
        optimizer.zero_grad()
        nn.functional.cross_entropy(net(x), y).backward()
        optimizer.step()

    return step


if __name__ == "__main__":
    main()
