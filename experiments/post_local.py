"""Post-local SGD against the large batch that it replaces (Lin et al. 2020): validation loss after as many passes.

python experiments/post_local.py
"""

from __future__ import annotations

import statistics
from typing import Any

from learners import Options, read_options, save
from replicas import Setting, train

WORKERS = 4
SEEDS = (0, 1)
PASSES = 8
DECAYS = (0.5, 0.75)


def settings(workers: int, passes: int, nbytes: int, seed: int) -> dict[str, Setting]:
    """Momentum SGD, the rate divided by ten twice; the large batch has a rate as many times larger, and a warm-up."""
    common: dict[str, Any] = {
        "workers": workers, "passes": passes, "optimizer": "momentum", "decays": DECAYS, "nbytes": nbytes, "seed": seed
    }  # fmt: skip
    rate, small, large = 0.25, 4, 32
    big: dict[str, Any] = {**common, "batch": large, "rate": min(rate * large / small, 2.0), "warmup": 50}
    return {
        "small batch": Setting("mirrored", **common, batch=small, rate=rate),
        "large batch": Setting("mirrored", **big),
        "post-local, 4": Setting('local_sgd(period=4, after="decay")', **big),
        "post-local, 16": Setting('local_sgd(period=16, after="decay")', **big),
        "local, 16": Setting("local_sgd(period=16)", **big),
    }


def main(options: Options) -> None:
    workers, seeds, passes, nbytes = (2, (0,), 2, 20_000) if options.quick else (WORKERS, SEEDS, PASSES, 250_000)
    runs = [settings(workers, passes, nbytes, seed) for seed in seeds]
    rows = []
    for name in runs[0]:
        found = [train(each[name]) for each in runs]
        final = [curve[-1]["validation"] for curve in found]
        rows.append(
            {
                "name": name,
                "strategy": runs[0][name].strategy,
                "batch": runs[0][name].batch * workers,
                "rate": runs[0][name].rate,
                "validation": statistics.mean(final),
                "validations": final,
                "seconds": statistics.mean(curve[-1]["seconds"] for curve in found),
                "curve": [point["validation"] for point in found[0]],
            }
        )
        row = rows[-1]
        print(f"{name:15} batch {row['batch']:4} rate {row['rate']:g} validation {row['validation']:.4f}", flush=True)
    save("post_local", {"passes": passes, "seeds": len(seeds), "workers": workers, "rows": rows}, options.out)
    plot(rows, options)


def plot(rows: list[dict[str, Any]], options: Options) -> None:
    import matplotlib as mpl

    mpl.use("Agg")
    import matplotlib.pyplot as plt

    figure, axes = plt.subplots(figsize=(6.4, 3.6))
    for row in rows:
        axes.plot(range(1, len(row["curve"]) + 1), row["curve"], label=f"{row['name']} ({row['batch']})")
    axes.set(xlabel="passes", ylabel="validation loss per symbol", yscale="log")
    axes.legend(fontsize=8)
    figure.tight_layout()
    figure.savefig(options.out / "post_local.png", dpi=120)


if __name__ == "__main__":
    main(read_options(__doc__))
