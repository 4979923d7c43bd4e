"""A GAN, as PyTorch's DCGAN example trains one: two models and two optimizers take turns in one loop."""

import os

import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import hocket

hocket.init()
torch.set_default_dtype(torch.float64)
torch.manual_seed(0)
batch = int(os.environ["BATCH"])
generator = nn.Sequential(nn.Linear(4, 16), nn.Tanh(), nn.Linear(16, 2))
judge = nn.Sequential(nn.Linear(2, 16), nn.Tanh(), nn.Linear(16, 1))
for_generator = torch.optim.SGD(generator.parameters(), lr=0.02, momentum=0.5)
for_judge = torch.optim.SGD(judge.parameters(), lr=0.02, momentum=0.5)
real, noise = torch.randn(64, 2) * 0.1 + 1, torch.randn(64, 4)
loader = DataLoader(TensorDataset(real, noise), batch, shuffle=True, generator=torch.Generator().manual_seed(1))
generator, for_generator = hocket.distribute(generator, for_generator)
judge, for_judge, loader = hocket.distribute(judge, for_judge, loader)
criterion = nn.BCEWithLogitsLoss()


def evaluate() -> float:
    with torch.no_grad():
        return float((generator(noise).mean(0) - 1).abs().mean())


before = evaluate()
for _ in range(6):
    for x, z in loader:
        fake = generator(z)
        for_judge.zero_grad()
        criterion(judge(x), torch.ones(len(x), 1)).backward()
        criterion(judge(fake.detach()), torch.zeros(len(x), 1)).backward()
        for_judge.step()
        for_generator.zero_grad()
        criterion(judge(fake), torch.ones(len(x), 1)).backward()
        for_generator.step()
loss = evaluate()
result = [*generator.parameters(), *judge.parameters()]
