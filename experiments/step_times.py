"""Measures how long steps of the model of these experiments take here, one after the other, for ``learners.py``.

python experiments/step_times.py        writes step_times.json beside this file
"""

from __future__ import annotations

import json
import platform
import time
from datetime import UTC, datetime
from pathlib import Path

import torch
from torch.nn import functional

from learners import BATCH, load_digits, make_model

STORED = Path(__file__).with_name("step_times.json")
STEPS = 2000


def measure(steps: int = STEPS) -> list[float]:
    """Seconds of forward and backward passes of one learner, with one thread."""
    torch.set_num_threads(1)
    x, y, _, _ = load_digits()
    model, seconds = make_model(0), []
    for step in range(steps + 100):
        first = step * BATCH % (len(x) - BATCH)
        begin = time.perf_counter()
        functional.cross_entropy(model(x[first : first + BATCH]), y[first : first + BATCH]).backward()
        seconds.append(time.perf_counter() - begin)
        model.zero_grad()
    return seconds[100:]  # the first ones warm up


if __name__ == "__main__":
    seconds = sorted(measure())
    found = {
        "command": "python experiments/step_times.py",
        "date": datetime.now(UTC).date().isoformat(),
        "machine": f"{platform.machine()} {platform.system()}, torch {torch.__version__}, one thread, others at work",
        "batch": BATCH,
        "median": round(seconds[len(seconds) // 2], 6),
        "seconds": [round(each, 6) for each in seconds],
    }
    STORED.write_text(json.dumps(found) + "\n")
    print(f"median {found['median'] * 1e6:.0f} µs, 99 % under {seconds[len(seconds) * 99 // 100] * 1e6:.0f} µs")
