"""Real trainings of a small character model on the Python standard library's own sources, with any strategy.

What experiments on strategies with replicas share: the model, the data, and ``train``, which starts a job.
"""

from __future__ import annotations

import sysconfig
import time
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.nn import functional
from torch.utils.data import DataLoader, TensorDataset

import hocket

CONTEXT = 32
SYMBOLS = 128
HELD_OUT = 0.1


@dataclass(frozen=True)
class Setting:
    """One training.

    Attributes:
        strategy: As on the command line.
        batch: Of one worker.
        rate: Of the optimizer.
        optimizer: ``adamw``, ``sgd``, or ``momentum``.
        decays: Passes after which the rate is divided by ten, as fractions of all.
        warmup: Steps in which the rate rises.
        nbytes: Of the sources.
        servers: That the job has.
        shape: ``mlp`` for the 10-million-parameter one of the benchmarks, else ``small``.
    """

    strategy: str
    workers: int
    passes: int
    batch: int = 16
    rate: float = 3e-3
    optimizer: str = "adamw"
    decays: tuple[float, ...] = ()
    warmup: int = 0
    nbytes: int = 300_000
    seed: int = 0
    servers: int = 0
    shape: str = "small"


class Small(nn.Module):
    """A gated recurrent net with a state of 96: about 50,000 parameters."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(SYMBOLS, 24)
        self.recurrent = nn.GRU(24, 96, batch_first=True)
        self.head = nn.Linear(96, SYMBOLS)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        scores: torch.Tensor = self.head(self.recurrent(self.embedding(x))[0])
        return scores


class Window(nn.Module):
    """10 million parameters in four layers: the last symbol of a piece from the 8 before it."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(
            nn.Linear(8 * SYMBOLS, 2048), nn.ReLU(), nn.Linear(2048, 2048), nn.ReLU(),
            nn.Linear(2048, 1792), nn.ReLU(), nn.Linear(1792, SYMBOLS),
        )  # fmt: skip

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        scores: torch.Tensor = self.layers(functional.one_hot(x[:, -8:], SYMBOLS).flatten(1).float())
        return scores.unsqueeze(1)


def load(nbytes: int) -> tuple[TensorDataset, TensorDataset]:
    """Pieces of source code with the same pieces one symbol further on: for training, and for validation."""
    files = sorted(Path(sysconfig.get_path("stdlib")).glob("*.py"))
    text = b"".join(path.read_bytes() for path in files)[:nbytes]
    data = torch.frombuffer(bytearray(text), dtype=torch.uint8).clamp(max=SYMBOLS - 1).long()
    count = (len(data) - 1) // CONTEXT
    x, y = data[: count * CONTEXT].view(count, CONTEXT), data[1 : count * CONTEXT + 1].view(count, CONTEXT)
    order = torch.randperm(count, generator=torch.Generator().manual_seed(0))
    cut = int(count * HELD_OUT)
    return TensorDataset(x[order[cut:]], y[order[cut:]]), TensorDataset(x[order[:cut]], y[order[:cut]])


def loss_of(model: nn.Module, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    """Per symbol."""
    scores = model(x)
    return functional.cross_entropy(scores.flatten(0, 1), y[:, -scores.shape[1] :].flatten())


def work(told: dict[str, Any]) -> list[dict[str, float]]:
    """What every worker does; the validation loss after every pass, and the seconds of training until then."""
    setting = Setting(**told)
    hocket.init()
    torch.manual_seed(setting.seed)
    training, validation = load(setting.nbytes)
    model: nn.Module = Window() if setting.shape == "mlp" else Small()
    optimizer: torch.optim.Optimizer
    if setting.optimizer == "adamw":
        optimizer = torch.optim.AdamW(model.parameters(), lr=setting.rate)
    else:
        momentum = 0.9 if setting.optimizer == "momentum" else 0.0
        optimizer = torch.optim.SGD(model.parameters(), lr=setting.rate, momentum=momentum, nesterov=momentum > 0)
    loader = DataLoader(training, setting.batch, shuffle=True, drop_last=True)
    checking = hocket.distribute(loader=DataLoader(validation, 256), training=False)
    model, optimizer, loader = hocket.distribute(model, optimizer, loader)

    def factor(step: int) -> float:
        passes = step / max(len(loader), 1)
        fallen = sum(passes >= decay * setting.passes for decay in setting.decays)
        return float(min(1.0, (step + 1) / max(setting.warmup, 1)) * 0.1**fallen)

    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, factor)
    found, spent = [], 0.0
    for _ in range(setting.passes):
        begin = time.perf_counter()
        for x, y in loader:
            loss_of(model, x, y).backward()
            optimizer.step()
            optimizer.zero_grad()
            scheduler.step()
        spent += time.perf_counter() - begin
        with torch.no_grad():
            total = [(loss_of(model, x, y).item() * len(x), len(x)) for x, y in checking]
        weight = sum(count for _, count in total)
        mean = hocket.mean(sum(loss for loss, _ in total) / max(weight, 1), weight=weight)
        found.append({"validation": mean, "seconds": spent})
    return found


def train(setting: Setting) -> list[dict[str, float]]:
    """Run a job of its own on this machine."""
    options: dict[str, Any] = {"servers": setting.servers} if setting.servers else {}
    found: list[dict[str, float]] = hocket.launch(
        work, asdict(setting), n=setting.workers, strategy=setting.strategy, **options
    )
    return found
