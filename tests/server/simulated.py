"""Trainings on simulated workers, and the same ones worked out by hand."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeVar

import torch
from torch import nn

from hocket import specs
from hocket.capture.members import Members
from hocket.comm.alone import AloneCommunicator
from hocket.coordinator.dealer_client import Deal
from hocket.server.server_client import Client
from hocket.server.server_service import Service
from hocket.server.simulated_servers import connect, serve
from hocket.specs import Served
from hocket.strategies.base import BatchAtWork, Context
from hocket.strategies.building import build
from hocket.strategies.served import ServedTraining
from hocket.transport.simulated import Simulation, Speed

T = TypeVar("T")
SAMPLES = 60


def make_model() -> nn.Module:
    with torch.random.fork_rng():
        torch.manual_seed(0)
        return nn.Sequential(nn.Linear(6, 20), nn.Tanh(), nn.Linear(20, 1)).double()


def make_data(samples: int = SAMPLES) -> tuple[torch.Tensor, torch.Tensor]:
    x = torch.randn(samples, 6, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    return x, torch.sin(x.sum(1, keepdim=True))


def loss_of(model: nn.Module, rows: Sequence[int] | slice) -> torch.Tensor:
    x, y = make_data()
    return ((model(x[rows]) - y[rows]) ** 2).mean()


def values(model: nn.Module) -> list[torch.Tensor]:
    return [parameter.detach().clone() for parameter in model.parameters()]


def assert_close(one: list[torch.Tensor], other: list[torch.Tensor], tolerance: float = 1e-9) -> None:
    for mine, theirs in zip(one, other, strict=True):
        assert torch.allclose(mine, theirs, rtol=tolerance, atol=tolerance), (mine - theirs).abs().max()


def are_equal(one: list[torch.Tensor], other: list[torch.Tensor]) -> bool:
    return all(torch.equal(mine, theirs) for mine, theirs in zip(one, other, strict=True))


@dataclass
class Worker:
    """One simulated worker, ready to train."""

    rank: int
    simulation: Simulation
    client: Client
    model: nn.Module
    optimizer: torch.optim.Optimizer
    strategy: ServedTraining

    def step(self, rows: Sequence[int] | slice, weight: float = 1.0, name: tuple[int, int, int] | None = None) -> None:
        """Push the gradient of some samples, and get the parameters when this worker may go on."""
        self.strategy.begin_batch(BatchAtWork(weight=weight, name=name))
        loss_of(self.model, rows).backward()
        self.optimizer.step()
        self.optimizer.zero_grad()

    def leave(self) -> None:
        """This worker has no more batches of this epoch."""
        self.client.leave_epoch(0)


@dataclass
class Job:
    """A simulated job; ``services`` and ``simulation`` are for a look at them when it has run.

    Attributes:
        optimizer: Class and options.
    """

    choice: str
    workers: int
    servers: int = 1
    optimizer: tuple[str, dict[str, Any]] = ("SGD", {"lr": 0.1})
    speed: Speed | None = None
    timeout: float = 1e5
    simulation: Simulation = field(default_factory=Simulation)

    def __post_init__(self) -> None:
        self.served = serve(self.simulation, self.servers, self.workers, self.timeout)
        self.services: list[Service] = self.served.servers

    def run(self, work: Callable[[Worker], T]) -> list[T]:
        return self.simulation.run([lambda rank=rank: work(self._make(rank)) for rank in range(self.workers)])

    def _make(self, rank: int) -> Worker:
        client = connect(self.simulation, self.served, rank, self.workers, self.speed)
        model = make_model()
        name, options = self.optimizer
        optimizer = getattr(torch.optim, name)(model.parameters(), **options)
        if rank:  # rank 0's values are those that count
            with torch.no_grad():
                for parameter in model.parameters():
                    parameter.add_(rank)
        choice = specs.parse(self.choice)
        assert isinstance(choice, Served)
        context = Context(model, optimizer, Members(model, optimizer), AloneCommunicator(), client)
        strategy = build(context, choice)
        assert isinstance(strategy, ServedTraining)
        return Worker(rank, self.simulation, client, model, optimizer, strategy)


def plain(
    optimizer: tuple[str, dict[str, Any]], batches: Sequence[Sequence[int] | slice], clip: float | None = None
) -> list[torch.Tensor]:
    """One process without any of this."""
    model = make_model()
    name, options = optimizer
    rule = getattr(torch.optim, name)(model.parameters(), **options)
    for rows in batches:
        rule.zero_grad()
        loss_of(model, rows).backward()
        if clip is not None:
            nn.utils.clip_grad_norm_(model.parameters(), clip)
        rule.step()
    return values(model)


def take(client: Client, deal: Deal, total: int) -> int | None:
    """The next batch for a worker that has done all it had; blocks while others hold some."""
    number = deal.take(1, total)
    return deal.take(1, total) if number is None and client.await_batch(deal, 0) else number
