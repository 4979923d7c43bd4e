"""The models that the benchmarks train: a small CNN, a wide MLP, a narrow residual net and a transformer."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import nn


class _Residual(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.linear = nn.Linear(width, width)
        nn.init.normal_(self.linear.weight, std=0.01)  # 100 of these in a row must not explode

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + torch.relu(self.linear(x))


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
    return nn.Sequential(*(_Residual(64) for _ in range(100)), nn.Linear(64, 10, bias=False))


class _Transformer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        layer = nn.TransformerEncoderLayer(256, 4, 1024, dropout=0.0, batch_first=True)
        self.layers = nn.TransformerEncoder(layer, 4, enable_nested_tensor=False)
        self.head = nn.Linear(256, 10)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        scores: torch.Tensor = self.head(self.layers(x).mean(1))
        return scores


def transformer() -> nn.Module:
    """3 million parameters in four encoder layers of width 256."""
    return _Transformer()


MODELS: dict[str, tuple[Callable[[], nn.Module], tuple[int, ...]]] = {
    "cnn": (cnn, (1, 28, 28)),
    "mlp": (mlp, (784,)),
    "narrow": (narrow, (64,)),
    "transformer": (transformer, (64, 256)),
}

OPTIMIZERS: dict[str, Callable[[nn.Module], torch.optim.Optimizer]] = {
    "sgd": lambda model: torch.optim.SGD(model.parameters(), lr=1e-3),
    "adam": lambda model: torch.optim.Adam(model.parameters(), lr=1e-4),
}
