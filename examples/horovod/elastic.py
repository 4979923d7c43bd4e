"""Train on as many workers as there are, also when some are killed or come: a script for Horovod Elastic."""

import argparse
import os
import signal

import horovod.torch as hvd
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

parser = argparse.ArgumentParser(description=__doc__)
parser.add_argument("--epochs", type=int, default=4)
parser.add_argument("--batch-size", type=int, default=8)
parser.add_argument("--batches-per-commit", type=int, default=4)
parser.add_argument("--kill", type=int, default=-1, help="the rank that kills itself in epoch 1, to see what follows")
args = parser.parse_args()


@hvd.elastic.run
def train(state: hvd.elastic.TorchState, loader: DataLoader) -> None:
    model, optimizer = state.model, state.optimizer
    while state.epoch < args.epochs:
        for x, y in loader:
            optimizer.zero_grad()
            loss = ((model(x) - y) ** 2).mean()
            loss.backward()
            optimizer.step()
            state.batch += 1
            state.sampler.record_batch(state.batch - 1, args.batch_size)
            if state.epoch == 1 and state.batch == 6 and hvd.rank() == args.kill and hvd.size() > 2:
                os.kill(os.getpid(), signal.SIGKILL)
            if state.batch % args.batches_per_commit == 0:
                state.commit()
        if hvd.rank() == 0:
            print(f"epoch {state.epoch}: loss {loss.item():.6f}, workers {hvd.size()}")
        state.epoch, state.batch = state.epoch + 1, 0
        state.sampler.set_epoch(state.epoch)
        state.commit()


def main() -> None:
    hvd.init()
    torch.manual_seed(0)
    x = torch.randn(768, 4)
    dataset = TensorDataset(x, x @ torch.tensor([[1.0], [2.0], [3.0], [4.0]]))
    sampler = hvd.elastic.ElasticSampler(dataset)
    loader = DataLoader(dataset, batch_size=args.batch_size, sampler=sampler)
    model = nn.Linear(4, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01 * hvd.size())
    optimizer = hvd.DistributedOptimizer(optimizer, named_parameters=model.named_parameters())

    def on_state_reset() -> None:
        for group in optimizer.param_groups:
            group["lr"] = 0.01 * hvd.size()

    state = hvd.elastic.TorchState(model, optimizer, sampler=sampler, epoch=0, batch=0)
    state.register_reset_callbacks([on_state_reset])
    train(state, loader)
    if hvd.rank() == 0:
        print("weights:", " ".join(f"{weight:.3f}" for weight in model.weight.detach().view(-1)))


if __name__ == "__main__":
    main()
