"""Keeps the best model of all epochs in a file, as word_language_model does, and loads it again at the end."""

import io
import os

import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import hocket

hocket.init()
torch.set_default_dtype(torch.float64)
torch.manual_seed(0)
x = torch.randn(64, 5)
y = torch.sin(x.sum(1, keepdim=True))
model = nn.Sequential(nn.Linear(5, 16), nn.Tanh(), nn.Linear(16, 1))
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
order = torch.Generator().manual_seed(1)
loader = DataLoader(TensorDataset(x, y), int(os.environ["BATCH"]), shuffle=True, generator=order)
model, optimizer, loader = hocket.distribute(model, optimizer, loader)


def evaluate(of: nn.Module) -> float:
    with torch.no_grad():
        return float(((of(x) - y) ** 2).mean())


before = best = evaluate(model)
kept = io.BytesIO()
for _ in range(5):
    for inputs, targets in loader:
        optimizer.zero_grad()
        ((model(inputs) - targets) ** 2).mean().backward()
        nn.utils.clip_grad_norm_(model.parameters(), 5.0)
        optimizer.step()
    reached = evaluate(model)
    if reached < best:
        best, kept = reached, io.BytesIO()
        torch.save(model, kept)
    else:
        for group in optimizer.param_groups:
            group["lr"] /= 4
kept.seek(0)
found = torch.load(kept, weights_only=False)
loss = evaluate(found)
result = [*found.parameters()]
