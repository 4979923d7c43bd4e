"""Trainings of a small character model on the standard library's own sources; run by ``hocket run``.

The data is gone through once, so that no end of an epoch ends a round; what is evaluated is what the strategy shows.
"""

from __future__ import annotations

import argparse
import json
import sysconfig
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.nn import functional
from torch.utils.data import DataLoader, TensorDataset

import hocket
from hocket.job.worker import current

CONTEXT, WIDTH, BATCH, HELD_OUT = 32, 64, 8, 2000


class Transformer(nn.Module):
    """One layer of width 64: 68,544 parameters."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(128, WIDTH)
        self.position = nn.Parameter(torch.zeros(CONTEXT, WIDTH))
        self.layer = nn.TransformerEncoderLayer(WIDTH, 4, 4 * WIDTH, dropout=0.0, batch_first=True, norm_first=True)
        self.head = nn.Linear(WIDTH, 128)
        self.register_buffer("mask", nn.Transformer.generate_square_subsequent_mask(CONTEXT))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        hidden = self.layer(self.embedding(x) + self.position, src_mask=self.mask, is_causal=True)
        found: torch.Tensor = self.head(hidden)
        return found


def read(pieces: int) -> tuple[TensorDataset, torch.Tensor]:
    """So many pieces to train on, and others to look at."""
    files = sorted(Path(sysconfig.get_path("stdlib")).rglob("*.py"))
    text, needed = bytearray(), (pieces + HELD_OUT) * (CONTEXT + 1)
    for path in files:
        text += path.read_bytes()
        if len(text) > 4 * needed:
            break
    data = torch.frombuffer(text, dtype=torch.uint8).clamp(max=127).long()
    rows = data[: len(data) // (CONTEXT + 1) * (CONTEXT + 1)].view(-1, CONTEXT + 1)
    rows = rows[torch.randperm(len(rows), generator=torch.Generator().manual_seed(0))]
    return TensorDataset(rows[HELD_OUT : HELD_OUT + pieces]), rows[:HELD_OUT]


@torch.no_grad()
def evaluate(model: nn.Module, rows: torch.Tensor) -> float:
    """The validation loss, in nats per character."""
    model.eval()
    found = [
        functional.cross_entropy(model(part[:, :-1]).flatten(0, 1), part[:, 1:].flatten()) for part in rows.split(200)
    ]
    return float(torch.stack(found).mean())


def train(asked: dict[str, Any]) -> dict[str, Any]:
    """One training; every rank must call it."""
    training = current().training
    for before in (training.strategies, training.models, training.counts.counters):
        before.clear()  # trainings of one job, one after the other
    data, rows = read(asked["steps"] * BATCH * hocket.size())
    torch.manual_seed(asked["seed"])
    model = Transformer()
    optimizer = getattr(torch.optim, asked["optimizer"])(model.parameters(), lr=asked["rate"])
    loader = DataLoader(data, BATCH, shuffle=True, generator=torch.Generator().manual_seed(asked["seed"]))
    model, optimizer, loader = hocket.distribute(model, optimizer, loader, strategy=asked["strategy"])
    for (piece,) in loader:
        functional.cross_entropy(model(piece[:, :-1]).flatten(0, 1), piece[:, 1:].flatten()).backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
    return {"loss": evaluate(model, rows), "sent": sum(strategy.sent for strategy in training.strategies)}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("asked", type=Path, help="a file with a list of settings")
    parser.add_argument("found", type=Path, help="a file for what came of each")
    args = parser.parse_args()
    torch.set_num_threads(1)
    hocket.init()
    found = []
    for asked in json.loads(args.asked.read_text()):
        found.append(train(asked))
        if hocket.rank() == 0:
            print(f"{asked['strategy']}, rate {asked['rate']:g}, seed {asked['seed']}: {found[-1]['loss']:.4f}")
    if hocket.rank() == 0:
        args.found.write_text(json.dumps(found))


if __name__ == "__main__":
    main()
