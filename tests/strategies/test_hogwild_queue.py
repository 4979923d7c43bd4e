"""The queue that hogwild and others take batches from: what had a step is done, and nobody waits for what is kept."""

import time
from typing import Any

import pytest
import torch
from pool import Pool, needs
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import hocket


def numbered(strategy: str, batches: int) -> tuple[Any, Any, Any]:
    """Batches of one number each; every step adds 1 to the parameter."""
    model = nn.Linear(1, 1, bias=False).double()
    nn.init.zeros_(model.weight)
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    loader: Any = DataLoader(TensorDataset(torch.arange(batches).double()[:, None]), 1)
    model, optimizer, loader = hocket.distribute(model, optimizer, loader, strategy=strategy)
    return model, optimizer, loader


def add_one(model: Any, optimizer: Any, x: torch.Tensor) -> None:
    model(-torch.ones_like(x)).sum().backward()
    optimizer.step()
    optimizer.zero_grad()


def leaving_after_a_step(strategy: str) -> list[int]:
    model, optimizer, loader = numbered(strategy, 40)
    seen: list[int] = []
    for (x,) in loader:
        seen.append(int(x))
        add_one(model, optimizer, x)
        time.sleep(0.001)
        if hocket.rank() == 1 and len(seen) == 3:
            break
    return seen


def test_a_loop_that_is_left_after_a_step_has_done_that_batch(pool: Pool) -> None:
    found = pool.run(2, leaving_after_a_step, "hogwild", coordinated=True)
    assert sorted(found[0] + found[1]) == list(range(40))


def keeping_gradients(strategy: str, batches: int) -> tuple[int, int]:
    """Four batches make a step; at the end of an epoch every worker has some that made none."""
    model, optimizer, loader = numbered(strategy, batches)
    taken = since = 0
    for _ in range(2):
        for (x,) in loader:
            taken, since = taken + 1, since + 1
            time.sleep(0.01)
            if since < 4:
                with hocket.accumulate():
                    model(-torch.ones_like(x)).sum().backward()
            else:
                add_one(model, optimizer, x)
                since = 0
    return taken, since


@pytest.mark.parametrize("strategy", ["hogwild", "hogwild(locked=True)", "asynchronous"])
def test_nobody_waits_for_gradients_that_are_kept_at_the_end(pool: Pool, strategy: str) -> None:
    found = pool.run(2, keeping_gradients, strategy, 11, **needs(strategy), timeout=20.0)
    assert sum(taken for taken, _ in found) == 22


def saving(strategy: str, folder: str, when: str) -> float:
    model, optimizer, loader = numbered(strategy, 10)
    for number, (x,) in enumerate(loader):
        if number == 5 and when == "before":
            hocket.save(folder, model=model, optimizer=optimizer, loader=loader).wait()
        add_one(model, optimizer, x)
        if number == 4 and when == "after":
            hocket.save(folder, model=model, optimizer=optimizer, loader=loader).wait()
    return float(model.weight)


def going_on(strategy: str, folder: str) -> tuple[list[int], float]:
    model, optimizer, loader = numbered(strategy, 10)
    hocket.load(folder, model=model, optimizer=optimizer, loader=loader)
    seen: list[int] = []
    for (x,) in loader:
        seen.append(int(x))
        add_one(model, optimizer, x)
    return seen, float(model.weight)


@pytest.mark.parametrize("strategy", ["hogwild", "gossip", "asynchronous"])
def test_what_was_saved_within_a_batch_goes_on_with_what_had_no_step(pool: Pool, tmp_path: Any, strategy: str) -> None:
    for when in ("before", "after"):
        folder = str(tmp_path / when)
        assert pool.run(1, saving, strategy, folder, when, **needs(strategy)) == [10.0]
        assert pool.run(1, going_on, strategy, folder, **needs(strategy)) == [([5, 6, 7, 8, 9], 10.0)]


def scheduled(strategy: str) -> tuple[int, int]:
    """Rank 1 is slow, so that the other one has more batches than there are steps in the schedule."""
    model, optimizer, loader = numbered(strategy, 60)
    scheduler = torch.optim.lr_scheduler.OneCycleLR(optimizer, max_lr=0.1, total_steps=len(loader))
    taken = 0
    for (x,) in loader:
        add_one(model, optimizer, x)
        scheduler.step()
        taken += 1
        time.sleep(0.05 if hocket.rank() == 1 else 0.002)
    return taken, len(loader)


def test_schedulers_follow_all_workers(pool: Pool) -> None:
    found = pool.run(2, scheduled, "hogwild", coordinated=True)
    assert sum(taken for taken, _ in found) == 60
    assert {length for _, length in found} == {30}
