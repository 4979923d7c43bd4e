"""Regression with L-BFGS: its closure goes through all the data, of which the last batch is smaller."""

import os

import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, TensorDataset

import hocket

hocket.init()
torch.set_default_dtype(torch.float64)
torch.manual_seed(0)
x = torch.randn(61, 5)
y = torch.sin(x.sum(1, keepdim=True))
model = nn.Sequential(nn.Linear(5, 8), nn.Tanh(), nn.Linear(8, 1))
optimizer = torch.optim.LBFGS(model.parameters(), max_iter=4, history_size=4, line_search_fn="strong_wolfe")
loader = DataLoader(TensorDataset(x, y), int(os.environ["BATCH"]))
model, optimizer, loader = hocket.distribute(model, optimizer, loader, strategy="full_batch")


def closure() -> float:
    optimizer.zero_grad()
    total = 0.0
    for inputs, targets in loader:
        loss = F.mse_loss(model(inputs), targets) / len(loader)
        loss.backward()
        total += loss.item()
    return total


before = float(F.mse_loss(model(x), y).detach())
for _ in range(3):
    optimizer.step(closure)
loss = float(F.mse_loss(model(x), y).detach())
result = [*model.parameters()]
