"""``central`` where parameters cannot be the shared copy, as on a GPU: the copy is in the CPU's memory, and is brought.

Here parameters are on the CPU, and are treated as if they could not be shared; tests/gpu has those on a GPU.
"""

import dataclasses
from typing import Any

import pytest
import torch
from pool import Pool, RemoteError
from strategies.training import Case, Result, alone, assert_equal, make, together

import hocket
from hocket.strategies import central, shared_copy

ADAM = Case(optimizer="Adam", options={"lr": 0.01})
MOMENTUM = Case(options={"lr": 0.02, "momentum": 0.9, "nesterov": True, "weight_decay": 0.01}, schedule=True)


@pytest.fixture(autouse=True)
def ended(pool: Pool) -> Any:
    yield
    pool.run(3, put_back)


def put_apart() -> None:
    central.stands_apart = shared_copy.stands_apart = lambda _: True


def put_back() -> None:
    central.stands_apart = shared_copy.stands_apart = lambda layout: layout.device.type != "cpu"


def apart(case: Case, strategy: str) -> Result:
    put_apart()
    return together(case, strategy)


@pytest.mark.few(3)
@pytest.mark.parametrize("strategy", ["central", "central(fused=True)"])
@pytest.mark.parametrize(
    "case",
    [
        ADAM, MOMENTUM, dataclasses.replace(ADAM, model="tied", accumulate=3, samples=50),
        dataclasses.replace(ADAM, model="sometimes"),
    ],
    ids=["adam", "momentum", "tied", "sometimes"],
)  # fmt: skip
def test_many_workers_are_one(pool: Pool, case: Case, strategy: str) -> None:
    assert_equal(alone(case, 3), pool.run(3, apart, case, strategy))


def test_clipped_averages_are_what_is_used(pool: Pool) -> None:
    case = dataclasses.replace(MOMENTUM, clip=0.05)
    assert_equal(alone(case, 2), pool.run(2, apart, case, "central"))


def test_on_several_hosts(pool: Pool) -> None:
    for strategy in ("central", "central(fused=True)"):
        assert_equal(alone(ADAM, 3), pool.run(3, apart, ADAM, strategy, hosts=(2, 1)))


def loading() -> list[float]:
    put_apart()
    model, optimizer, loader = make(ADAM, 2)
    model, optimizer, loader = hocket.distribute(model, optimizer, loader, strategy="central")
    kept = {name: torch.full_like(value, 0.25) for name, value in model.state_dict().items()}
    found: list[float] = []
    for x, y in loader:
        torch.nn.functional.mse_loss(model(x), y).backward()
        optimizer.step()
        optimizer.zero_grad()
        found += [float(p.detach().mean()) for p in model.parameters()]
        model.load_state_dict(kept)
        optimizer.param_groups[0]["lr"] = 0.0
    return found[len(kept) :]  # all but those of the first step


def test_a_loaded_state_is_the_copy_from_then_on(pool: Pool) -> None:
    for found in pool.run(2, loading):
        assert found == [0.25] * len(found)


def writing() -> None:
    put_apart()
    model, optimizer, loader = make(ADAM, 2)
    model, optimizer, loader = hocket.distribute(model, optimizer, loader, strategy="central")
    for x, y in loader:
        torch.nn.functional.mse_loss(model(x), y).backward()
        with torch.no_grad():
            next(model.parameters()).mul_(0.5)
        optimizer.step()


def test_a_parameter_that_the_script_writes_to_is_refused(pool: Pool) -> None:
    for outcome in pool.outcomes(2, writing):
        assert isinstance(outcome, RemoteError) and "was written to in place by the script" in outcome.message


def with_muon() -> None:
    put_apart()
    model = torch.nn.Linear(4, 4, bias=False)
    hocket.distribute(model, torch.optim.Muon(model.parameters()), strategy="central")


def test_an_optimizer_of_whole_tensors_is_refused(pool: Pool) -> None:
    for outcome in pool.outcomes(2, with_muon):
        assert isinstance(outcome, RemoteError) and "use --strategy mirrored" in outcome.message
