"""Train a character-level transformer on the Python standard library's own sources."""

import argparse
import sysconfig
from pathlib import Path

import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, Dataset, Subset

CONTEXT = 64


class Characters(Dataset[tuple[torch.Tensor, torch.Tensor]]):
    """Pieces of source code, each with the same piece one character further on."""

    def __init__(self, nbytes: int) -> None:
        files = sorted(Path(sysconfig.get_path("stdlib")).glob("*.py"))
        text = b"".join(path.read_bytes() for path in files)[:nbytes]
        self.data = torch.frombuffer(bytearray(text), dtype=torch.uint8).clamp(max=127).long()

    def __len__(self) -> int:
        return (len(self.data) - 1) // CONTEXT

    def __getitem__(self, index: int) -> tuple[torch.Tensor, torch.Tensor]:
        piece = self.data[index * CONTEXT : (index + 1) * CONTEXT + 1]
        return piece[:-1], piece[1:]


class Transformer(nn.Module):
    def __init__(self, width: int = 128, layers: int = 2) -> None:
        super().__init__()
        self.embedding = nn.Embedding(128, width)
        self.position = nn.Parameter(torch.zeros(CONTEXT, width))
        layer = nn.TransformerEncoderLayer(width, 4, 4 * width, dropout=0.0, batch_first=True, norm_first=True)
        self.layers = nn.TransformerEncoder(layer, layers, enable_nested_tensor=False)
        self.head = nn.Linear(width, 128)
        self.register_buffer("mask", nn.Transformer.generate_square_subsequent_mask(CONTEXT))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        hidden = self.embedding(x) + self.position
        return self.head(self.layers(hidden, mask=self.mask, is_causal=True))


@torch.no_grad()
def evaluate(model: nn.Module, loader: DataLoader[tuple[torch.Tensor, torch.Tensor]]) -> float:
    model.eval()
    total, count = 0.0, 0
    for x, y in loader:
        total += F.cross_entropy(model(x).flatten(0, 1), y.flatten(), reduction="sum").item()
        count += y.numel()
    model.train()
    return total / count


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--epochs", type=int, default=1)
    parser.add_argument("--batch", type=int, default=32)
    parser.add_argument("--nbytes", type=int, default=1_000_000, help="how much of the sources to read")
    parser.add_argument("--bfloat16", action="store_true", help="compute in bfloat16 where that is safe")
    args = parser.parse_args()

    data = Characters(args.nbytes)
    held_out = len(data) // 10
    torch.manual_seed(0)
    model = Transformer()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    training, validation = Subset(data, range(held_out, len(data))), Subset(data, range(held_out))
    loader = DataLoader(training, args.batch, shuffle=True, generator=torch.Generator().manual_seed(0))
    checking = DataLoader(validation, args.batch)
    scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, args.epochs * len(loader))

    for epoch in range(args.epochs):
        for x, y in loader:
            with torch.autocast("cpu", torch.bfloat16, enabled=args.bfloat16):
                loss = F.cross_entropy(model(x).flatten(0, 1), y.flatten())
            loss.backward()
            nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            optimizer.zero_grad()
            scheduler.step()
        validated = evaluate(model, checking)
        print(f"epoch {epoch + 1}/{args.epochs}: validation loss {validated:.3f}")


if __name__ == "__main__":
    main()
