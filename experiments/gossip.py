"""Gossip's loss against the spectral gap of its graph: topologies, numbers of workers, data alike or of one's own.

Workers are rows of a matrix in one process, mixed by the matrices of ``hocket.comm.graphs``; then a few real jobs.

python experiments/gossip.py
"""

from __future__ import annotations

import math
import statistics
import sysconfig
from pathlib import Path
from typing import Any

import torch
from torch.func import functional_call, grad, vmap

import replicas
from hocket.comm.graphs import Graph
from hocket.comm.spectrum import gap
from hocket.specs.local_steps import TOPOLOGIES
from learners import Options, read_options, save

WORKERS = (4, 16)
SEEDS = (0, 1)
STEPS, BATCH, RATE = 300, 8, 0.3
BEFORE, WIDTH, HIDDEN = 6, 16, 64  # symbols that the next one is predicted from
NBYTES = 300_000
JOBS = ("mirrored", "gossip(topology='complete')", "gossip", "gossip(push_sum=True)",
        "gossip(topology='pairs', asynchronous=True)")  # fmt: skip


def make_model() -> torch.nn.Module:
    """The next symbol from the ones before it: 16,576 parameters."""
    return torch.nn.Sequential(
        torch.nn.Embedding(replicas.SYMBOLS, WIDTH), torch.nn.Flatten(), torch.nn.Linear(BEFORE * WIDTH, HIDDEN),
        torch.nn.Tanh(), torch.nn.Linear(HIDDEN, replicas.SYMBOLS),
    )  # fmt: skip


def load(nbytes: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Windows of the text in their order: those to train on, and of every ten thousand one thousand for validation."""
    files = sorted(Path(sysconfig.get_path("stdlib")).glob("*.py"))
    read = b"".join(path.read_bytes() for path in files)[:nbytes]
    text = torch.frombuffer(bytearray(read), dtype=torch.uint8).clamp(max=replicas.SYMBOLS - 1).long()
    windows = text.unfold(0, BEFORE + 1, 1)
    held = torch.arange(len(windows)) // 1000 % 10 == 0
    return windows[~held], windows[held][::7]


def train(topology: str, workers: int, own: bool, seed: int, steps: int, data: Any) -> dict[str, float]:
    """Adapt, then combine; ``own``: every worker has a part of the text for itself."""
    training, validation = data
    torch.manual_seed(seed)
    model = make_model()
    names = [name for name, _ in model.named_parameters()]
    shapes = [p.shape for p in model.parameters()]
    start = torch.cat([p.detach().flatten() for p in model.parameters()])
    sizes = [shape.numel() for shape in shapes]

    def loss(flat: torch.Tensor, batch: torch.Tensor) -> torch.Tensor:
        parts = zip(names, flat.split(sizes), shapes, strict=True)
        scores = functional_call(model, {name: part.view(shape) for name, part, shape in parts}, (batch[:, :-1],))
        return torch.nn.functional.cross_entropy(scores, batch[:, -1])

    gradients = vmap(grad(loss))
    graph, x = Graph(topology, seed), start.repeat(workers, 1)
    drawn = torch.Generator().manual_seed(seed)
    part = len(training) // workers
    offsets = torch.arange(workers)[:, None] * part if own else torch.zeros(workers, 1, dtype=torch.long)
    for step in range(steps):
        chosen = torch.randint(part if own else len(training), (workers, BATCH), generator=drawn) + offsets
        x = x - RATE * gradients(x, training[chosen])
        if topology != "none":
            x = torch.tensor(graph.mixing(workers, step)) @ x
    mean = x.mean(0)
    with torch.no_grad():
        each = [float(loss(row, validation)) for row in x[:: max(1, workers // 4)]]
        return {
            "validation": float(loss(mean, validation)),
            "validation_of_one": statistics.mean(each),
            "distance": math.sqrt(float(((x - mean) ** 2).sum(1).mean() / (mean**2).sum())),
        }


def simulate(quick: bool) -> list[dict[str, Any]]:
    sizes, seeds, steps, nbytes = ((4,), (0,), 20, 20_000) if quick else (WORKERS, SEEDS, STEPS, NBYTES)
    data, rows = load(nbytes), []
    for own in (False, True):
        for workers in sizes:
            for topology in ("none", *TOPOLOGIES):
                found = [train(topology, workers, own, seed, steps, data) for seed in seeds]
                row: dict[str, Any] = {"workers": workers, "topology": topology, "data": "own" if own else "shared"}
                row["gap"] = 0.0 if topology == "none" else gap(Graph(topology), workers)
                row |= {key: statistics.mean(each[key] for each in found) for key in found[0]}
                row["spread"] = statistics.pstdev(each["validation"] for each in found)
                rows.append(row)
                print(
                    f"{row['data']:6} {workers:2} workers {topology:11} gap {row['gap']:.3f} validation "
                    f"{row['validation']:.4f} of one {row['validation_of_one']:.4f} distance {row['distance']:.4f}",
                    flush=True,
                )
    return rows


def main(options: Options) -> None:
    torch.set_num_threads(1)
    rows = simulate(options.quick)
    jobs = []
    for strategy in ("gossip",) if options.quick else JOBS:
        workers, passes, nbytes = (2, 1, 8_000) if options.quick else (4, 3, NBYTES)
        setting = replicas.Setting(strategy, workers, passes, optimizer="momentum", rate=0.1, nbytes=nbytes)
        losses = [point["validation"] for point in replicas.train(setting)]
        jobs.append({"strategy": strategy, "workers": workers, "validations": losses})
        print(f"a real job, {workers} workers, {strategy}: {losses[-1]:.4f}", flush=True)
    seeds = 1 if options.quick else len(SEEDS)
    save("gossip", {"seeds": seeds, "steps": STEPS, "rate": RATE, "rows": rows, "jobs": jobs}, options.out)
    plot(rows, options)


def plot(rows: list[dict[str, Any]], options: Options) -> None:
    import matplotlib as mpl

    mpl.use("Agg")
    import matplotlib.pyplot as plt

    figure, axes = plt.subplots(1, 3, figsize=(11.5, 3.6))
    shown = [("shared", "validation_of_one"), ("own", "validation_of_one"), ("own", "distance")]
    for axis, (data, key) in zip(axes, shown, strict=True):
        for workers in sorted({row["workers"] for row in rows}):
            mine = sorted((r for r in rows if r["workers"] == workers and r["data"] == data), key=lambda r: r["gap"])
            axis.plot([r["gap"] for r in mine], [r[key] for r in mine], marker="o", label=f"{workers} workers")
        words = "distance from consensus" if key == "distance" else "validation loss of one worker's model"
        axis.set_title(f"{words}\n{data} data", fontsize=9)
        axis.set_xlabel("spectral gap")
        axis.grid(alpha=0.3)
    axes[0].legend(fontsize=8)
    figure.tight_layout()
    figure.savefig(options.out / "gossip.png", dpi=120)


if __name__ == "__main__":
    main(read_options(__doc__))
