"""A prefetcher asks for the next batch before this one is trained on; the last batch is smaller than the others."""

import os
from collections.abc import Iterable, Iterator
from typing import Any

import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import hocket


def prefetch(batches: Iterable[Any]) -> Iterator[Any]:
    it = iter(batches)
    ahead = next(it, None)
    while ahead is not None:
        now, ahead = ahead, next(it, None)
        yield now


hocket.init()
torch.set_default_dtype(torch.float64)
torch.manual_seed(0)
x = torch.randn(58, 5)
y = torch.sin(x.sum(1, keepdim=True))
model = nn.Sequential(nn.Linear(5, 16), nn.Tanh(), nn.Linear(16, 1))
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
order = torch.Generator().manual_seed(1)
loader = DataLoader(TensorDataset(x, y), int(os.environ["BATCH"]), shuffle=True, generator=order)
model, optimizer, loader = hocket.distribute(model, optimizer, loader)
before = float(((model(x) - y) ** 2).mean().detach())
for _ in range(5):
    for inputs, targets in prefetch(loader):
        optimizer.zero_grad()
        ((model(inputs) - targets) ** 2).mean().backward()
        optimizer.step()
loss = float(((model(x) - y) ** 2).mean().detach())
result = [*model.parameters()]
