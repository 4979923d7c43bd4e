"""DiLoCo at several periods against synchronous training, and elastic averaging against Downpour: validation loss.

python experiments/outer.py
"""

from __future__ import annotations

import json
import statistics
import subprocess
import sys
import tempfile
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from learners import HERE, Options, read_options, save

WORKERS = 4


@dataclass(frozen=True)
class Setting:
    """What is trained: the strategy as on the command line, and the script's own optimizer."""

    part: str
    strategy: str
    optimizer: str
    rate: float
    steps: int
    servers: int = 0


def settings(quick: bool) -> list[Setting]:
    periods = (4,) if quick else (10, 50, 100, 500)
    long, short = (8, 8) if quick else (1000, 400)
    found = [Setting("diloco", "mirrored", "AdamW", 1e-3, long)]
    found += [Setting("diloco", f"diloco(period={period})", "AdamW", 1e-3, long) for period in periods]
    found += [Setting("diloco", f"diloco(period={min(100, long)}, fragments=4)", "AdamW", 1e-3, long)]
    for rate in (0.3,) if quick else (0.1, 0.3, 1.0):
        found += [
            Setting("easgd", "mirrored", "SGD", rate, short),
            Setting("easgd", "easgd(period=10)", "SGD", rate, short),
            Setting("easgd", "easgd(period=10)", "SGD", rate, short, servers=1),
        ]
    for rate in (0.01,) if quick else (0.01, 0.03, 0.1):  # a push is the sum of ten gradients
        found.append(Setting("easgd", "downpour(fetch=10, push=10, adagrad=False)", "SGD", rate, short, servers=1))
    return found


def train(wanted: list[tuple[Setting, int]], workers: int, servers: int) -> list[dict[str, float]]:
    """A real job, which trains with one setting and seed after the other."""
    with tempfile.TemporaryDirectory() as folder:
        asked, found = Path(folder) / "asked.json", Path(folder) / "found.json"
        asked.write_text(json.dumps([{**asdict(setting), "seed": seed} for setting, seed in wanted]))
        job = ["-m", "hocket.launch.cli", "run", "-n", str(workers), "--no-record"]
        job += ["--servers", str(servers)] if servers else []
        subprocess.run([sys.executable, *job, str(HERE / "text.py"), str(asked), str(found)], check=True, stdout=2)
        outcomes: list[dict[str, float]] = json.loads(found.read_text())
    return outcomes


def summarise(setting: Setting, outcomes: list[dict[str, float]]) -> dict[str, Any]:
    losses = [each["loss"] for each in outcomes]
    return {
        **asdict(setting),
        "losses": losses,
        "loss": statistics.mean(losses),
        "megabytes": outcomes[0]["sent"] / 1e6,
    }


def main(options: Options) -> None:
    workers, seeds = (2, (0,)) if options.quick else (WORKERS, (0, 1))
    runs = [(setting, seed) for setting in settings(options.quick) for seed in seeds]
    found: dict[tuple[Setting, int], dict[str, float]] = {}
    for servers in (0, 1):
        wanted = [run for run in runs if run[0].servers == servers]
        found |= zip(wanted, train(wanted, workers, servers), strict=True)
    rows = [
        summarise(setting, [found[setting, seed] for seed in seeds]) for setting in dict.fromkeys(s for s, _ in runs)
    ]
    for row in rows:
        print(
            f"{row['part']:7} {row['strategy']:45} servers {row['servers']}  rate {row['rate']:<6g} "
            f"validation loss {row['loss']:.3f} ({', '.join(f'{loss:.3f}' for loss in row['losses'])})  "
            f"sent {row['megabytes']:.1f} MB"
        )
    save("outer", {"seeds": len(seeds), "workers": workers, "rows": rows}, options.out)
    plot(rows, options)


def plot(rows: list[dict[str, Any]], options: Options) -> None:
    import matplotlib as mpl

    mpl.use("Agg")
    import matplotlib.pyplot as plt

    figure, axes = plt.subplots(1, 2, figsize=(9.2, 3.4))
    rounds = [row for row in rows if row["part"] == "diloco"]
    for name, color in (("mirrored", "C7"), ("diloco", "C0"), ("streaming", "C1")):
        mine = [row for row in rounds if name == kind(row["strategy"])]
        axes[0].plot([row["megabytes"] for row in mine], [row["loss"] for row in mine], "o-", color=color, label=name)
    axes[0].set_xscale("log")
    axes[0].set_xlabel("MB sent by a worker")
    pulled = [row for row in rows if row["part"] == "easgd"]
    for name in dict.fromkeys(label(row) for row in pulled):
        mine = [row for row in pulled if label(row) == name]
        axes[1].plot([row["rate"] for row in mine], [row["loss"] for row in mine], "o-", label=name)
    axes[1].set_xscale("log")
    axes[1].set_xlabel("learning rate")
    for axis, steps in zip(axes, (rounds[0]["steps"], pulled[0]["steps"]), strict=True):
        axis.set_ylabel("validation loss")
        axis.set_title(f"{WORKERS} workers, {steps} steps each", fontsize=10)
        axis.grid(alpha=0.3)
        axis.legend(fontsize=7)
    figure.tight_layout()
    options.out.mkdir(parents=True, exist_ok=True)
    figure.savefig(options.out / "outer.png", dpi=130)


def kind(strategy: str) -> str:
    return "streaming" if "fragments" in strategy else strategy.partition("(")[0]


def label(row: dict[str, Any]) -> str:
    name = str(row["strategy"]).partition("(")[0]
    if name == "easgd":
        return "easgd, asynchronous" if row["servers"] else "easgd, synchronous"
    return f"{name}, {'SGD' if 'adagrad=False' in row['strategy'] else 'Adagrad'}" if name == "downpour" else name


if __name__ == "__main__":
    main(read_options(__doc__))
