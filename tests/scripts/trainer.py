"""A class that trains until a number of steps, as minGPT's Trainer: its own iterator, begun again, and a break."""

import os

import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, TensorDataset

import hocket


class Trainer:
    def __init__(self, model: nn.Module, loader: "DataLoader[tuple[torch.Tensor, ...]]", max_steps: int) -> None:
        self.model, self.max_steps = model, max_steps
        self.optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
        self.model, self.optimizer, self.loader = hocket.distribute(model, self.optimizer, loader)

    def run(self) -> None:
        steps, it = 0, iter(self.loader)
        while True:
            try:
                x, y = next(it)
            except StopIteration:
                it = iter(self.loader)
                x, y = next(it)
            loss = F.cross_entropy(self.model(x), y)
            self.optimizer.zero_grad()
            loss.backward()
            self.optimizer.step()
            steps += 1
            if steps >= self.max_steps:
                break


hocket.init()
torch.set_default_dtype(torch.float64)
torch.manual_seed(0)
x = torch.randn(64, 6)
y = (x[:, 0] + x[:, 1] > 0).long()
model = nn.Sequential(nn.Linear(6, 16), nn.Tanh(), nn.Linear(16, 2))
order = torch.Generator().manual_seed(1)
loader = DataLoader(TensorDataset(x, y), int(os.environ["BATCH"]), shuffle=True, generator=order)
before = float(F.cross_entropy(model(x), y))
trainer = Trainer(model, loader, max_steps=18)
trainer.run()
loss = float(F.cross_entropy(model(x), y))
result = [*model.parameters()]
