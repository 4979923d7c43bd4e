"""Benchmarks that train: a step, local steps, stragglers, and what noise, checkpoints, timelines and memory cost.

Each function is one benchmark, run by ``bench_worker`` on all ranks, with its arguments as texts; it returns rows.
"""

from __future__ import annotations

import gc
import statistics
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, TensorDataset

from hocket import spans
from hocket.job.checkpoint.save_load_resume import save
from hocket.job.collectives import barrier
from hocket.job.distribute import distribute
from hocket.job.worker import current, rank, size
from hocket.lab.bench.bench_worker import alternate, milliseconds, ratio, slowest, total

BATCH = 32
STEPS = 10  # between two checkpoints, and in one measurement of a timeline
PERIOD = 64  # batches of a local round
SLEEP = 4  # times its own step time, by the last worker in every step of ``straggler``
_STEPS_TOGETHER = 60  # steps of ``straggler`` where all workers are in step, and leave at the same step
_WARM = 5  # steps of ``straggler`` before the clock runs

Row = dict[str, Any]


class Residual(nn.Module):
    """A linear layer beside its input."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.linear = nn.Linear(width, width)
        nn.init.normal_(self.linear.weight, std=0.01)  # 100 of these in a row must not explode

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + torch.relu(self.linear(x))


class _Transformer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        layer = nn.TransformerEncoderLayer(256, 4, 1024, dropout=0.0, batch_first=True)
        self.layers = nn.TransformerEncoder(layer, 4, enable_nested_tensor=False)
        self.head = nn.Linear(256, 10)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        scores: torch.Tensor = self.head(self.layers(x).mean(1))
        return scores


def cnn() -> nn.Module:
    """About 20,000 parameters, most of the time in convolutions."""
    return nn.Sequential(
        nn.Conv2d(1, 16, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2),
        nn.Conv2d(16, 32, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2),
        nn.Flatten(), nn.Linear(32 * 7 * 7, 10),
    )  # fmt: skip


def mlp() -> nn.Module:
    """10 million parameters in four layers."""
    return nn.Sequential(
        nn.Linear(784, 2048), nn.ReLU(), nn.Linear(2048, 2048), nn.ReLU(),
        nn.Linear(2048, 2048), nn.ReLU(), nn.Linear(2048, 10),
    )  # fmt: skip


def narrow() -> nn.Module:
    """100 residual layers of width 64: 200 small tensors."""
    return nn.Sequential(*(Residual(64) for _ in range(100)), nn.Linear(64, 10, bias=False))


# By name, how a model is made and the shape of one sample; the transformer has 3 million parameters.
MODELS: dict[str, tuple[Callable[[], nn.Module], tuple[int, ...]]] = {
    "cnn": (cnn, (1, 28, 28)),
    "mlp": (mlp, (784,)),
    "narrow": (narrow, (64,)),
    "transformer": (_Transformer, (64, 256)),
}
OPTIMIZERS: dict[str, Callable[[nn.Module], torch.optim.Optimizer]] = {
    "sgd": lambda model: torch.optim.SGD(model.parameters(), lr=1e-3),
    "adam": lambda model: torch.optim.Adam(model.parameters(), lr=1e-4),
}


class BenchTraining:
    """One model with its optimizer and a batch of this rank's own; calling it takes a step.

    Args:
        model: A name in ``MODELS``.
        optimizer: A name in ``OPTIMIZERS``.
        strategy: A strategy of Hocket, ``ddp`` for PyTorch's DistributedDataParallel, or empty for neither.
        device: The device of model and batch.
    """

    def __init__(self, model: str, optimizer: str, strategy: str, device: str = "cpu") -> None:
        make, shape = MODELS[model]
        random = torch.Generator().manual_seed(rank())
        self.x = torch.randn(BATCH, *shape, generator=random).to(device)
        self.y = torch.randint(10, (BATCH,), generator=random).to(device)
        self.model = make().to(device)
        if strategy == "ddp":
            self.model = DistributedDataParallel(self.model)
        self.optimizer = OPTIMIZERS[optimizer](self.model)
        if strategy not in ("", "ddp"):
            distribute(self.model, self.optimizer, strategy=strategy)

    def __call__(self) -> None:
        self.optimizer.zero_grad()
        nn.functional.cross_entropy(self.model(self.x), self.y).backward()
        self.optimizer.step()

    def steps(self) -> None:
        """Takes ``STEPS`` of them."""
        for _ in range(STEPS):
            self()


def step(rounds: str, models: str, optimizers: str, device: str) -> list[Row]:
    """By Hocket, by DistributedDataParallel and by copies that do not talk; alone, by the plain script and Hocket."""
    strategies = {"plain": "", "hocket": "mirrored"}
    if size() > 1:
        dist.init_process_group("gloo")
        strategies = {"ddp": "ddp", "mirrored": "mirrored", "central": "central", "fused": "central(fused=True)"}
        strategies["independent"] = ""
    base = next(iter(strategies))
    settle: Callable[[], object] = torch.cuda.synchronize if device == "cuda" else lambda: None
    rows = []
    for model in models.split(","):
        for optimizer in optimizers.split(","):
            ways = {way: BenchTraining(model, optimizer, name, device) for way, name in strategies.items()}
            times = alternate({**ways}, int(rounds), 0.4, settle)
            row: Row = {"model": model, "optimizer": optimizer}
            row |= {f"{way}_ms": milliseconds(values) for way, values in times.items()}
            rows.append(row | {f"{way}_ratio": ratio(times, base, way) for way in times if way != base})
    if size() > 1:
        dist.destroy_process_group()
    return rows


def local(rounds: str) -> list[Row]:
    """Local steps over slow links against DistributedDataParallel: samples per second of whole rounds."""
    dist.init_process_group("gloo")
    units = {"ddp": 1, "mirrored": 1, f"local_sgd(period={PERIOD})": PERIOD, f"diloco(period={PERIOD})": PERIOD}
    ways = {name: BenchTraining("mlp", "sgd", name) for name in units}
    times: dict[str, list[float]] = {name: [] for name in units}
    for number in range(int(rounds) + 1):
        for name, way in ways.items():
            barrier()
            start = time.perf_counter()
            for _ in range(units[name]):
                way()
            spent = slowest((time.perf_counter() - start) / units[name])
            times[name] += [spent] if number else []  # the first round warms up
    row: Row = {"model": "mlp", "workers": str(size())}
    for name, found in times.items():
        row[f"{name}_samples/s"] = BATCH * size() / statistics.median(found)
        row[f"{name}_ratio"] = statistics.median(times["ddp"]) / statistics.median(found)
    dist.destroy_process_group()
    return [row]


def straggler(seconds: str) -> list[Row]:
    """Samples per second of all workers, of which the last is slow, with the strategy of the job."""
    model = nn.Sequential(nn.Linear(256, 512), nn.ReLU(), nn.Linear(512, 512), nn.ReLU(), nn.Linear(512, 10))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    data = TensorDataset(torch.randn(1 << 16, 256), torch.randint(0, 10, (1 << 16,)))
    model, optimizer, loader = distribute(model, optimizer, DataLoader(data, BATCH))
    uneven = any(strategy.spec.is_uneven for strategy in current().training.strategies)
    begin, steps, spent = 0.0, 0, 0.0
    for x, y in loader:
        if steps == _WARM:
            begin = time.perf_counter()
        elif steps > _WARM:
            spent = time.perf_counter() - begin
            if spent > float(seconds) if uneven else steps == _STEPS_TOGETHER:
                break
        start = time.perf_counter()
        nn.functional.cross_entropy(model(x), y).backward()
        if rank() == size() - 1:
            time.sleep(SLEEP * (time.perf_counter() - start))
        optimizer.step()
        optimizer.zero_grad()
        steps += 1
    return [{"samples/s": total(BATCH * (steps - _WARM) / spent)}]


def noise(rounds: str, models: str) -> list[Row]:
    """What it costs to measure gradient noise: the same step with and without."""
    strategies = ("mirrored", "central", "central(fused=True)")
    return [_noise(model, strategy, int(rounds)) for model in models.split(",") for strategy in strategies]


def _noise(model: str, strategy: str, rounds: int) -> Row:
    without, looking = BenchTraining(model, "sgd", strategy), BenchTraining(model, "sgd", strategy)
    current().training.strategies[-2].gauges[0].stop()
    gauge, spent = current().training.strategies[-1].gauges[0], 0.0

    def timed() -> None:
        nonlocal spent
        begin = time.perf_counter()
        looking()
        spent += time.perf_counter() - begin

    times = alternate({"without": without, "with": timed}, rounds, 1.0)
    return {
        "model": model,
        "strategy": strategy,
        "without_ms": milliseconds(times["without"]),
        "with_ms": milliseconds(times["with"]),
        "slower by_%": 100 * (ratio(times, "with", "without") - 1),
        "in looks_%": 100 * gauge.seconds / spent,
        "a look in_steps": gauge.steps / gauge.looks,
    }


def checkpoint(rounds: str, models: str, folder: str) -> list[Row]:
    """What a checkpoint every 10 steps costs: training with Adam, with and without it."""
    rows = []
    for model in models.split(","):
        for strategy in ("mirrored", "central"):
            training, place = BenchTraining(model, "adam", strategy), Path(folder, f"{model}-{strategy}")

            def train_and_save(training: BenchTraining = training, place: Path = place) -> None:
                training.steps()
                save(place, model=training.model, optimizer=training.optimizer)

            times = alternate({"training": training.steps, "saving": train_and_save}, int(rounds), 1.0)
            save(place, model=training.model, optimizer=training.optimizer).wait()
            parts = list(place.glob("[0-9]*/*")) if rank() == 0 else []
            rows.append(
                {
                    "model": model,
                    "strategy": strategy,
                    "checkpoint_MB": sum(part.stat().st_size for part in parts) / 1e6,
                    "training_ms": milliseconds(times["training"]),
                    "saving_ms": milliseconds(times["saving"]),
                    "cost_%": (1 / ratio(times, "training", "saving") - 1) * 100,
                }
            )
    return rows


def timeline(rounds: str, models: str) -> list[Row]:
    """What a timeline costs, in a job whose launcher writes one: training with and without it."""
    rows = []
    for model in models.split(","):
        for strategy in ("mirrored", "central"):
            training = BenchTraining(model, "sgd", strategy)

            def plain(training: BenchTraining = training) -> None:
                with spans.silence():
                    training.steps()

            # short, so that a round has one load
            times = alternate({"plain": plain, "watched": training.steps}, int(rounds), 0.3)
            rows.append(
                {
                    "model": model,
                    "strategy": strategy,
                    "plain step_ms": milliseconds(times["plain"]) / STEPS,
                    "with timeline_ms": milliseconds(times["watched"]) / STEPS,
                    "cost_%": (1 / ratio(times, "plain", "watched") - 1) * 100,
                }
            )
    return rows


def memory(strategy: str) -> list[Row]:
    """Memory that a job of all workers takes for a 10M-parameter model with Adam, trained for three steps.

    What the job takes then, gradients and their slots included, is compared with what it took before. The
    proportional set size counts memory that several processes share once.
    """
    _train("cnn", "")  # have everything loaded and allocated that any training needs
    before = _proportional_bytes("")
    training = _train("mlp", strategy)
    whole = total(_proportional_bytes("") - before)
    state = training.optimizer.state
    tensors = [t for p in training.model.parameters() for t in (p, *state[p].values()) if t.dim()]
    private = 0 if strategy.startswith("central") else sum(t.nbytes for t in tensors)
    kept = total(private + _proportional_bytes("hocket-parameters", "hocket-optimizer"))
    barrier()
    return [{"strategy": strategy, "parameters and state_MB": kept / 1e6, "whole training_MB": whole / 1e6}]


def _train(model: str, strategy: str) -> BenchTraining:
    training = BenchTraining(model, "adam", strategy)
    for _ in range(3):
        training()
    training.optimizer.zero_grad()
    gc.collect()
    return training


def _proportional_bytes(*names: str) -> int:
    """This process's share of the mappings whose name contains one of ``names``."""
    barrier()  # all at the same point
    found, counts = 0, False
    for line in Path("/proc/self/smaps").read_text().splitlines():
        key, _, rest = line.partition(" ")
        if not key.endswith(":"):  # the head of a mapping: its addresses, … and its name
            counts = any(name in rest for name in names)
        elif key == "Pss:" and counts:
            found += int(rest.split()[0]) * 1024
    return found
