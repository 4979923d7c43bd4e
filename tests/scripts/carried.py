"""An RNN whose hidden state is carried over: row i of a batch goes on where row i of the batch before ended."""

import os

import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, TensorDataset

import hocket

hocket.init()
torch.set_default_dtype(torch.float64)
torch.manual_seed(0)
rows, pieces, length = 8, 12, 5
text = (torch.arange(rows * pieces * length) // 4) % 5  # within a piece one cannot see where in a run of four it begins
text = torch.cat([text, text[:1]])
inputs = text[:-1].view(rows, pieces, length).transpose(0, 1).reshape(-1, length)
targets = text[1:].view(rows, pieces, length).transpose(0, 1).reshape(-1, length)


class RNN(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.encoder, self.rnn, self.decoder = nn.Embedding(5, 8), nn.GRU(8, 16, batch_first=True), nn.Linear(16, 5)

    def forward(self, x: torch.Tensor, hidden: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        out, hidden = self.rnn(self.encoder(x), hidden)
        return self.decoder(out).view(-1, 5), hidden


def evaluate() -> float:
    hidden, total = torch.zeros(1, rows, 16), 0.0
    with torch.no_grad():
        for x, y in zip(inputs.split(rows), targets.split(rows), strict=True):
            out, hidden = model(x, hidden)
            total += float(F.cross_entropy(out, y.reshape(-1))) / pieces
    return total


model = RNN()
optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
batch = int(os.environ["BATCH"])
loader = DataLoader(TensorDataset(inputs, targets), batch)
model, optimizer, loader = hocket.distribute(model, optimizer, loader)
before = evaluate()
for _ in range(4):
    hidden = torch.zeros(1, batch, 16)
    for x, y in loader:
        optimizer.zero_grad()
        out, hidden = model(x, hidden.detach())
        F.cross_entropy(out, y.reshape(-1)).backward()
        optimizer.step()
loss = evaluate()
result = [*model.parameters()]
