"""The bound on staleness (Ho et al. 2013): time per pass, passes to an accuracy, and their product.

python experiments/staleness.py --jobs 2
"""

from __future__ import annotations

import statistics
from typing import Any

from learners import Options, Outcome, Setting, read_options, save, train_all

BOUNDS = (0, 1, 3, 10, None)
SEEDS = (0, 1, 2, 3, 4)
SLOWNESS = (1.0, 1.0, 1.0, 1.0, 1.0, 1.2, 1.5, 2.0)  # of 8 learners
RATES = (0.3, 1.0, 2.0)
GOAL = 0.95
MOST = 20  # passes


def summarise(bound: int | None, rate: float, outcomes: list[Outcome]) -> dict[str, Any]:
    reached = [found for each in outcomes if (found := each.reached(GOAL)) is not None]
    return {
        "staleness": bound,
        "rate": rate,
        "milliseconds_per_pass": 1000 * statistics.mean(each.seconds_per_pass for each in outcomes),
        "measured_staleness": statistics.mean(each.staleness for each in outcomes),
        "reached": len(reached),
        "passes": [passes for _, passes in reached],
        "passes_to_goal": statistics.mean(passes for _, passes in reached) if reached else None,
        "milliseconds_to_goal": 1000 * statistics.mean(seconds for seconds, _ in reached) if reached else None,
    }


def main(options: Options) -> None:
    quick = options.quick
    bounds, rates, seeds, most = ((0, 1, None), (1.0,), (0,), 1) if quick else (BOUNDS, RATES, SEEDS, MOST)
    cases = [(bound, rate) for rate in rates for bound in bounds]
    settings = [
        Setting(
            f"ps(staleness={bound})", len(SLOWNESS), rate, most, seed, slowness=SLOWNESS, looks=6,
            until=0.5 if quick else GOAL,
        )
        for bound, rate in cases
        for seed in seeds
    ]  # fmt: skip
    found = train_all(settings, options.jobs)
    rows = [
        summarise(*case, found[number * len(seeds) : (number + 1) * len(seeds)]) for number, case in enumerate(cases)
    ]
    for row in rows:
        passes, time = row["passes_to_goal"], row["milliseconds_to_goal"]
        print(
            f"rate {row['rate']:<4g} staleness {row['staleness']!s:4}  {row['milliseconds_per_pass']:.1f} ms per pass  "
            f"{GOAL:.0%} after {'-' if passes is None else f'{passes:.1f}'} passes, "
            f"{'-' if time is None else f'{time:.0f}'} ms ({row['reached']} of {len(seeds)} runs)  measured staleness "
            f"{row['measured_staleness']:.1f} updates"
        )
    save("staleness", {"goal": GOAL, "seeds": len(seeds), "slowness": SLOWNESS, "rows": rows}, options.out)
    plot(rows, options)


def plot(rows: list[dict[str, Any]], options: Options) -> None:
    import matplotlib as mpl

    mpl.use("Agg")
    import matplotlib.pyplot as plt

    figure, axes = plt.subplots(1, 3, figsize=(10.5, 3.2))
    titles = {
        "milliseconds_per_pass": "time per pass, ms",
        "passes_to_goal": f"passes to {GOAL:.0%}",
        "milliseconds_to_goal": f"time to {GOAL:.0%}, ms",
    }
    for axis, (key, title) in zip(axes, titles.items(), strict=True):
        for rate in sorted({row["rate"] for row in rows}):
            mine = [row for row in rows if row["rate"] == rate]
            axis.plot(range(len(mine)), [row[key] for row in mine], marker="o", label=f"rate {rate:g}")
            axis.set_xticks(range(len(mine)), ["∞" if r["staleness"] is None else str(r["staleness"]) for r in mine])
        axis.set_title(title, fontsize=10)
        axis.set_xlabel("bound on staleness")
        axis.set_ylim(bottom=0)
        axis.grid(alpha=0.3)
    axes[0].legend(fontsize=8)
    figure.tight_layout()
    figure.savefig(options.out / "staleness.png", dpi=130)


if __name__ == "__main__":
    main(read_options(__doc__))
