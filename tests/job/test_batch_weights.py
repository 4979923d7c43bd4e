"""A batch that a script makes by itself, divided by hand: P workers with parts of it are one process with all of it."""

from typing import Any

import pytest
import torch
from pool import Pool
from torch import nn

import hocket
from hocket.errors import UsageError
from hocket.job.worker import current

SIZES = [7, 4, 1, 6, 2, 5]


def train(size: int, strategy: str | None) -> list[torch.Tensor]:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(3, 5), nn.Tanh(), nn.Linear(5, 1)).double()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    data = torch.Generator().manual_seed(1)
    if strategy is not None:
        hocket.distribute(model, optimizer, strategy=strategy)
    for n in SIZES:
        x = torch.randn(n, 3, generator=data, dtype=torch.float64)  # the same on all ranks
        with torch.no_grad():
            unused = x if strategy is None else x[hocket.share(n + 3)]  # an evaluation on the way counts nothing
        part = x if strategy is None else x[hocket.share(n)]
        assert len(part) >= 1 and unused is not None
        optimizer.zero_grad()
        nn.functional.mse_loss(model(part), part.sum(1, keepdim=True).sin()).backward()
        optimizer.step()
    return [parameter.detach().clone() for parameter in model.parameters()]


def train_together(strategy: str) -> tuple[list[torch.Tensor], int, int]:
    found = train(hocket.size(), strategy)
    hocket.barrier()
    return found, current().training.counts.batches, current().training.counts.samples


@pytest.mark.few(3)
@pytest.mark.parametrize("size", [1, 2, 3])
@pytest.mark.parametrize("strategy", ["mirrored", "central", "bsp"])
def test_parts_of_a_batch_are_the_batch(pool: Pool, strategy: str, size: int) -> None:
    plain = train(1, None)
    for found, batches, samples in pool.run(size, train_together, strategy, servers=int(strategy == "bsp")):
        assert all(torch.allclose(a, b, rtol=1e-9, atol=1e-9) for a, b in zip(found, plain, strict=True))
        assert (batches, samples) == (len(SIZES), sum(SIZES))


def all_parts() -> list[tuple[list[int], int]]:
    return [(list(range(n))[hocket.share(n)], n) for n in range(1, 12)]


def test_every_sample_is_in_one_part(pool: Pool) -> None:
    found = pool.run(3, all_parts)
    for parts in zip(*found, strict=True):
        n = parts[0][1]
        indices = [index for rank, (part, _) in enumerate(parts) for index in part if rank == 0 or part != [0]]
        assert indices == list(range(n)), parts


def misuse(n: Any) -> str:
    with pytest.raises(UsageError) as raised:
        hocket.share(n)
    return str(raised.value)


def test_what_is_no_batch_is_refused(pool: Pool) -> None:
    assert pool.run(1, misuse, 0) == ["share(0): a batch must have at least one sample"]
    assert pool.run(1, misuse, 2.5) == ["share(2.5): must be a number of samples, such as len(batch)"]
