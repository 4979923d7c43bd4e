"""Simulated workers: how long their steps take, on their virtual clock and on this machine."""

from __future__ import annotations

import time
from typing import Any

import torch
from torch import nn
from torch.nn import functional
from torch.utils.data import DataLoader, TensorDataset

from hocket.job.distribute import distribute
from hocket.job.simulated_job import SimulatedJob
from hocket.job.worker import rank
from hocket.transport.simulated import Speed

_COMPUTING = 0.01  # virtual seconds of a batch
_NETWORK = Speed(latency=50e-6, bandwidth=1.25e9)  # 10 Gbit/s Ethernet, about
_BATCH = 4


def measure(workers: int, strategy: str, servers: int, steps: int) -> dict[str, Any]:
    """One row: simulated workers train a model of 4,810 parameters for about so many steps each."""
    torch.set_num_threads(1)
    job = SimulatedJob(workers, strategy, servers=servers, speed=_NETWORK, timeout=1e6)
    marks: list[tuple[float, float]] = []

    def script() -> None:
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 10))
        optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
        count = workers * _BATCH * steps
        data = TensorDataset(torch.randn(count, 64), torch.randint(0, 10, (count,)))
        model, optimizer, loader = distribute(model, optimizer, DataLoader(data, _BATCH))
        for x, y in loader:
            job.compute(_COMPUTING)
            functional.cross_entropy(model(x), y).backward()
            optimizer.step()
            optimizer.zero_grad()
            if rank() == 0:
                marks.append((job.now(), time.perf_counter()))

    begin = time.perf_counter()
    job.run(script)
    total = time.perf_counter() - begin
    (virtual, real), (last_virtual, last_real), taken = marks[0], marks[-1], len(marks) - 1
    return {
        "strategy": strategy,
        "virtual step_ms": (last_virtual - virtual) / taken * 1e3,
        "real step of all_ms": (last_real - real) / taken * 1e3,
        "real, per worker_µs": (last_real - real) / taken / workers * 1e6,
        "whole run_s": total,
    }
