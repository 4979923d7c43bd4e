"""Two models at once, each trained by half of the workers, in a process set of its own: a script for Horovod."""

import horovod.torch as hvd
import torch
from torch import nn

halves = [hvd.ProcessSet(range(0, 2)), hvd.ProcessSet(range(2, 4))]


def main() -> None:
    hvd.init(process_sets=halves)
    if hvd.size() != 4:
        raise SystemExit("this example is for 4 workers")
    mine = next(each for each in halves if each.included())
    number = halves.index(mine)

    torch.manual_seed(hvd.rank())
    model = nn.Linear(8, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    optimizer = hvd.DistributedOptimizer(optimizer, named_parameters=model.named_parameters(), process_set=mine)
    hvd.broadcast_parameters(model.state_dict(), root_rank=mine.ranks[0], process_set=mine)

    truth = torch.full((8, 1), float(number + 1))  # what this half is to find
    for _ in range(100):
        x = torch.randn(16, 8)
        optimizer.zero_grad()
        ((model(x) - x @ truth) ** 2).mean().backward()
        optimizer.step()

    weights = hvd.allgather(model.weight.detach().mean().view(1))  # of all workers
    if hvd.rank() == 0:
        print("mean weights:", " ".join(f"{weight:.2f}" for weight in weights))
    hvd.shutdown()


if __name__ == "__main__":
    main()
