"""Downpour with and without Adagrad on the server (Dean et al. 2012): accuracy against virtual time, at several rates.

python experiments/downpour.py --jobs 2
"""

from __future__ import annotations

import statistics
from typing import Any

from learners import Options, Outcome, Setting, read_options, save, train_all

SEEDS = (0, 1)
RATES = (0.01, 0.03, 0.1, 0.3, 1.0)
GOAL = 0.95
Case = tuple[int, bool, int, float]  # learners, whether with Adagrad, fetch and push, rate


def strategy_of(adagrad: bool, period: int) -> str:
    return f"downpour(fetch={period}, push={period}, adagrad={adagrad})"


def summarise(case: Case, outcomes: list[Outcome]) -> dict[str, Any]:
    learners, adagrad, period, rate = case
    reached = [found[0] for each in outcomes if (found := each.reached(GOAL)) is not None]
    return {
        "learners": learners,
        "adagrad": adagrad,
        "period": period,
        "rate": rate,
        "accuracies": [each.accuracy for each in outcomes],
        "accuracy": statistics.mean(each.accuracy for each in outcomes),
        "failed": sum(each.has_failed for each in outcomes),
        "milliseconds_to_goal": 1000 * statistics.mean(reached) if len(reached) == len(outcomes) else None,
        "staleness": statistics.mean(each.staleness for each in outcomes),
        "curve": outcomes[0].curve,
    }


def main(options: Options) -> None:
    quick = options.quick
    crowds, rates, seeds, passes = ((3,), (0.1,), (0,), 1) if quick else ((8, 16), RATES, SEEDS, 10)
    cases: list[Case] = [
        (learners, adagrad, period, rate)
        for learners in crowds
        for adagrad in (True, False)
        for period in (1, 5)
        for rate in rates
    ]
    settings = [
        Setting(strategy_of(adagrad, period), learners, rate, passes, seed, looks=4)
        for learners, adagrad, period, rate in cases
        for seed in seeds
    ]
    found = train_all(settings, options.jobs)
    rows = [
        summarise(case, found[number * len(seeds) : (number + 1) * len(seeds)]) for number, case in enumerate(cases)
    ]
    for row in rows:
        when = row["milliseconds_to_goal"]
        print(
            f"{row['learners']:3} learners  {'Adagrad' if row['adagrad'] else 'SGD':8} fetch = push = {row['period']}  "
            f"rate {row['rate']:<5g} accuracy {row['accuracy']:.1%}  failed {row['failed']} of {len(seeds)}  "
            f"{GOAL:.0%} after {'-' if when is None else f'{when:.0f} ms'}  staleness {row['staleness']:.1f}"
        )
    save("downpour", {"passes": passes, "seeds": len(seeds), "goal": GOAL, "rows": rows}, options.out)
    plot(rows, options)


def plot(rows: list[dict[str, Any]], options: Options) -> None:
    import matplotlib as mpl

    mpl.use("Agg")
    import matplotlib.pyplot as plt

    crowd = max(row["learners"] for row in rows)
    figure, axes = plt.subplots(1, 2, figsize=(9.2, 3.4))
    for adagrad, style in ((True, "-"), (False, "--")):
        for period, color in ((1, "C0"), (5, "C1")):
            name = f"{'Adagrad' if adagrad else 'SGD'}, fetch = push = {period}"
            mine = [r for r in rows if (r["learners"], r["adagrad"], r["period"]) == (crowd, adagrad, period)]
            axes[0].plot(
                [r["rate"] for r in mine],
                [100 * r["accuracy"] for r in mine],
                style,
                color=color,
                marker="o",
                label=name,
            )
            best = max(mine, key=lambda row: row["accuracy"])
            times = [1000 * seconds for seconds, _, _ in best["curve"]]
            axes[1].plot(
                times,
                [100 * each for _, _, each in best["curve"]],
                style,
                color=color,
                label=f"{name}, rate {best['rate']:g}",
            )
    axes[0].set_xscale("log")
    axes[0].set_xlabel("learning rate")
    axes[0].set_ylabel("test accuracy in the end, %")
    axes[1].set_xlabel("virtual time, ms")
    axes[1].set_ylabel("test accuracy, best rate of each, %")
    for axis in axes:
        axis.set_title(f"{crowd} learners", fontsize=10)
        axis.grid(alpha=0.3)
        axis.legend(fontsize=7)
    figure.tight_layout()
    figure.savefig(options.out / "downpour.png", dpi=130)


if __name__ == "__main__":
    main(read_options(__doc__))
