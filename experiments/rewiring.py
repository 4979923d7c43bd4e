"""How long it takes until all neighbours of a killed worker mix without it: from the kill to the end of such a round.

python experiments/rewiring.py
"""

from __future__ import annotations

import os
import signal
import statistics
import tempfile
import time
from pathlib import Path
from typing import Any

import torch

import hocket
from hocket.job.worker import current
from hocket.strategies.base import Why

WORKERS, VICTIM, REPEATS = 4, 1, 3
STRATEGIES = ("gossip", "gossip(topology='exponential', push_sum=True)", "gossip(topology='pairs', asynchronous=True)")


def work(folder: str, seconds: float) -> float:
    """Steps of about 10 ms without a loader; the longest time that one of the others needed."""
    hocket.init()
    model = torch.nn.Sequential(torch.nn.Linear(64, 256), torch.nn.ReLU(), torch.nn.Linear(256, 10))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    model, optimizer = hocket.distribute(model, optimizer)
    strategy: Any = current().training.strategies[0]
    killed, rewired, begin = Path(folder) / "killed", None, time.monotonic()
    while time.monotonic() - begin < seconds or rewired is None:
        model(torch.randn(32, 64)).square().mean().backward()
        time.sleep(0.005)
        optimizer.step()
        optimizer.zero_grad()
        if hocket.rank() == VICTIM and time.monotonic() - begin > seconds / 2:
            killed.write_text(str(time.monotonic()))  # the clock is that of the host
            os.kill(os.getpid(), signal.SIGKILL)
        if rewired is None and VICTIM not in strategy._peers.live:
            rewired = time.monotonic() - float(killed.read_text())
    strategy.settle(Why.END)  # as for a loop over a loader: who is still in a round does not wait for the others
    return float(hocket.maximum(rewired))


def main() -> None:
    for strategy in STRATEGIES:
        found = []
        for _ in range(REPEATS):
            with tempfile.TemporaryDirectory() as folder:
                found.append(hocket.launch(work, folder, 1.0, n=WORKERS, strategy=strategy))
        print(f"{strategy}: {1000 * statistics.median(found):.0f} ms (of {REPEATS}: up to {1000 * max(found):.0f} ms)")


if __name__ == "__main__":
    main()
