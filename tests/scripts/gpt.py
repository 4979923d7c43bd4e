"""A loop as nanoGPT's: no loader, the next batch is cut from the text before this one's backward pass, accumulation."""

import os

import torch
from torch import nn
from torch.nn import functional as F

import hocket

hocket.init()
torch.set_default_dtype(torch.float64)
torch.manual_seed(0)
batch_size = int(os.environ["BATCH"]) * hocket.size() - 1  # not the same for all workers
block_size, micro_steps = 6, 2
text = torch.arange(200).pow(2) % 7
draw = torch.Generator().manual_seed(1)


class Block(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.first, self.second = nn.LayerNorm(width), nn.LayerNorm(width)
        self.attention, self.projection = nn.Linear(width, 3 * width, bias=False), nn.Linear(width, width)
        self.mlp = nn.Sequential(nn.Linear(width, 2 * width), nn.GELU(), nn.Linear(2 * width, width))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        q, k, v = self.attention(self.first(x)).chunk(3, dim=-1)
        x = x + self.projection(F.scaled_dot_product_attention(q, k, v, is_causal=True))
        out: torch.Tensor = x + self.mlp(self.second(x))
        return out


class GPT(nn.Module):
    def __init__(self, width: int = 12) -> None:
        super().__init__()
        self.tokens, self.places = nn.Embedding(7, width), nn.Embedding(block_size, width)
        self.block, self.norm, self.head = Block(width), nn.LayerNorm(width), nn.Linear(width, 7, bias=False)
        self.head.weight = self.tokens.weight
        nn.init.normal_(self.tokens.weight, std=0.02)

    def forward(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        out = self.head(self.norm(self.block(self.tokens(x) + self.places.weight)))
        return F.cross_entropy(out.view(-1, 7), y.view(-1))


def get_batch() -> tuple[torch.Tensor, torch.Tensor]:
    ix = torch.randint(len(text) - block_size, (batch_size,), generator=draw)
    ix = ix[hocket.share(batch_size)]
    x = torch.stack([text[i : i + block_size] for i in ix.tolist()])
    y = torch.stack([text[i + 1 : i + 1 + block_size] for i in ix.tolist()])
    return x, y


@torch.no_grad()
def estimate_loss() -> float:
    pieces = text[: 32 * block_size].view(32, block_size)
    return float(model(pieces, text[1 : 32 * block_size + 1].view(32, block_size)))


model = GPT()
decayed = [p for p in model.parameters() if p.dim() >= 2]
others = [p for p in model.parameters() if p.dim() < 2]
groups = [{"params": decayed, "weight_decay": 0.1}, {"params": others, "weight_decay": 0.0}]
optimizer = torch.optim.AdamW(groups, lr=0.01, betas=(0.9, 0.95))
model, optimizer = hocket.distribute(model, optimizer)
before = estimate_loss()
x, y = get_batch()
for step in range(24):
    for group in optimizer.param_groups:
        group["lr"] = 0.01 * min(1.0, (step + 1) / 4)
    for _ in range(micro_steps):
        found = model(x, y) / micro_steps
        x, y = get_batch()
        found.backward()
    optimizer.step()
    optimizer.zero_grad(set_to_none=True)
hocket.settle()
loss = estimate_loss()
result = [*model.parameters()]
