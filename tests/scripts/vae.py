"""A VAE, as PyTorch's example trains one: the loss is a sum over the batch, and the last batch is smaller."""

import os

import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, TensorDataset

import hocket


class VAE(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.reads, self.mean, self.spread = nn.Linear(8, 12), nn.Linear(12, 2), nn.Linear(12, 2)
        self.writes = nn.Sequential(nn.Linear(2, 12), nn.ReLU(), nn.Linear(12, 8))

    def forward(self, x: torch.Tensor, noise: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        hidden = torch.relu(self.reads(x))
        mu, logvar = self.mean(hidden), self.spread(hidden)
        return torch.sigmoid(self.writes(mu + noise * torch.exp(0.5 * logvar))), mu, logvar


def criterion(found: tuple[torch.Tensor, torch.Tensor, torch.Tensor], x: torch.Tensor) -> torch.Tensor:
    again, mu, logvar = found
    bce = F.binary_cross_entropy(again, x, reduction="sum")
    return bce - 0.5 * torch.sum(1 + logvar - mu.pow(2) - logvar.exp())


hocket.init()
torch.set_default_dtype(torch.float64)
torch.manual_seed(0)
kinds = torch.rand(2, 8).round()
x = (kinds[torch.randint(2, (61,))] + 0.1 * torch.randn(61, 8)).clamp(0, 1)
noise = torch.randn(61, 2)
model = VAE()
optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
order = torch.Generator().manual_seed(1)
loader = DataLoader(TensorDataset(x, noise), int(os.environ["BATCH"]), shuffle=True, generator=order)
model, optimizer, loader = hocket.distribute(model, optimizer, loader, reduction="sum")
before = float(criterion(model(x, noise), x).detach()) / len(x)
for _ in range(6):
    for inputs, random in loader:
        optimizer.zero_grad()
        criterion(model(inputs, random), inputs).backward()
        optimizer.step()
loss = float(criterion(model(x, noise), x).detach()) / len(x)
result = [*model.parameters()]
