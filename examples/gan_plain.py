"""Train a small generative adversarial network on scikit-learn's bundled digits."""

import argparse

import torch
from sklearn.datasets import load_digits
from torch import nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, TensorDataset

NOISE = 16


def make_generator() -> nn.Module:
    layers = nn.Linear(NOISE, 128), nn.LeakyReLU(0.2), nn.Linear(128, 128), nn.LeakyReLU(0.2), nn.Linear(128, 64)
    return nn.Sequential(*layers, nn.Sigmoid())


def make_discriminator() -> nn.Module:
    return nn.Sequential(nn.Linear(64, 128), nn.LeakyReLU(0.2), nn.Linear(128, 64), nn.LeakyReLU(0.2), nn.Linear(64, 1))


def judge(score: torch.Tensor, real: bool) -> torch.Tensor:
    return F.binary_cross_entropy_with_logits(score, torch.full_like(score, float(real)))


def show(picture: torch.Tensor) -> str:
    return "\n".join("".join(" .:-=+*#%@"[int(9.99 * v)] * 2 for v in row) for row in picture.view(8, 8).tolist())


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--epochs", type=int, default=100)
    parser.add_argument("--batch", type=int, default=64)
    args = parser.parse_args()

    digits = torch.from_numpy(load_digits().data / 16).float()
    torch.manual_seed(0)
    generator, discriminator = make_generator(), make_discriminator()
    g_optimizer = torch.optim.Adam(generator.parameters(), lr=2e-3, betas=(0.5, 0.999))
    d_optimizer = torch.optim.Adam(discriminator.parameters(), lr=1e-3, betas=(0.5, 0.999))
    loader = DataLoader(TensorDataset(digits), args.batch, shuffle=True)

    for epoch in range(args.epochs):
        total, count = 0.0, 0
        for (real,) in loader:
            fake = generator(torch.randn(len(real), NOISE))
            d_optimizer.zero_grad()
            judge(discriminator(real), True).backward()
            judge(discriminator(fake.detach()), False).backward()
            d_optimizer.step()
            g_optimizer.zero_grad()
            loss = judge(discriminator(fake), True)
            loss.backward()
            g_optimizer.step()
            total, count = total + loss.item() * len(real), count + len(real)
        if (epoch + 1) % 20 == 0:
            print(f"epoch {epoch + 1}/{args.epochs}: generator loss {total / count:.2f}")

    with torch.no_grad():
        picture = generator(torch.randn(1, NOISE))
    print(show(picture))


if __name__ == "__main__":
    main()
