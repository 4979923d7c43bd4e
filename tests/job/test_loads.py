"""A state that is loaded on some ranks only is told, also where replicas may differ."""

from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import hocket
from hocket.errors import MismatchError
from hocket.job.simulated_job import SimulatedJob

STRATEGIES = [
    ("local_sgd(period=2)", 0), ("bsp", 1), ("asynchronous", 1), ("gossip", 0), ("easgd(period=2)", 0),
    ("diloco(period=2)", 0), ("downpour", 1), ("local_sgd(time=0.1)", 0), ("easgd(period=2)", 1),
]  # fmt: skip


def train(what: str, inside: bool) -> None:
    """Two epochs; a state is loaded between them, or in the middle of the second."""
    torch.manual_seed(0)
    model: Any = nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 1))
    optimizer: Any = torch.optim.SGD(model.parameters(), lr=0.1)
    loader: Any = DataLoader(TensorDataset(torch.randn(24, 3)), 2)
    model, optimizer, loader = hocket.distribute(model, optimizer, loader)
    best = {name: value.clone() + 1 for name, value in model.state_dict().items()}

    def load() -> None:
        now = {name: value.clone() for name, value in model.state_dict().items()}
        model.load_state_dict(best)
        if what == "back":
            model.load_state_dict(now)

    for epoch in range(2):
        if what == "that of rank 0" and epoch:
            flat = [hocket.broadcast(value.clone()) for value in model.state_dict().values()]
            best = dict(zip(model.state_dict(), flat, strict=True))
        everywhere = what in ("all", "that of rank 0")
        if epoch and not inside and (everywhere or (what in ("alone", "back") and hocket.rank() == 1)):
            load()
        for number, (x,) in enumerate(loader):
            if epoch and inside and number == 2 and hocket.rank() == 1:
                load()
            optimizer.zero_grad()
            (model(x) ** 2).mean().backward()
            optimizer.step()
    if what == "at the end" and hocket.rank() == 1:
        load()


@pytest.mark.few(6)
@pytest.mark.parametrize(
    ("strategy", "servers", "inside"),
    [(*each, False) for each in STRATEGIES] + [(*STRATEGIES[0], True), (*STRATEGIES[1], True), (*STRATEGIES[4], True)],
)
def test_what_one_rank_loads_alone_is_told(strategy: str, servers: int, inside: bool) -> None:
    with pytest.raises(MismatchError, match=r"only rank 1 has called load_state_dict|on some ranks only"):
        SimulatedJob(2, strategy, servers=servers).run(lambda: train("alone", inside))


@pytest.mark.few(6)
@pytest.mark.parametrize("what", ["all", "back", "at the end", "that of rank 0"])
@pytest.mark.parametrize(("strategy", "servers"), STRATEGIES)
def test_what_all_load_or_put_back_is_not(strategy: str, servers: int, what: str) -> None:
    SimulatedJob(2, strategy, servers=servers).run(lambda: train(what, False))
