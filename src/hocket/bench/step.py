"""A training step by Hocket, by DistributedDataParallel and by copies that do not talk to each other, in one run.

Started by ``hocket bench step`` on every worker. With one worker: the plain script against the same under Hocket.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from hocket.bench.models import MODELS, OPTIMIZERS
from hocket.bench.timing import alternate, median, ratio
from hocket.job.distribute import distribute
from hocket.job.runtime import init, rank, size

BATCH = 32


def main() -> None:
    """Measure the models and optimizers named in the arguments and write the rows to the file named first."""
    init()
    path, rounds, models, optimizers = sys.argv[1], int(sys.argv[2]), sys.argv[3].split(","), sys.argv[4].split(",")
    device = torch.device(sys.argv[5])
    settle: Callable[[], object] = torch.cuda.synchronize if device.type == "cuda" else lambda: None
    if size() > 1:
        dist.init_process_group("gloo")
    base = "ddp" if size() > 1 else "plain"
    rows = []
    for model in models:
        for optimizer in optimizers:
            times = alternate(_ways(model, optimizer, device), rounds, 0.4, settle)
            rows.append(
                {
                    "model": model,
                    "optimizer": optimizer,
                    **{f"{way}_ms": median(values) * 1e3 for way, values in times.items()},
                    **{f"{way}_ratio": ratio(times, base, way) for way in times if way != base},
                }
            )
    if rank() == 0:
        Path(path).write_text(json.dumps(rows))
    if size() > 1:
        dist.destroy_process_group()


def _ways(model: str, optimizer: str, device: torch.device) -> dict[str, Callable[[], object]]:
    make, shape = MODELS[model]
    random = torch.Generator().manual_seed(rank())
    x = torch.randn(BATCH, *shape, generator=random).to(device)
    y = torch.randint(10, (BATCH,), generator=random).to(device)

    def plain() -> tuple[nn.Module, torch.optim.Optimizer]:
        net = make().to(device)
        return net, OPTIMIZERS[optimizer](net)

    def step(net: nn.Module, update: torch.optim.Optimizer) -> Callable[[], object]:
        def one() -> None:
            update.zero_grad()
            nn.functional.cross_entropy(net(x), y).backward()
            update.step()

        return one

    if size() == 1:
        return {"plain": step(*plain()), "hocket": step(*distribute(*plain()))}
    net = DistributedDataParallel(make())
    return {
        "ddp": step(net, OPTIMIZERS[optimizer](net)),
        "mirrored": step(*distribute(*plain(), strategy="mirrored")),
        "central": step(*distribute(*plain(), strategy="central")),
        "fused": step(*distribute(*plain(), strategy="central(fused=True)")),
        "independent": step(*plain()),
    }


if __name__ == "__main__":
    main()
