"""A switch of strategies and workers that join, before it or after."""

import os
import signal
import time
from collections.abc import Collection
from pathlib import Path
from typing import Any, cast

import pytest
import torch
from pool import Pool
from products import product
from torch import nn
from torch.utils.data import DataLoader

import hocket
from hocket.job.worker import current
from hocket.strategies.phases import PhasedTraining
from job.test_newcomers import BATCH, SAMPLES, Numbered, build, check, train

STEPS = SAMPLES // (3 * BATCH)  # of an epoch of three workers; the new one joins in the second or third epoch


def check_late(steps: list[list[int]], found: list[float], delayed: Collection[int]) -> None:
    """As ``check_law``, where gradients are applied one step late in the epochs of ``delayed``."""
    model, optimizer, scheduler = build()
    data, seen, waiting = Numbered(), 0, list[list[torch.Tensor | None]]()
    for numbers in steps:
        optimizer.zero_grad()
        ((model(data.x[numbers]) - data.y[numbers]) ** 2).mean().backward()
        waiting.append([parameter.grad for parameter in model.parameters()])
        epoch, seen = seen // SAMPLES, seen + len(numbers)
        while len(waiting) > (epoch in delayed and seen % SAMPLES > 0):
            for parameter, gradient in zip(model.parameters(), waiting.pop(0), strict=True):
                parameter.grad = gradient
            optimizer.step()
        if seen % SAMPLES == 0:
            scheduler.step()
    expected = nn.utils.parameters_to_vector(model.parameters())
    assert torch.allclose(torch.tensor(found, dtype=torch.float64), expected, rtol=1e-9, atol=1e-12)


@pytest.mark.few(2)
@product(
    strategy=[
        ("mirrored -> delayed @ epoch 2 -> mirrored @ epoch 4", {1, 2}),  # joins in the second, or in the last
        ("delayed -> mirrored @ epoch 2 -> delayed @ epoch 5", {0, 4, 5}),
        ("mirrored -> delayed @ epoch 5", {4, 5}),
    ],
    who=[(3, 1), (3, 0)],
    phase=["forward", "between"],
)
def test_a_lost_worker_is_replaced(
    pool: Pool, tmp_path: Path, strategy: tuple[str, set[int]], who: tuple[int, int], phase: str
) -> None:
    text, delayed = strategy
    size, dead = who
    settings: dict[str, Any] = {"on_loss": "replace", "check_replicas": 1}
    found = pool.outcomes(size, train, str(tmp_path), {dead: (3, phase)}, 0, text, replaced=[dead], **settings)
    check_late(check(tmp_path, found, size), found[0][0], delayed)
    assert len({str(each[1]) for each in found}) == 1
    assert found[dead][6]


@pytest.mark.few(1)
@product(
    strategy=[
        f"local_sgd(period=4) -> mirrored @ step {2 * STEPS + 5}",
        "mirrored -> easgd(2) @ epoch 2 -> local_sgd(3, optimizer_state=True) @ epoch 4 -> mirrored @ epoch 6",
        "delayed -> diloco(period=3) @ step 5 -> dmb(extra=1) @ epoch 5",
        "local_sgd(period=4, after='decay')",
    ],
    who=[(3, 1), (2, 0)],
)
def test_a_lost_worker_is_replaced_in_other_switches(
    pool: Pool, tmp_path: Path, strategy: str, who: tuple[int, int]
) -> None:
    size, dead = who
    settings: dict[str, Any] = {"on_loss": "replace", "check_replicas": 1}
    deaths = {dead: (5, "forward")}
    found = pool.outcomes(size, train, str(tmp_path), deaths, 0, strategy, replaced=[dead], **settings)
    check(tmp_path, found, size)


def switch_with_each_batch(strategy: str) -> tuple[Any, ...]:
    """The rate falls with each batch. A worker is killed, and the others wait for a new one in their second epoch."""
    model, optimizer, _ = build()
    scheduler = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.99)
    model, optimizer, loader = hocket.distribute(model, optimizer, DataLoader(Numbered(), BATCH), strategy=strategy)
    is_new, group = current().config.newcomer, cast(Any, current().communicator)
    place = hocket.resume(model=model, optimizer=optimizer, scheduler=scheduler, loader=loader)
    (phased,) = current().training.strategies
    assert isinstance(phased, PhasedTraining)
    before = phased.phase
    for epoch in range(place.epoch, 4):
        for _, x, y in loader:
            if current().config.rank == 1 and not is_new and phased.batches == 5:
                os.kill(os.getpid(), signal.SIGKILL)
            assert phased.phase == min(phased.batches, SWITCHES)
            ((model(x) - y) ** 2).mean().backward()
            optimizer.step()
            optimizer.zero_grad()
            scheduler.step()
            while (
                epoch == 1
                and hocket.size() < 3
                and hocket.rank() == 0
                and not any(group._coordinator.wanted().values())
            ):
                time.sleep(0.005)
    parameters: list[float] = nn.utils.parameters_to_vector(model.parameters()).tolist()
    return parameters, phased.batches, phased.phase, hocket.size(), before


SWITCHES = 60


def test_a_new_worker_joins_when_a_switch_is_due(pool: Pool) -> None:
    names = ["mirrored", "local_sgd(period=2)"] * (SWITCHES // 2)
    strategy = " -> ".join(["mirrored", *(f"{name} @ decay" for name in names)])
    found = pool.outcomes(3, switch_with_each_batch, strategy, replaced=[1], on_loss="replace")
    assert [each[:4] for each in found] == [found[0][:4]] * 3 and found[0][2:4] == (SWITCHES, 3)
    assert 0 < found[1][4] < SWITCHES  # there was one more to come when the new worker joined
