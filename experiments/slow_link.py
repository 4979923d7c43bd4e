"""Passes that local steps need for the validation loss of synchronous training, for a 10-million-parameter net.

python experiments/slow_link.py
"""

from __future__ import annotations

from typing import Any

from learners import Options, read_options, save
from replicas import Setting, train

WORKERS = 4
PASSES = 5
STRATEGIES = ("mirrored", "local_sgd(period=64)", "diloco(period=64)")


def reach(curve: list[dict[str, float]], goal: float) -> float | None:
    """Passes, between two of them by interpolation, after which the loss was that low first."""
    before = None
    for number, point in enumerate(curve, start=1):
        loss = point["validation"]
        if loss <= goal:
            return float(number) if before is None else number - 1 + (before - goal) / (before - loss)
        before = loss
    return None


def main(options: Options) -> None:
    workers, passes, nbytes = (2, 1, 10_000) if options.quick else (WORKERS, PASSES, 500_000)
    common: dict[str, Any] = {"batch": 32, "rate": 0.1, "optimizer": "momentum", "nbytes": nbytes, "shape": "mlp"}
    curves = {name: train(Setting(name, workers, passes, **common)) for name in STRATEGIES}
    goal = max(curve[-1]["validation"] for curve in curves.values())
    rows: list[dict[str, Any]] = []
    for name, curve in curves.items():
        rows.append(
            {"strategy": name, "curve": [point["validation"] for point in curve], "passes to goal": reach(curve, goal)}
        )
        print(f"{name:22} {rows[-1]['passes to goal']} passes to {goal:.3f}: {rows[-1]['curve']}", flush=True)
    save("slow_link", {"passes": passes, "seeds": 1, "workers": workers, "goal": goal, "rows": rows}, options.out)
    plot(rows, options)


def plot(rows: list[dict[str, Any]], options: Options) -> None:
    import matplotlib as mpl

    mpl.use("Agg")
    import matplotlib.pyplot as plt

    figure, axes = plt.subplots(figsize=(6.4, 3.6))
    for row in rows:
        axes.plot(range(1, len(row["curve"]) + 1), row["curve"], "o-", label=row["strategy"])
    axes.set(xlabel="passes", ylabel="validation loss per symbol")
    axes.legend(fontsize=8)
    figure.tight_layout()
    figure.savefig(options.out / "slow_link.png", dpi=120)


if __name__ == "__main__":
    main(read_options(__doc__))
