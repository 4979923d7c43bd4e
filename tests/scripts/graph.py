"""A graph network: the nodes of a batch are mixed with their neighbours in the whole graph."""

import os

import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, TensorDataset

import hocket

hocket.init()
torch.set_default_dtype(torch.float64)
torch.manual_seed(0)
nodes = 60
features = torch.randn(nodes, 6)
links = (torch.rand(nodes, nodes) < 0.1).double()
links = ((links + links.T + torch.eye(nodes)) > 0).double()
links /= links.sum(1, keepdim=True)
labels = (links @ features)[:, :3].argmax(1)


class Convolution(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(6, 16), nn.Linear(16, 3)

    def forward(self, wanted: torch.Tensor) -> torch.Tensor:
        hidden = torch.relu(self.first(links @ features))
        return self.second(links[wanted] @ hidden)


model = Convolution()
optimizer = torch.optim.Adam(model.parameters(), lr=0.02)
order = torch.Generator().manual_seed(1)
loader = DataLoader(TensorDataset(torch.arange(nodes)), int(os.environ["BATCH"]), shuffle=True, generator=order)
model, optimizer, loader = hocket.distribute(model, optimizer, loader)
everything = torch.arange(nodes)
before = float(F.cross_entropy(model(everything), labels).detach())
for _ in range(8):
    for (wanted,) in loader:
        optimizer.zero_grad()
        F.cross_entropy(model(wanted), labels[wanted]).backward()
        optimizer.step()
loss = float(F.cross_entropy(model(everything), labels).detach())
result = [*model.parameters()]
