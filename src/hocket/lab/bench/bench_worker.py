"""What every worker of a benchmark runs: measures, and rank 0 writes the rows.

``python -m hocket.lab.bench.bench_worker NAME FILE ARGUMENTS…`` calls the function NAME with the arguments, on all
ranks. Ways of doing the same thing are timed alternately, so that the noise of the machine hits all of them.
"""

from __future__ import annotations

import gc
import importlib
import json
import os
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path

import torch

from hocket.job.collectives import allreduce, barrier
from hocket.job.worker import init, rank

# The module of each benchmark that is not in bench_training.
_ELSEWHERE = {name: name for name in ("allreduce", "gpu", "hogwild", "server")} | {
    "links": "collectives",
    "collectives": "collectives",
}


def main() -> None:
    """Run the benchmark that the arguments name."""
    name, path, *arguments = sys.argv[1:]
    _read_mpi()
    module = importlib.import_module(f"hocket.lab.bench.bench_{_ELSEWHERE.get(name, 'training')}")
    init()
    rows = getattr(module, name)(*arguments)
    if rank() == 0:
        Path(path).write_text(json.dumps(rows))


def alternate(
    ways: dict[str, Callable[[], object]],
    rounds: int,
    seconds: float,
    settle: Callable[[], object] = lambda: None,
    least: int = 3,
) -> dict[str, list[float]]:
    """Seconds per call of each way in each round; a round gives every way about ``seconds``; collective.

    A round of a way begins when all ranks are there, and lasts as long as the slowest one; ``settle`` waits for what
    a way has left to a GPU. There are ``least`` calls in a round, or more.
    """
    calls = {}
    for name, way in ways.items():
        for _ in range(least):
            way()
        settle()
        start = time.perf_counter()
        for _ in range(least):
            way()
        settle()
        took = slowest((time.perf_counter() - start) / least)
        calls[name] = max(least, min(3000, int(seconds / max(took, 1e-7))))
    times: dict[str, list[float]] = {name: [] for name in ways}
    gc.collect()
    gc.disable()
    for _ in range(rounds):
        for name, way in ways.items():
            barrier()
            start = time.perf_counter()
            for _ in range(calls[name]):
                way()
            settle()
            times[name].append(slowest((time.perf_counter() - start) / calls[name]))
    gc.enable()
    return times


def _read_mpi() -> None:
    """Under mpirun, say who this worker is in the words of torchrun."""
    names = {"RANK": "RANK", "WORLD_SIZE": "SIZE", "LOCAL_RANK": "LOCAL_RANK", "LOCAL_WORLD_SIZE": "LOCAL_SIZE"}
    for ours, theirs in names.items():
        if (value := os.environ.get(f"OMPI_COMM_WORLD_{theirs}")) is not None:
            os.environ.setdefault(ours, value)


def slowest(seconds: float) -> float:
    """The most that a rank needed; collective."""
    return float(allreduce(torch.tensor(seconds, dtype=torch.float64), "max"))


def total(value: float) -> float:
    """The sum over all ranks; collective."""
    return float(allreduce(torch.tensor(value, dtype=torch.float64), "sum"))


def ratio(times: dict[str, list[float]], slower: str, faster: str) -> float:
    """How many times faster one way is: the median over the rounds of the quotient within a round."""
    return statistics.median(a / b for a, b in zip(times[slower], times[faster], strict=True))


def milliseconds(times: list[float]) -> float:
    """The median over the rounds."""
    return statistics.median(times) * 1e3


if __name__ == "__main__":
    main()
