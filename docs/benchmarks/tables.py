"""Makes the tables and the plot of docs/benchmarks.md from the JSON files beside it."""

import json
from pathlib import Path

HERE = Path(__file__).parent
WAYS = {"mirrored": "mirrored", "central": "central", "fused": "central(fused=True)", "independent": "no communication"}


def rows(name: str) -> dict[int, list[dict[str, float]]]:
    found = {int(path.stem.split("-")[-1]): json.loads(path.read_text()) for path in HERE.glob(f"{name}-*.json")}
    return {workers: found[workers] for workers in sorted(found)}


def step_table() -> str:
    lines = ["| workers | model | optimizer | DDP, ms | " + " | ".join(f"`{w}` ×" for w in WAYS.values()) + " |"]
    lines.append("|---" * (4 + len(WAYS)) + "|")
    for workers, measured in rows("16-cores-step").items():
        for row in measured:
            ratios = " | ".join(f"{row[f'{way}_ratio']:.2f}" for way in WAYS)
            lines.append(f"| {workers} | {row['model']} | {row['optimizer']} | {row['ddp_ms']:.1f} | {ratios} |")
    return "\n".join(lines)


def allreduce_table() -> str:
    lines = [
        "| workers | size | Gloo, µs | ordinary tensor, µs | × | in shared memory already, µs | × |",
        "|---" * 7 + "|",
    ]
    for workers, measured in rows("16-cores-allreduce").items():
        for row in measured:
            lines.append(
                f"| {workers} | {row['size']} | {row['gloo_us']:,.0f} | {row['ordinary_us']:,.0f} | "
                f"{row['ordinary_ratio']:.1f} | {row['shared_us']:,.0f} | {row['shared_ratio']:.1f} |"
            )
    return "\n".join(lines)


def plot() -> None:
    import matplotlib as mpl

    mpl.use("Agg")
    import matplotlib.pyplot as plt

    measured = rows("16-cores-step")
    figure, axes = plt.subplots(2, 3, figsize=(10, 5.6), sharex=True, sharey=True)
    titles = {"cnn": "small CNN", "mlp": "10M-parameter MLP", "narrow": "100 narrow layers"}
    for row, optimizer in zip(axes, ("sgd", "adam"), strict=True):
        for axis, (model, title) in zip(row, titles.items(), strict=True):
            for way, label in WAYS.items():
                values = [
                    next(r for r in results if r["model"] == model and r["optimizer"] == optimizer)[f"{way}_ratio"]
                    for results in measured.values()
                ]
                style = {"color": "0.6", "linestyle": "--"} if way == "independent" else {"marker": "o"}
                axis.plot(list(measured), values, label=label, **style)
            axis.axhline(1, color="black", linewidth=0.8)
            axis.set_xscale("log", base=2)
            axis.set_xticks(list(measured), [str(workers) for workers in measured])
            axis.set_title(f"{title}, {optimizer.upper() if optimizer == 'sgd' else 'Adam'}", fontsize=10)
            axis.grid(alpha=0.3)
    for axis in axes[1]:
        axis.set_xlabel("workers")
    for row in axes:
        row[0].set_ylabel("times faster than DDP")
    axes[0][0].legend(fontsize=8)
    figure.tight_layout()
    figure.savefig(HERE / "step.png", dpi=130)


if __name__ == "__main__":
    print(step_table())
    print()
    print(allreduce_table())
    plot()
