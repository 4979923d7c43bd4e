"""Memory that a job of all workers takes for a 10M-parameter model with Adam; started by ``hocket bench memory``.

The proportional set size counts memory that several processes share once. The model is trained for three steps;
what the job takes then, gradients and their slots included, is compared with what it took before.
"""

from __future__ import annotations

import gc
import json
import sys
from pathlib import Path

import torch
from torch import nn

from hocket.bench.models import MODELS, OPTIMIZERS
from hocket.job.collectives import allreduce, barrier
from hocket.job.distribute import distribute
from hocket.job.runtime import init, rank


def main() -> None:
    """Measure the strategy named by the second argument and write a row to the file that is the first."""
    init()
    _train("cnn", None)  # have everything loaded and allocated that any training needs
    before = _proportional_bytes("")
    model, optimizer = _train("mlp", sys.argv[2])
    whole = _over_all_ranks(_proportional_bytes("") - before)
    tensors = [t for p in model.parameters() for t in (p, *optimizer.state[p].values()) if t.dim()]
    private = 0 if sys.argv[2].startswith("central") else sum(t.nbytes for t in tensors)
    kept = _over_all_ranks(private + _proportional_bytes("hocket-parameters", "hocket-optimizer"))
    if rank() == 0:
        row = {"strategy": sys.argv[2], "parameters and state_MB": kept / 1e6, "whole training_MB": whole / 1e6}
        Path(sys.argv[1]).write_text(json.dumps([row]))
    barrier()


def _train(name: str, strategy: str | None) -> tuple[nn.Module, torch.optim.Optimizer]:
    make, shape = MODELS[name]
    model = make()
    optimizer = OPTIMIZERS["adam"](model)
    if strategy is not None:
        distribute(model, optimizer, strategy=strategy)
    for _ in range(3):
        optimizer.zero_grad()
        nn.functional.cross_entropy(model(torch.randn(32, *shape)), torch.randint(10, (32,))).backward()
        optimizer.step()
    optimizer.zero_grad()
    gc.collect()
    return model, optimizer


def _over_all_ranks(nbytes: int) -> float:
    return float(allreduce(torch.tensor(nbytes, dtype=torch.float64), "sum"))


def _proportional_bytes(*names: str) -> int:
    """This process's share of the mappings whose name contains one of ``names``."""
    barrier()  # all at the same point
    total, counts = 0, False
    for line in Path("/proc/self/smaps").read_text().splitlines():
        key, _, rest = line.partition(" ")
        if not key.endswith(":"):  # the head of a mapping: its addresses, … and its name
            counts = any(name in rest for name in names)
        elif key == "Pss:" and counts:
            total += int(rest.split()[0]) * 1024
    return total


if __name__ == "__main__":
    main()
