"""Two phases: the head alone with one optimizer, then all of the model with another."""

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
body, head = nn.Sequential(nn.Linear(5, 16), nn.Tanh()), nn.Linear(16, 1)
model = nn.Sequential(body, head)
order = torch.Generator().manual_seed(1)
loader = DataLoader(TensorDataset(x, y), int(os.environ["BATCH"]), shuffle=True, generator=order)
before = float(((model(x) - y) ** 2).mean().detach())
body.requires_grad_(False)
optimizer = torch.optim.SGD(head.parameters(), lr=0.1)
model, optimizer, loader = hocket.distribute(model, optimizer, loader)
for _ in range(2):
    for inputs, targets in loader:
        optimizer.zero_grad()
        ((model(inputs) - targets) ** 2).mean().backward()
        optimizer.step()
body.requires_grad_(True)
second = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
model, second = hocket.distribute(model, second)
for _ in range(4):
    for inputs, targets in loader:
        second.zero_grad()
        ((model(inputs) - targets) ** 2).mean().backward()
        second.step()
loss = float(((model(x) - y) ** 2).mean().detach())
result = [*model.parameters()]
