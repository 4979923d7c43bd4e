"""n-softsync with many learners, with and without division of the rate by staleness, against synchronous training.

Zhang, Gupta, Lian and Liu (2016) found that with n = learners and the rate of synchronous training it fails, and that
dividing the rate by the staleness of each gradient repairs it.

    python experiments/softsync.py --jobs 2
"""

from __future__ import annotations

import statistics
from typing import Any

from learners import Options, Outcome, Setting, read_options, save, train, train_all

SEEDS = (0, 1, 2)
RATES = (0.03, 0.1, 0.3, 1.0)
LABELS = {
    "bsp": "synchronous",
    "softsync(n)": "n-softsync, n = learners",
    "softsync(n, aware)": "the same, rate / staleness",
}


def strategy_of(kind: str, learners: int) -> str:
    return {
        "bsp": "bsp",
        "softsync(n)": f"softsync({learners})",
        "softsync(n, aware)": f"softsync({learners}, staleness_aware=True)",
    }[kind]


def summarise(kind: str, learners: int, rate: float, outcomes: list[Outcome]) -> dict[str, Any]:
    return {
        "strategy": kind,
        "learners": learners,
        "rate": rate,
        "accuracies": [each.accuracy for each in outcomes],
        "accuracy": statistics.mean(each.accuracy for each in outcomes),
        "failed": sum(each.has_failed for each in outcomes),
        "staleness": statistics.mean(each.staleness for each in outcomes),
        "milliseconds_per_pass": 1000 * statistics.mean(each.seconds_per_pass for each in outcomes),
    }


def main(options: Options) -> None:
    crowds, rates, seeds, passes = ((3,), (0.3,), (0,), 1) if options.quick else ((15, 30), RATES, SEEDS, 12)
    cases = [(kind, learners, rate) for learners in crowds for kind in LABELS for rate in rates]
    settings = [
        Setting(strategy_of(kind, learners), learners, rate, passes, seed)
        for kind, learners, rate in cases
        for seed in seeds
    ]
    found = train_all(settings, options.jobs)
    rows = [
        summarise(*case, found[number * len(seeds) : (number + 1) * len(seeds)]) for number, case in enumerate(cases)
    ]
    one = train(Setting("softsync(1)", crowds[0], rates[-1], 1)).curve
    same = one == train(Setting("bsp", crowds[0], rates[-1], 1)).curve
    print(f"softsync(1) and bsp are {'the same' if same else 'different'} in every number")
    for row in rows:
        print(
            f"{row['learners']:3} learners  {LABELS[row['strategy']]:28} rate {row['rate']:<5g} accuracy "
            f"{row['accuracy']:.1%} ({min(row['accuracies']):.1%} to {max(row['accuracies']):.1%})  failed "
            f"{row['failed']} of {len(seeds)}  staleness {row['staleness']:.1f}  {row['milliseconds_per_pass']:.1f} ms "
            "per pass"
        )
    save("softsync", {"passes": passes, "seeds": len(seeds), "one_is_bsp": same, "rows": rows}, options.out)
    plot(rows, options)


def plot(rows: list[dict[str, Any]], options: Options) -> None:
    import matplotlib as mpl

    mpl.use("Agg")
    import matplotlib.pyplot as plt

    crowds = sorted({row["learners"] for row in rows})
    figure, axes = plt.subplots(1, len(crowds), figsize=(4.6 * len(crowds), 3.4), sharey=True, squeeze=False)
    for axis, learners in zip(axes[0], crowds, strict=True):
        for kind, label in LABELS.items():
            mine = [row for row in rows if row["learners"] == learners and row["strategy"] == kind]
            rates = [row["rate"] for row in mine]
            axis.plot(rates, [100 * row["accuracy"] for row in mine], marker="o", label=label)
            axis.fill_between(
                rates, [100 * min(r["accuracies"]) for r in mine], [100 * max(r["accuracies"]) for r in mine], alpha=0.2
            )
        axis.set_xscale("log")
        axis.set_title(f"{learners} learners", fontsize=10)
        axis.set_xlabel("learning rate")
        axis.grid(alpha=0.3)
    axes[0][0].set_ylabel("test accuracy, %")
    axes[0][0].legend(fontsize=8)
    figure.tight_layout()
    figure.savefig(options.out / "softsync.png", dpi=130)


if __name__ == "__main__":
    main(read_options(__doc__))
