"""What was left unsettled is said in a line: when it is settled late, and when it never is."""

import contextlib
import itertools
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import hocket
from hocket.job.simulated_job import SimulatedJob

LATE = (
    "hocket: a training loop was left by an exception, or in a way that cannot be seen ({}): the model was settled "
    "only now, in {}; call hocket.settle() before you save or evaluate it\n"
)
NEVER = (
    "hocket: the script ended without the end of its training loop, {}: call hocket.settle() on all ranks before the "
    "model is saved or evaluated\n"
)
OWED = {"local_sgd(period=3)": "2 batches after the last average", "delayed": "the last gradient is not applied yet"}


def step(model: nn.Module, optimizer: torch.optim.Optimizer, inputs: torch.Tensor) -> None:
    optimizer.zero_grad()
    model(inputs).square().mean().backward()
    optimizer.step()


def make() -> Any:
    torch.manual_seed(0)
    model = nn.Linear(3, 1).double()
    x = torch.randn(48, 3, dtype=torch.float64)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    return hocket.distribute(model, optimizer, DataLoader(TensorDataset(x), 2))


def left_by_an_exception(then: str) -> bool:
    """Five steps of a loop, and then what all ranks do next; whether they are equal after that."""
    model, optimizer, loader = make()
    with contextlib.suppress(RuntimeError):
        for number, (inputs,) in enumerate(loader, start=1):
            step(model, optimizer, inputs)
            if number == 5:
                raise RuntimeError
    if then == "settle":
        hocket.settle()
    elif then == "mean":
        hocket.mean(1.0)
    elif then == "loop":
        next(iter(loader))
    weight = model.weight.detach()
    return all(torch.equal(each, weight) for each in hocket.allgather(weight))


CALLS = {"mean": "the next call that all ranks make", "loop": "the next loop over a loader"}


@pytest.mark.few(2)
@pytest.mark.parametrize("strategy", OWED)
@pytest.mark.parametrize("then", CALLS)
def test_a_loop_that_is_settled_late(capsys: pytest.CaptureFixture[str], strategy: str, then: str) -> None:
    assert SimulatedJob(2, strategy).run(lambda: left_by_an_exception(then)) == [True, True]
    assert capsys.readouterr().err == LATE.format(OWED[strategy], CALLS[then])


@pytest.mark.few(1)
@pytest.mark.parametrize("strategy", [*OWED, "mirrored"])
def test_a_script_that_asks_for_it_is_told_nothing(capsys: pytest.CaptureFixture[str], strategy: str) -> None:
    assert SimulatedJob(2, strategy).run(lambda: left_by_an_exception("settle")) == [True, True]
    assert capsys.readouterr().err == ""


def lives_on(settles: bool) -> Any:
    """Five steps with an iterator that lives until the script has ended."""
    model, optimizer, loader = make()
    batches = iter(loader)
    for _ in range(5):
        step(model, optimizer, next(batches)[0])
    if settles:
        hocket.settle()
    return batches


@pytest.mark.few(2)
@pytest.mark.parametrize("strategy", OWED)
@pytest.mark.parametrize("settles", [False, True])
def test_a_script_that_ends_unsettled(capsys: pytest.CaptureFixture[str], strategy: str, settles: bool) -> None:
    SimulatedJob(2, strategy).run(lambda: lives_on(settles))
    assert capsys.readouterr().err == ("" if settles else NEVER.format(OWED[strategy]))


@pytest.mark.few(1)
@pytest.mark.parametrize("strategy", OWED)
def test_one_worker_owes_nothing(capsys: pytest.CaptureFixture[str], strategy: str) -> None:
    SimulatedJob(1, strategy).run(lambda: lives_on(False))
    assert capsys.readouterr().err == ""


def settled_in_the_middle() -> list[bool]:
    """Whether all ranks see the same after each ``settle()``; an iterator lives on, and ranks train unevenly."""
    model, optimizer, loader = make()
    batches, found = iter(loader), list[bool]()
    for count in (3 + hocket.rank(), 1, 2):
        for (x,) in itertools.islice(batches, count):
            step(model, optimizer, x)
        hocket.settle()
        found.append(all(torch.equal(each, model.weight) for each in hocket.allgather(model.weight.detach())))
    return found


def test_rounds_of_seconds_end_where_all_settle() -> None:
    assert SimulatedJob(3, "local_sgd(time=100)").run(settled_in_the_middle) == [[True] * 3] * 3
