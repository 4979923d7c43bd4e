"""Scaled learning rates: what a script reads is what the next step uses, also during warm-up."""

from pathlib import Path
from typing import Any

import pytest
import torch
from pool import Pool
from torch import nn
from torch.optim import lr_scheduler
from torch.utils.data import DataLoader, TensorDataset

import hocket
from hocket.job.checkpoint.save_load_resume import _saver
from hocket.job.worker import current

STEPS, WARMUP = 9, 5

SCHEDULES: dict[str, Any] = {
    "none": None,
    "step": lambda o: lr_scheduler.StepLR(o, 3, 0.5),
    "cosine": lambda o: lr_scheduler.CosineAnnealingLR(o, 8, eta_min=0.01),
    "lambda": lambda o: lr_scheduler.LambdaLR(o, lambda epoch: 1 / (1 + epoch)),
    "one cycle": lambda o: lr_scheduler.OneCycleLR(o, 0.4, total_steps=12, cycle_momentum=False),
    "cyclic": lambda o: lr_scheduler.CyclicLR(o, 0.1, 0.3, step_size_up=3, cycle_momentum=False),
    "restarts": lambda o: lr_scheduler.CosineAnnealingWarmRestarts(o, 4, eta_min=0.02),
    "two": lambda o: lr_scheduler.SequentialLR(
        o, [lr_scheduler.ExponentialLR(o, 0.8), lr_scheduler.CosineAnnealingLR(o, 5)], milestones=[4]
    ),
    "chained": lambda o: lr_scheduler.ChainedScheduler(
        [lr_scheduler.StepLR(o, 2, 0.7), lr_scheduler.ExponentialLR(o, 0.9)]
    ),
}


def scheduled(name: str, rate: float) -> list[float]:
    """What a plain script's schedule says for each step."""
    optimizer = torch.optim.SGD([nn.Parameter(torch.zeros(1))], lr=rate)
    scheduler = SCHEDULES[name] and SCHEDULES[name](optimizer)
    rates = []
    for _ in range(STEPS):
        rates.append(optimizer.param_groups[0]["lr"])
        optimizer.step()
        if scheduler is not None:
            scheduler.step()
    return rates


def used(name: str, strategy: str, by_tensor: bool) -> list[tuple[float, float, float]]:
    """For each step: what the script reads, what the scheduler says, and what the step has moved a parameter by."""
    parameter = nn.Parameter(torch.zeros(1, dtype=torch.float64))
    rate = torch.tensor(0.1, dtype=torch.float64) if by_tensor else 0.1
    optimizer = torch.optim.SGD([parameter], lr=rate, foreach=False)
    hocket.distribute(nn.ParameterList([parameter]), optimizer, strategy=strategy, scale_lr="linear", warmup=WARMUP)
    scheduler = SCHEDULES[name] and SCHEDULES[name](optimizer)
    found = []
    for _ in range(STEPS):
        read = float(optimizer.param_groups[0]["lr"])
        last = float(scheduler.get_last_lr()[0]) if scheduler is not None else read
        before = float(parameter.detach())
        optimizer.zero_grad()
        parameter.sum().backward()
        optimizer.step()
        found.append((read, last, before - float(parameter.detach())))
        if scheduler is not None:
            scheduler.step()
    return found


@pytest.mark.parametrize("name", SCHEDULES)
def test_a_script_reads_what_is_used(pool: Pool, name: str) -> None:
    shares = [min(1.0, 0.5 + 0.5 * step / WARMUP) for step in range(STEPS)]
    expected = [share * rate for share, rate in zip(shares, scheduled(name, 0.2), strict=True)]
    for found in pool.run(2, used, name, "mirrored", name == "step"):
        for (read, last, moved), rate in zip(found, expected, strict=True):
            assert (read, last, moved) == pytest.approx((rate, rate, rate), rel=1e-9)


def test_servers_use_what_a_script_reads(pool: Pool) -> None:
    for found in pool.run(2, used, "cosine", "bsp", False, servers=1):
        for read, last, moved in found:
            assert (last, moved) == pytest.approx((read, read), rel=1e-9)


def by_hand() -> list[float]:
    parameter = nn.Parameter(torch.zeros(1, dtype=torch.float64))
    optimizer = torch.optim.SGD([parameter], lr=0.1)
    hocket.distribute(nn.ParameterList([parameter]), optimizer, scale_lr="linear", warmup=WARMUP)
    moved = []
    for step in range(STEPS):
        optimizer.param_groups[0]["lr"] = 0.01 * (1 + step)
        before = float(parameter.detach())
        optimizer.zero_grad()
        parameter.sum().backward()
        optimizer.step()
        moved.append(before - float(parameter.detach()))
    return moved


def test_a_rate_that_is_set_by_hand_is_used_as_it_is(pool: Pool) -> None:
    for moved in pool.run(2, by_hand):
        assert moved == pytest.approx([0.01 * (1 + step) for step in range(STEPS)], rel=1e-9)


def resumed(stop: int | None) -> tuple[int, list[float]]:
    """In the middle of the warm-up; the rates that were read, and the parameter in the end."""
    model = nn.Linear(1, 1, bias=False)
    torch.nn.init.zeros_(model.weight)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    loader: Any = DataLoader(TensorDataset(torch.ones(2 * STEPS, 1)), 1)
    hocket.distribute(model, optimizer, scale_lr="linear", warmup=7)
    loader = hocket.distribute(loader=loader)
    scheduler = lr_scheduler.CosineAnnealingLR(optimizer, 12, eta_min=0.003)
    where = hocket.resume(model=model, optimizer=optimizer, scheduler=scheduler, loader=loader)
    rates = []
    for (x,) in loader:
        rates.append(optimizer.param_groups[0]["lr"])
        optimizer.zero_grad()
        model(x).mean().backward()
        optimizer.step()
        scheduler.step()
        if current().config.checkpoint:
            _saver(current())._last.wait()
        if stop is not None and current().training.counts.step == stop:
            break
    return where.step, [*rates[-4:], *scheduler.get_last_lr(), float(model.weight.detach())]


def test_a_resumption_in_the_middle_is_exact(pool: Pool, tmp_path: Path) -> None:
    settings = {"checkpoint": str(tmp_path), "checkpoint_every": 3}
    whole = pool.run(2, resumed, None)
    pool.run(2, resumed, 5, **settings)
    rest = pool.run(2, resumed, None, **settings)
    assert rest[0][0] == 3 and [values for _, values in rest] == [values for _, values in whole]
