"""Hogwild's speed-up against sparsity: how many of a million features a sample has, from 10 to 100,000.

Logistic regression by two workers without locks, and with one, against one plain process: passes over the data per
second, and the loss after as many samples. Real processes on real cores: run it on a machine that does nothing else.
"""

from __future__ import annotations

import json
import os
import statistics
import sys
import tempfile
from pathlib import Path
from typing import Any

from hocket.launch import supervisor
from hocket.launch.environment import Job
from learners import Options, read_options, save

WORKERS = 2
DENSITIES = (10, 100, 1_000, 10_000, 100_000)
TOUCHES = 4_000_000  # features of all samples of a pass together
LABELS = {"hogwild": "without locks", "locked": "with a lock"}


def measure(per_sample: int, samples: int, rounds: int, seed: int) -> dict[str, Any]:
    """What ``hocket bench hogwild`` measures, in a job of its own."""
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "rows.json"
        arguments = [str(each) for each in (file, rounds, samples, per_sample, seed)]
        job = Job(("-m", "hocket.lab.bench.bench_worker", "hogwild", *arguments), WORKERS, {"strategy": "hogwild"})
        if status := supervisor.run(job, None, summary=False):
            sys.exit(status)
        row: dict[str, Any] = json.loads(file.read_text())[0]
        return row


def summarise(per_sample: int, samples: int, found: list[dict[str, Any]]) -> dict[str, Any]:
    row: dict[str, Any] = {"per_sample": per_sample, "samples": samples}
    for name in LABELS:
        row[f"{name}_speedup"] = statistics.median(each[f"{name}_ratio"] for each in found)
        row[f"{name}_speedups"] = [each[f"{name}_ratio"] for each in found]
        row[f"{name}_loss"] = statistics.mean(each[f"{name}_loss"] for each in found)
        row[f"{name}_more_loss"] = statistics.mean(each[f"{name}_loss"] / each["plain_loss"] - 1 for each in found)
    return {**row, "plain_loss": statistics.mean(each["plain_loss"] for each in found)}


def main(options: Options) -> None:
    densities, touches, rounds, seeds = ((1000,), 10**6, 1, 1) if options.quick else (DENSITIES, TOUCHES, 2, 2)
    rows = []
    for per_sample in densities:
        samples = max(400, min(200_000, touches // per_sample))
        found = [measure(per_sample, samples, rounds, seed) for seed in range(seeds)]
        rows.append(row := summarise(per_sample, samples, found))
        print(
            f"{per_sample:7,} features a sample, {samples:7,} samples: {row['hogwild_speedup']:.2f}× without locks, "
            f"{row['locked_speedup']:.2f}× with one; loss {row['plain_loss']:.4f} alone, "
            f"{row['hogwild_more_loss']:+.2%} without locks, {row['locked_more_loss']:+.2%} with one",
            flush=True,
        )
    load = os.getloadavg()[1]  # of the machine, which should have had nothing else to do
    save("hogwild", {"workers": WORKERS, "seeds": seeds, "passes": rounds, "load": load, "rows": rows}, options.out)
    plot(rows, options)


def plot(rows: list[dict[str, Any]], options: Options) -> None:
    import matplotlib as mpl

    mpl.use("Agg")
    import matplotlib.pyplot as plt

    figure, (left, right) = plt.subplots(1, 2, figsize=(9.2, 3.4))
    touched = [row["per_sample"] for row in rows]
    for name, label in LABELS.items():
        left.plot(touched, [row[f"{name}_speedup"] for row in rows], marker="o", label=label)
        low, high = ([pick(row[f"{name}_speedups"]) for row in rows] for pick in (min, max))
        left.fill_between(touched, low, high, alpha=0.2)
        right.plot(touched, [100 * row[f"{name}_more_loss"] for row in rows], marker="o", label=label)
    left.set_ylabel(f"speed-up of {WORKERS} workers")
    left.axhline(1, color="grey", linewidth=0.8)
    right.set_ylabel("loss more than alone, %")
    for axis in (left, right):
        axis.set_xscale("log")
        axis.set_xlabel("features of a sample, of a million")
        axis.grid(alpha=0.3)
    left.legend(fontsize=8)
    figure.tight_layout()
    figure.savefig(options.out / "hogwild.png", dpi=130)


if __name__ == "__main__":
    main(read_options(__doc__))
