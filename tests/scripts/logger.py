"""A thread reports the losses that the training loop hands to it, as loggers do that must not hold up a step."""

import os
from queue import SimpleQueue
from threading import Thread

import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import hocket


class Logger(Thread):
    def __init__(self) -> None:
        super().__init__()
        self.waiting: SimpleQueue[torch.Tensor | None] = SimpleQueue()
        self.seen: list[float] = []

    def run(self) -> None:
        while (value := self.waiting.get()) is not None:
            hocket.report(loss=value, rank=hocket.rank())
            self.seen.append(value.item())


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
before = float(((model(x) - y) ** 2).mean().detach())
logger, steps = Logger(), 0
logger.start()
try:
    for _ in range(5):
        for inputs, targets in loader:
            optimizer.zero_grad()
            found = ((model(inputs) - targets) ** 2).mean()
            found.backward()
            optimizer.step()
            logger.waiting.put(found.detach())
            steps += 1
finally:
    logger.waiting.put(None)
    logger.join()
if len(logger.seen) != steps:
    raise RuntimeError(f"{len(logger.seen)} of {steps} losses were reported")
loss = float(((model(x) - y) ** 2).mean().detach())
result = [*model.parameters()]
