"""Train a small CNN on scikit-learn's bundled digits: a script for Horovod, which runs under ``--as-horovod``."""

import argparse

import horovod.torch as hvd
import torch
from sklearn.datasets import load_digits
from torch import nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, TensorDataset
from torch.utils.data.distributed import DistributedSampler

parser = argparse.ArgumentParser(description=__doc__)
parser.add_argument("--batch-size", type=int, default=32, help="of one worker")
parser.add_argument("--batches-per-allreduce", type=int, default=1)
parser.add_argument("--epochs", type=int, default=5)
parser.add_argument("--base-lr", type=float, default=0.02, help="of one worker")
parser.add_argument("--fp16-allreduce", action="store_true")
parser.add_argument("--use-adasum", action="store_true")
args = parser.parse_args()


class Metric:
    """The average of a number over all batches of all workers."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.sum, self.count = torch.tensor(0.0), torch.tensor(0.0)

    def update(self, value: torch.Tensor) -> None:
        self.sum += hvd.allreduce(value.detach().cpu().float(), name=self.name)
        self.count += 1

    @property
    def average(self) -> float:
        return (self.sum / self.count).item()


def main() -> None:
    hvd.init()
    torch.manual_seed(42)
    images, labels = load_digits(return_X_y=True)
    x = torch.tensor(images, dtype=torch.float64).view(-1, 1, 8, 8) / 16
    y = torch.tensor(labels)
    train = TensorDataset(x[:1536], y[:1536])
    test = TensorDataset(x[1536:], y[1536:])
    batch = args.batch_size * args.batches_per_allreduce
    train_sampler = DistributedSampler(train, num_replicas=hvd.size(), rank=hvd.rank())
    test_sampler = DistributedSampler(test, num_replicas=hvd.size(), rank=hvd.rank(), shuffle=False)
    train_loader = DataLoader(train, batch_size=batch, sampler=train_sampler)
    test_loader = DataLoader(test, batch_size=batch, sampler=test_sampler)

    model = nn.Sequential(
        nn.Conv2d(1, 16, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2),
        nn.Conv2d(16, 32, 3, padding=1), nn.ReLU(), nn.Flatten(), nn.Linear(32 * 16, 10),
    ).double()  # fmt: skip
    scale = args.batches_per_allreduce * (1 if args.use_adasum else hvd.size())
    optimizer = torch.optim.SGD(model.parameters(), lr=args.base_lr * scale, momentum=0.9)
    optimizer = hvd.DistributedOptimizer(
        optimizer,
        named_parameters=model.named_parameters(),
        compression=hvd.Compression.fp16 if args.fp16_allreduce else hvd.Compression.none,
        backward_passes_per_step=args.batches_per_allreduce,
        op=hvd.Adasum if args.use_adasum else hvd.Average,
    )
    hvd.broadcast_parameters(model.state_dict(), root_rank=0)
    hvd.broadcast_optimizer_state(optimizer, root_rank=0)

    for epoch in range(args.epochs):
        model.train()
        train_sampler.set_epoch(epoch)
        train_loss = Metric("train_loss")
        for inputs, targets in train_loader:
            optimizer.zero_grad()
            parts = list(zip(inputs.split(args.batch_size), targets.split(args.batch_size), strict=True))
            for part, truth in parts:
                loss = F.cross_entropy(model(part), truth)
                train_loss.update(loss)
                loss.div_(len(parts))
                loss.backward()
            optimizer.step()
        model.eval()
        accuracy = Metric("accuracy")
        with torch.no_grad():
            for inputs, targets in test_loader:
                accuracy.update((model(inputs).argmax(1) == targets).double().mean())
        if hvd.rank() == 0:
            print(f"epoch {epoch}: loss {train_loss.average:.6f}, accuracy {accuracy.average:.3f}")


if __name__ == "__main__":
    main()
