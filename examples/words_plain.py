"""Learn vectors for the words of Python's own sources from their neighbours, with sparse gradients."""

import argparse
import collections
import itertools
import re
import sysconfig
from pathlib import Path

import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, TensorDataset


def read_pairs(words: int, files: int) -> tuple[torch.Tensor, list[str]]:
    """Pairs of neighbouring words, by number, and the words by how often they occur."""
    folder = Path(sysconfig.get_paths()["stdlib"])
    texts = [path.read_text(errors="ignore") for path in sorted(folder.glob("*.py"))[:files]]
    found = [re.findall(r"[A-Za-z_]{2,}", text) for text in texts]
    counts = collections.Counter(word for text in found for word in text)
    known = [word for word, _ in counts.most_common(words)]
    number = {word: i for i, word in enumerate(known)}
    kept = [[number[word] for word in text if word in number] for text in found]
    pairs = [(a, b) for text in kept for a, b in itertools.pairwise(text)]
    return torch.tensor(pairs), known


class Neighbours(nn.Module):
    """A word's vector is to be close to that of its neighbour, and not to that of a random word."""

    def __init__(self, words: int, width: int) -> None:
        super().__init__()
        self.inner = nn.Embedding(words, width, sparse=True)
        self.outer = nn.Embedding(words, width, sparse=True)
        nn.init.normal_(self.inner.weight, std=0.1)
        nn.init.normal_(self.outer.weight, std=0.1)

    def forward(self, word: torch.Tensor, other: torch.Tensor) -> torch.Tensor:
        return (self.inner(word) * self.outer(other)).sum(-1)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--epochs", type=int, default=4)
    parser.add_argument("--words", type=int, default=5000)
    parser.add_argument("--files", type=int, default=30)
    args = parser.parse_args()
    pairs, known = read_pairs(args.words, args.files)

    torch.manual_seed(0)
    model = Neighbours(len(known), 16)
    optimizer = torch.optim.Adagrad(model.parameters(), lr=0.1)
    loader = DataLoader(TensorDataset(pairs), 512, shuffle=True)

    for _ in range(args.epochs):
        total = count = 0.0
        for (batch,) in loader:
            word, neighbour = batch.T
            others = torch.randint(0, len(known), word.shape)
            right, wrong = model(word, neighbour), model(word, others)
            loss = F.softplus(-right).mean() + F.softplus(wrong).mean()
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            total, count = total + loss.item() * len(batch), count + len(batch)

    print(f"{len(pairs):,} pairs, loss {total / count:.3f}")


if __name__ == "__main__":
    main()
