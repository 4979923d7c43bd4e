"""A step of several workers on GPUs, over NCCL, by Hocket and by DistributedDataParallel."""

from __future__ import annotations

import itertools
import os
from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from hocket.job.collectives import barrier
from hocket.job.devices import count_as_a_host
from hocket.job.distribute import distribute
from hocket.job.worker import current, rank
from hocket.lab.bench.bench_training import Residual, Row
from hocket.lab.bench.bench_worker import alternate, milliseconds, ratio, slowest

_LOOKS = 5  # at the time on the CPU
_COUNTED = 20  # steps in each of them
_VOCABULARY, _LENGTH = 50_257, 512


class _Gpt(nn.Module):
    """124 million parameters: 12 layers of width 768, the head tied to the embedding."""

    def __init__(self) -> None:
        super().__init__()
        self.tokens, self.places = nn.Embedding(_VOCABULARY, 768), nn.Embedding(1024, 768)
        layer = nn.TransformerEncoderLayer(768, 12, 3072, 0.0, nn.functional.gelu, batch_first=True, norm_first=True)
        self.layers = nn.TransformerEncoder(layer, 12, nn.LayerNorm(768), enable_nested_tensor=False)
        self.head = nn.Linear(768, _VOCABULARY, bias=False)
        self.head.weight = self.tokens.weight
        nn.init.normal_(self.tokens.weight, std=0.02)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        hidden = self.tokens(x) + self.places(torch.arange(x.shape[1], device=x.device))
        mask = nn.Transformer.generate_square_subsequent_mask(x.shape[1], device=x.device)
        scores: torch.Tensor = self.head(self.layers(hidden, mask=mask, is_causal=True))
        return scores.transpose(1, 2)


def _cnn() -> nn.Module:
    """Four million parameters, of which most of the time goes into convolutions."""
    widths = (3, 64, 128, 256, 512, 512)
    layers: list[nn.Module] = []
    for number, (before, after) in enumerate(itertools.pairwise(widths)):
        layers += [nn.Conv2d(before, after, 3, padding=1), nn.BatchNorm2d(after), nn.ReLU()]
        layers += [nn.MaxPool2d(2)] if number else []
    return nn.Sequential(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(512, 10))


def _small() -> nn.Module:
    """200 residual layers of width 64: 400 small tensors."""
    return nn.Sequential(*(Residual(64) for _ in range(200)), nn.Linear(64, 10, bias=False))


# By name, how a model is made, and whether it computes in bfloat16.
MODELS: dict[str, tuple[Callable[[], nn.Module], bool]] = {
    "cnn": (_cnn, False),
    "gpt": (_Gpt, True),
    "small": (_small, False),
}


class _Step:
    """A model with its optimizer and a batch of this rank's own; calling it takes a step.

    Args:
        model: A name in ``MODELS``.
        way: ``ddp``, ``independent``, or a strategy of Hocket.
    """

    def __init__(self, model: str, way: str) -> None:
        make, self._narrow = MODELS[model]
        torch.manual_seed(rank())
        self._x, self._y = _batch(model)
        self.model = make().cuda()
        self._call: nn.Module = self.model
        if way == "ddp":
            self._call = DistributedDataParallel(self.model, device_ids=[torch.cuda.current_device()])
        self._optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-5)
        if way not in ("ddp", "independent"):
            distribute(self.model, self._optimizer, strategy=way)

    def __call__(self) -> None:
        self._optimizer.zero_grad()
        with torch.autocast("cuda", torch.bfloat16) if self._narrow else nullcontext():
            loss = nn.functional.cross_entropy(self._call(self._x), self._y)
        loss.backward()
        self._optimizer.step()


def _batch(model: str) -> tuple[torch.Tensor, torch.Tensor]:
    if model == "gpt":
        text = torch.randint(_VOCABULARY, (8, _LENGTH + 1), device="cuda")
        return text[:, :-1], text[:, 1:]
    x = torch.randn(64, 3, 64, 64) if model == "cnn" else torch.randn(32, 64)
    return x.cuda(), torch.randint(10, (len(x),), device="cuda")


def gpu(rounds: str, model: str) -> list[Row]:
    """A step by DistributedDataParallel over NCCL, by Hocket, and by copies that do not talk, with AdamW.

    ``CPU`` is the time that the threads of the script and of autograd compute in a step, without those of NCCL. A
    thread that waits for a GPU computes, too.
    """
    if current().config.share_gpus:
        count_as_a_host()
    dist.init_process_group("nccl")
    ways = {way: _Step(model, way) for way in ("ddp", "mirrored", "independent")}
    times = alternate({**ways}, int(rounds), 0.6, torch.cuda.synchronize)
    row: Row = {"model": model}
    row |= {f"{way}_ms": milliseconds(values) for way, values in times.items()}
    row |= {f"{way}_ratio": ratio(times, "ddp", way) for way in ways if way != "ddp"}
    looks: dict[str, list[float]] = {way: [] for way in ways}
    for _ in range(_LOOKS):
        for way, take in ways.items():
            looks[way].append(_computing(take))
    row |= {f"{way} CPU_ms": milliseconds(values) for way, values in looks.items()}
    dist.destroy_process_group()
    return [row]


def _computing(take: Callable[[], object]) -> float:
    """Seconds per step in which threads of this process that do not belong to NCCL compute, on the busiest rank."""
    barrier()
    before = _busy()
    for _ in range(_COUNTED):
        take()
    spent = (_busy() - before) / _COUNTED
    torch.cuda.synchronize()
    return slowest(spent)


def _busy() -> float:
    """Seconds that the threads of the script and of autograd have computed so far."""
    found = 0.0
    for task in Path("/proc/self/task").iterdir():
        name = (task / "comm").read_text().strip()
        if name.startswith("pt_autograd") or task.name == str(os.getpid()):
            found += int((task / "schedstat").read_text().split()[0]) * 1e-9
    return found
