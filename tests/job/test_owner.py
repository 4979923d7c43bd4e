"""One thread of one process makes a worker's calls; others are told at once, and take nobody's place."""

import os
import threading
from collections.abc import Callable
from typing import Any

import pytest
import torch
from pool import Pool
from torch import nn
from torch.utils.data import DataLoader, Dataset

import hocket
from hocket.errors import MismatchError, UsageError


def caught(call: Callable[[], Any]) -> str:
    try:
        call()
    except UsageError as error:
        return str(error)
    return ""


def in_thread(call: Callable[[], Any]) -> str:
    said: list[str] = []
    thread = threading.Thread(target=lambda: said.append(caught(call)), name="other")
    thread.start()
    thread.join()
    return said[0]


def in_child(call: Callable[[], Any]) -> str:
    reader, writer = os.pipe()
    child = os.fork()
    if not child:
        os.write(writer, caught(call).encode())
        os._exit(0)
    os.waitpid(child, 0)
    os.close(writer)
    with os.fdopen(reader, "rb") as pipe:
        return pipe.read().decode()


def train(strategy: str) -> list[list[str]]:
    torch.manual_seed(0)
    model = nn.Linear(3, 2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    hocket.distribute(model, optimizer, strategy=strategy)

    def step() -> None:
        optimizer.zero_grad()
        model(torch.ones(2, 3)).sum().backward()
        optimizer.step()

    def resumed() -> None:
        hocket.resume(model=model)

    step()
    calls = [
        optimizer.step, resumed, lambda: hocket.mean(1.0), hocket.barrier, lambda: hocket.allgather(torch.ones(1)),
        lambda: hocket.distribute(nn.Linear(1, 1)), lambda: hocket.save("nowhere", model=model),
    ]  # fmt: skip
    before = [p.detach().clone() for p in model.parameters()]
    found = [[in_thread(call) for call in calls], [in_child(call) for call in (*calls, step)]]
    assert in_thread(lambda: hocket.report(loss=1.0)) == ""
    assert all(torch.equal(a, b) for a, b in zip(before, model.parameters(), strict=True))
    step()  # and nobody has taken this worker's place
    assert hocket.total(1.0) == 2.0
    return found


@pytest.mark.parametrize("strategy", ["mirrored", "central(fused=True)"])
def test_calls_of_other_threads_and_of_children_raise_at_once(pool: Pool, strategy: str) -> None:
    names = ["optimizer.step()", "hocket.resume()", "hocket.mean()", "hocket.barrier()", "hocket.allgather()",
             "hocket.distribute()", "hocket.save()"]  # fmt: skip
    for threads, children in pool.run(2, train, strategy):
        for name, said in zip(names, threads, strict=True):
            assert said.startswith(f"{name} in thread 'other', while thread 'MainThread' makes the calls"), said
        for name, said in zip([*names, "optimizer.step()"], children, strict=True):
            assert said.startswith(f"{name} in process ") and "is no worker" in said, said


def all_in_one_thread() -> float:
    """The calls need not be made by the main thread."""
    found: list[float] = []

    def work() -> None:
        model = nn.Linear(3, 2)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        hocket.distribute(model, optimizer)
        model(torch.ones(2, 3)).sum().backward()
        optimizer.step()
        found.append(hocket.total(1.0))

    thread = threading.Thread(target=work)
    thread.start()
    thread.join()
    return found[0] + hocket.total(1.0)  # that one has ended, so this may follow


def test_another_thread_may_make_all_calls_and_the_next_one_follow_it(pool: Pool) -> None:
    assert pool.run(2, all_in_one_thread) == [4.0, 4.0]


class Numbers(Dataset[Any]):
    def __len__(self) -> int:
        return 8

    def __getitem__(self, index: int) -> float:
        return float(index + hocket.rank() * 0)


def with_loader_processes() -> float:
    hocket.barrier()
    loader = hocket.distribute(loader=DataLoader(Numbers(), 2, num_workers=1))
    return hocket.total(sum(float(batch.sum()) for batch in loader))


def test_processes_of_data_loaders_are_not_disturbed(pool: Pool) -> None:
    assert pool.run(2, with_loader_processes) == [28.0, 28.0]


def differ() -> str:
    try:
        hocket.mean(1.0) if hocket.rank() else hocket.total(torch.ones(2))
    except MismatchError as error:
        return str(error)
    return ""


def test_ranks_in_different_calls_are_told_of_the_calls(pool: Pool) -> None:
    for said in pool.run(2, differ):
        assert "rank 0: hocket.total()" in said and "rank 1: hocket.mean()" in said
