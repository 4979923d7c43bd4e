"""Several models, optimizers and loaders in one script, and parameters that they share."""

from collections.abc import Callable
from itertools import chain, pairwise
from typing import Any

import pytest
import torch
from pool import Pool
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import hocket

STRATEGIES = ["mirrored", "central", "central(fused=True)"]


def data(count: int, seed: int) -> TensorDataset:
    random = torch.Generator().manual_seed(seed)
    x = torch.randn(count, 6, generator=random, dtype=torch.float64)
    return TensorDataset(x, x.sum(1, keepdim=True).sin())


def network(*sizes: int) -> nn.Sequential:
    layers = [nn.Linear(a, b, dtype=torch.float64) for a, b in pairwise(sizes)]
    return nn.Sequential(*[module for layer in layers for module in (layer, nn.Tanh())][:-1])


Result = list[torch.Tensor]


class Job:
    """The same script alone and distributed: ``distribute`` does nothing alone, batches are those of all workers."""

    def __init__(self, strategy: str | None, workers: int) -> None:
        self.strategy, self.workers = strategy, workers
        torch.manual_seed(0)

    def distribute(self, *args: Any) -> None:
        if self.strategy:
            hocket.distribute(*args, strategy=self.strategy)

    def loader(self, dataset: TensorDataset, batch: int, **options: Any) -> Any:
        loader = DataLoader(dataset, batch * (1 if self.strategy else self.workers), **options)
        return hocket.distribute(loader=loader) if self.strategy else loader


def two_optimizers(job: Job) -> Result:
    """Matrices by one optimizer, the rest by another, as with Muon and AdamW."""
    model = network(6, 150, 130, 1)
    matrices = [p for p in model.parameters() if p.dim() == 2]
    rest = [p for p in model.parameters() if p.dim() != 2]
    first, second = torch.optim.SGD(matrices, lr=0.05, momentum=0.9), torch.optim.AdamW(rest, lr=0.01)
    job.distribute(model, [first, second])
    for x, y in job.loader(data(47, 1), 4):
        first.zero_grad()
        second.zero_grad()
        ((model(x) - y) ** 2).mean().backward()
        first.step()
        second.step()
    return list(model.parameters())


