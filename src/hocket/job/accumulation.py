"""Gradient accumulation: backward passes whose gradients stay on this worker until the next exchange."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from hocket.job.runtime import current


@contextmanager
def accumulate(*, mean: bool = False) -> Iterator[None]:
    """Within this context, ``backward()`` adds to ``p.grad`` without any exchange.

    The next ``backward()`` outside exchanges the sum, as if all batches had been one; it must come before
    ``optimizer.step()``.

    Args:
        mean: Divide the sum by the number of backward passes, that last one included.
    """
    runtime = current()
    strategies = runtime.wake() if mean else runtime.strategies
    for strategy in strategies:
        strategy.collector.begin()
        strategy.collector.held += 1
        strategy.collector.mean |= mean
    try:
        yield
    finally:
        for strategy in strategies:
            strategy.collector.held -= 1
