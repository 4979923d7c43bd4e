"""Times several ways of doing the same thing alternately, so that the noise of the machine hits all of them."""

from __future__ import annotations

import gc
import statistics
import time
from collections.abc import Callable

import torch

from hocket.job.collectives import allreduce, barrier


def alternate(
    ways: dict[str, Callable[[], object]], rounds: int, seconds: float, settle: Callable[[], object] = lambda: None
) -> dict[str, list[float]]:
    """Seconds per call of each way in each round; a round gives every way about ``seconds``; collective.

    A round of a way begins when all ranks are there, and lasts as long as the slowest one; ``settle`` waits for what
    a way has left to a GPU.
    """
    calls = {}
    for name, way in ways.items():
        for _ in range(3):
            way()
        settle()
        start = time.perf_counter()
        for _ in range(3):
            way()
        settle()
        slowest = float(allreduce(torch.tensor((time.perf_counter() - start) / 3, dtype=torch.float64), "max"))
        calls[name] = max(3, min(3000, int(seconds / max(slowest, 1e-7))))
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
            spent = torch.tensor((time.perf_counter() - start) / calls[name], dtype=torch.float64)
            times[name].append(float(allreduce(spent, "max")))
    gc.enable()
    return times


def ratio(times: dict[str, list[float]], slower: str, faster: str) -> float:
    """How many times faster one way is: the median over the rounds of the quotient within a round."""
    return statistics.median(a / b for a, b in zip(times[slower], times[faster], strict=True))


def median(times: list[float]) -> float:
    """The median over the rounds, in seconds."""
    return statistics.median(times)