class Branch(nn.Module):
    """Whether the first or the second optimizer's parameters get their gradients first depends on the samples."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.between, self.last = network(6, 1), network(6, 1), network(6, 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.first(x) + self.between(x)
        chosen = x[:, :1] > 0.8
        return y + chosen * self.last(x) if chosen.any() else y


def branches(job: Job) -> Result:
    model = Branch()
    one = torch.optim.SGD([*model.first.parameters(), *model.last.parameters()], lr=0.05)
    two = torch.optim.SGD(model.between.parameters(), lr=0.02)
    job.distribute(model, [one, two])
    for x, y in job.loader(data(47, 1), 2):
        one.zero_grad()
        two.zero_grad()
        ((model(x) - y) ** 2).mean().backward()
        one.step()
        two.step()
    return list(model.parameters())


def one_optimizer_for_two_models(job: Job) -> Result:
    encoder, decoder = network(6, 150, 130), network(130, 1)
    optimizer = torch.optim.Adam(chain(encoder.parameters(), decoder.parameters()), lr=0.01)
    job.distribute(encoder, optimizer)
    job.distribute(decoder)
    for x, y in job.loader(data(47, 1), 4):
        optimizer.zero_grad()
        ((decoder(torch.tanh(encoder(x))) - y) ** 2).mean().backward()
        optimizer.step()
    return [*encoder.parameters(), *decoder.parameters()]


def shared_parameters(job: Job) -> Result:
    """Two heads on one body, each model with an optimizer of its own; the body belongs to the first."""
    body = network(6, 150, 130)
    first, second = nn.Sequential(body, network(130, 1)), nn.Sequential(body, network(130, 1))
    one = torch.optim.SGD(first.parameters(), lr=0.05)
    two = torch.optim.SGD(second[1].parameters(), lr=0.05, momentum=0.5)
    job.distribute(first, one)
    job.distribute(second, two)
    for x, y in job.loader(data(47, 1), 4):
        one.zero_grad()
        two.zero_grad()
        (((first(x) - y) ** 2).mean() + (second(x) + y).abs().mean()).backward()
        one.step()
        two.step()
    return [*first.parameters(), *second.parameters()]


def both_train_the_body(job: Job) -> Result:
    """As before, in turns, and both optimizers train the body."""
    body = network(6, 150, 130)
    first, second = nn.Sequential(body, network(130, 1)), nn.Sequential(body, network(130, 1))
    one = torch.optim.SGD(first.parameters(), lr=0.05)
    two = torch.optim.SGD(second.parameters(), lr=0.05, momentum=0.5)
    job.distribute(first, one)
    job.distribute(second, two)
    for x, y in job.loader(data(47, 1), 4):
        for model, optimizer in ((first, one), (second, two)):
            optimizer.zero_grad()
            ((model(x) - y) ** 2).mean().backward()
            optimizer.step()
    return [*first.parameters(), *second.parameters()]


def two_loaders(job: Job) -> Result:
    """Labelled and unlabelled data, both of which end with an uneven batch; each loss is weighted by its own."""
    model = network(6, 150, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    job.distribute(model, optimizer)
    labelled, unlabelled = job.loader(data(29, 1), 2), job.loader(data(47, 2), 4)
    for (x, y), (u, _) in zip(labelled, unlabelled, strict=False):
        supervised, consistency = ((model(x) - y) ** 2).mean(), (model(u) - model(-u)).abs().mean()
        if job.strategy:
            hocket.weight(None)
            supervised, consistency = labelled.weight * supervised, unlabelled.weight * consistency
        optimizer.zero_grad()
        (supervised + consistency).backward()
        optimizer.step()
    return list(model.parameters())


SCRIPTS: list[Callable[[Job], Result]] = [
    two_optimizers, branches, one_optimizer_for_two_models, shared_parameters, both_train_the_body, two_loaders,
]  # fmt: skip


def run(name: str, strategy: str, workers: int) -> list[torch.Tensor]:
    return [p.detach().clone() for p in globals()[name](Job(strategy, workers))]


@pytest.mark.few(6)
@pytest.mark.parametrize("strategy", STRATEGIES)
@pytest.mark.parametrize("script", SCRIPTS, ids=lambda script: script.__name__)
def test_many_workers_are_one(pool: Pool, script: Callable[[Job], Result], strategy: str) -> None:
    if script is both_train_the_body and strategy != "mirrored":
        for outcome in pool.outcomes(3, run, script.__name__, strategy, 3):
            assert outcome.kind == "StrategyError" and "two optimizers train" in outcome.message
        return
    one = script(Job(None, 3))
    for result in pool.run(3, run, script.__name__, strategy, 3):
        for expected, found in zip(one, result, strict=True):
            torch.testing.assert_close(found, expected.detach(), rtol=1e-9, atol=1e-12)


def twice() -> None:
    model = network(6, 1)
    first, second = torch.optim.SGD([model[0].weight], lr=0.1), torch.optim.SGD([model[0].bias], lr=0.1)
    hocket.distribute(model, first)
    hocket.distribute(model, second)


@pytest.mark.parametrize("size", [1, 2])
def test_a_model_is_distributed_once_with_all_its_optimizers(pool: Pool, size: int) -> None:
    for outcome in pool.outcomes(size, twice):
        assert outcome.kind == "UsageError" and "with all of its optimizers in a list" in outcome.message


def drift(strategy: str, rank: int) -> int:
    model = network(6, 20, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    hocket.distribute(model, optimizer, strategy=strategy)
    for step in range(7):
        optimizer.zero_grad()
        model(torch.ones(2, 6, dtype=torch.float64)).sum().backward()
        optimizer.step()
        if step == 4 and hocket.rank() == rank:
            with torch.no_grad():
                model[0].bias[3] += 1e-12
    return step


def test_replicas_that_drift_apart_are_found(pool: Pool) -> None:
    for outcome in pool.outcomes(3, drift, "mirrored", 2, check_replicas=3):
        assert outcome.kind == "ReplicaError"
        assert "after 6 steps" in outcome.message and "'0.bias' on rank 2" in outcome.message
    assert pool.run(3, drift, "mirrored", -1, check_replicas=3) == [6] * 3
    assert pool.run(3, drift, "mirrored", 2, check_replicas=0) == [6] * 3
    assert pool.run(2, drift, "central", -1, check_replicas=1) == [6] * 2


def norms(strategy: str) -> list[list[float]]:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(6, 4), nn.BatchNorm1d(4))
    with torch.no_grad():
        model[1].running_mean += hocket.rank()
    hocket.distribute(model, torch.optim.SGD(model.parameters(), lr=0.1), strategy=strategy)
    statistics = model[1].running_mean
    found = [statistics.tolist()]
    loader = hocket.distribute(loader=DataLoader(data(24, 1), 4))
    for x, _ in loader:
        model(x.float())
        found.append(statistics.tolist())
    found.append(statistics.tolist())
    assert int(model[1].num_batches_tracked) == 3
    return found


@pytest.mark.parametrize("strategy", ["mirrored", "central"])
def test_buffers_start_equal_are_ones_own_and_are_averaged_at_the_end_of_an_epoch(pool: Pool, strategy: str) -> None:
    first, second = pool.run(2, norms, strategy)
    assert first[0] == second[0] == [0.0] * 4
    assert all(a != b for a, b in zip(first[1:4], second[1:4], strict=True))
    mean = [(a + b) / 2 for a, b in zip(first[3], second[3], strict=True)]
    assert first[4] == second[4] == pytest.approx(mean, rel=1e-6)
