"""The laws of gossip: the complete graph is mirrored training, and everything else is what its matrix says."""

from typing import Any

import pytest
import torch
from pool import Pool
from strategies.test_local_laws import SGD
from strategies.training import Case, alone, assert_equal, together, with_mean_state

import hocket
from hocket.comm.graphs import Graph
from hocket.job.worker import current
from hocket.strategies.base import Why

STEPS = 7
RATE = 0.05


@pytest.mark.few(4)
@pytest.mark.parametrize(
    ("workers", "strategy", "options"),
    [
        (1, "gossip", "momentum"),
        (2, "gossip", "nesterov"),  # a ring of two is complete
        (3, "gossip(topology='complete')", "plain"),
        (4, "gossip(topology='complete')", "nesterov"),
        (3, "gossip(topology='complete', push_sum=True)", "momentum"),
        (2, "gossip(topology='pairs')", "momentum"),
        (1, "gossip(asynchronous=True)", "nesterov"),
    ],
)
def test_the_complete_graph_is_mirrored(pool: Pool, workers: int, strategy: str, options: str) -> None:
    case = Case(options=SGD[options], groups=True, samples=8 * 3 * workers)
    many = pool.run(workers, together, case, strategy, coordinated=True)
    assert_equal(alone(case, workers), with_mean_state(many), 1e-9)


@pytest.mark.parametrize("fields", [{"transport": "gloo"}, {"transport": "gloo", "tls": "on"}])
def test_over_tcp(pool: Pool, fields: dict[str, Any]) -> None:
    case = Case(options=SGD["nesterov"], samples=72)
    many = pool.run(3, together, case, "gossip(topology='complete')", coordinated=True, **fields)
    assert_equal(alone(case, 3), with_mean_state(many), 1e-9)


def make(rank: int) -> tuple[torch.nn.Module, torch.Tensor]:
    """A model, the same everywhere, and data of this rank alone."""
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(4, 9), torch.nn.Tanh(), torch.nn.Linear(9, 1)).double()
    return model, torch.randn(STEPS, 5, 4, generator=torch.Generator().manual_seed(rank + 1), dtype=torch.float64)


def loss_of(model: torch.nn.Module, x: torch.Tensor) -> torch.Tensor:
    return ((model(x) - torch.sin(x.sum(1, keepdim=True))) ** 2).mean()


def vector(model: torch.nn.Module) -> torch.Tensor:
    return torch.cat([p.detach().reshape(-1) for p in model.parameters()]).clone()


def train(strategy: str, rate: float = RATE, spread: float = 0.0) -> list[torch.Tensor]:
    """Steps without a loader: the parameters after each; and in the end the mean."""
    model, data = make(hocket.rank())
    optimizer = torch.optim.SGD(model.parameters(), lr=rate)
    hocket.distribute(model, optimizer, strategy=strategy)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(spread * hocket.rank())
    found = [vector(model)]
    for x in data:
        loss_of(model, x).backward()
        optimizer.step()
        optimizer.zero_grad()
        found.append(vector(model))
    current().training.strategies[0].settle(Why.END)
    return [*found, vector(model)]


def gradients(points: torch.Tensor, step: int) -> torch.Tensor:
    found = []
    for rank, point in enumerate(points):
        model, data = make(rank)
        torch.nn.utils.vector_to_parameters(point, model.parameters())
        loss_of(model, data[step]).backward()
        found.append(torch.cat([p.grad.reshape(-1) for p in model.parameters() if p.grad is not None]))
    return torch.stack(found)


def simulate(workers: int, graph: Graph, kind: str, period: int = 1) -> list[torch.Tensor]:
    """The same in one process: a row for each worker, and a matrix for each round."""
    x = torch.stack([vector(make(0)[0])] * workers)
    mass = torch.ones(workers, 1, dtype=torch.float64)
    found = [x]
    for step in range(STEPS):
        turn, mixes = step // period, (step + 1) % period == 0
        mixing = torch.tensor(graph.mixing(workers, turn), dtype=torch.float64)
        pushing = torch.tensor(graph.pushing(workers, turn), dtype=torch.float64)
        change = -RATE * gradients(x / mass, step)
        if kind == "adapt_while_combine":
            x = (mixing @ x if mixes else x) + change
        elif kind == "adapt_then_combine":
            x = mixing @ (x + change) if mixes else x + change
        else:
            x = x + change
            x, mass = (pushing @ x, pushing @ mass) if mixes else (x, mass)
        found.append(x / mass)
    return [*found, (x.sum(0) / mass.sum()).expand_as(x)]


@pytest.mark.few(5)
@pytest.mark.parametrize(
    ("workers", "topology", "kind", "period"),
    [
        (4, "ring", "adapt_then_combine", 1),
        (4, "ring", "adapt_while_combine", 1),
        (4, "torus", "adapt_while_combine", 3),
        (5, "exponential", "adapt_then_combine", 2),
        (5, "pairs", "adapt_then_combine", 1),
        (4, "pairs", "adapt_while_combine", 1),
        (3, "complete", "adapt_while_combine", 1),
        (4, "exponential", "push_sum", 1),
        (3, "ring", "push_sum", 1),
        (4, "torus", "push_sum", 2),
    ],
)
def test_it_is_what_the_matrix_says(pool: Pool, workers: int, topology: str, kind: str, period: int) -> None:
    told = "push_sum=True" if kind == "push_sum" else f"order={kind!r}"
    many = pool.run(workers, train, f"gossip(topology={topology!r}, {told}, period={period})", coordinated=True)
    expected = simulate(workers, Graph(topology), kind, period)
    for step, rows in enumerate(expected):
        for rank, row in enumerate(rows):
            assert torch.allclose(many[rank][step], row, rtol=1e-9, atol=1e-9), (step, rank)


@pytest.mark.few(8)
@pytest.mark.parametrize("workers", [3, 4])
@pytest.mark.parametrize(
    "options",
    [
        "topology='ring'",
        "topology='complete', order='adapt_while_combine'",
        "topology='exponential'",
        "topology='pairs'",
        "push_sum=True",
        "push_sum=True, topology='exponential'",
        "asynchronous=True, topology='pairs'",
        "asynchronous=True",
    ],
)
def test_mixing_preserves_the_mean_and_brings_together(pool: Pool, workers: int, options: str) -> None:
    many = pool.run(workers, train, f"gossip({options})", 0.0, 1.0, coordinated=True)
    before = torch.stack([found[0] for found in many])
    for rank in range(workers):
        assert torch.allclose(many[rank][-1], before.mean(0), rtol=1e-9, atol=1e-9)
        assert torch.equal(many[rank][-1], many[0][-1])
    if "asynchronous" not in options:
        mixed = torch.stack([found[-2] for found in many])
        assert torch.allclose(mixed.mean(0), before.mean(0), rtol=1e-9, atol=1e-9)
        assert mixed.std(0).max() < before.std(0).max()
