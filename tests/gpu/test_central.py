"""``central`` with models on a GPU: one copy in the CPU's memory, computed with on the GPU (variables on the CPU)."""

import dataclasses
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from pool import Pool
from strategies.training import Case, alone, assert_equal, together

import hocket

pytestmark = [pytest.mark.skipif(not torch.cuda.is_available(), reason="there is no GPU here"), pytest.mark.keeps_ports]

ADAM = Case(optimizer="Adam", options={"lr": 0.01}, device="cuda")
MOMENTUM = Case(options={"lr": 0.02, "momentum": 0.9, "nesterov": True, "weight_decay": 0.01}, device="cuda")
BOTH = ["central", "central(fused=True)"]


@pytest.fixture(scope="module", autouse=True)
def ended(pool: Pool) -> Iterator[None]:
    yield
    pool.close()  # NCCL keeps a port open for as long as a process lives


@pytest.mark.parametrize("size", [1, 2, 3])
@pytest.mark.parametrize("strategy", BOTH)
@pytest.mark.parametrize("case", [ADAM, MOMENTUM], ids=["adam", "momentum"])
def test_many_workers_are_one(pool: Pool, case: Case, strategy: str, size: int) -> None:
    assert_equal(alone(case, size), pool.run(size, together, case, strategy, share_gpus=True))


@pytest.mark.parametrize("strategy", BOTH)
@pytest.mark.parametrize(
    "change",
    [
        {"accumulate": 3, "samples": 50}, {"zero": True}, {"groups": True}, {"schedule": True}, {"model": "tied"},
        {"model": "sometimes"}, {"model": "channels_last"}, {"model": "checkpointed reentrant"},
    ],
    ids=str,
)  # fmt: skip
def test_scripts_of_all_kinds(pool: Pool, change: dict[str, Any], strategy: str) -> None:
    case = dataclasses.replace(ADAM, **change)
    assert_equal(alone(case, 2), pool.run(2, together, case, strategy, share_gpus=True))


def test_clipped_averages_are_what_is_used(pool: Pool) -> None:
    case = dataclasses.replace(MOMENTUM, clip=0.05)
    assert_equal(alone(case, 2), pool.run(2, together, case, "central", share_gpus=True))


def test_without_nccl(pool: Pool) -> None:
    for strategy in BOTH:
        assert_equal(alone(ADAM, 2), pool.run(2, together, ADAM, strategy, transport="shared-memory"))


def scaled() -> list[float]:
    torch.manual_seed(0)
    model = torch.nn.Linear(8, 8).cuda()
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
    model, optimizer = hocket.distribute(model, optimizer, strategy="central")
    scaler = torch.amp.GradScaler("cuda", init_scale=2.0**10)
    for step in range(6):
        x = torch.full((4, 8), float(hocket.rank() + 1), device="cuda")
        with torch.autocast("cuda", torch.float16):
            loss = model(x).square().mean()
        if step == 2 and hocket.rank() == 0:
            loss = loss * torch.inf
        scaler.scale(loss).backward()
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()
    return [scaler.get_scale(), *(float(p.detach().double().sum()) for p in model.parameters())]


def test_mixed_precision(pool: Pool) -> None:
    first, second = pool.run(2, scaled, on_nan="ignore", share_gpus=True)
    assert first == second
    assert first[0] == 2.0**9  # one step was skipped by all


def trained(folder: str, steps: int, saves: bool, loads: bool) -> list[float]:
    torch.manual_seed(0)
    model = torch.nn.Linear(8, 8).cuda()
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
    model, optimizer = hocket.distribute(model, optimizer, strategy="central")
    if loads:
        hocket.load(folder, model=model, optimizer=optimizer)
    for _ in range(steps):
        model(torch.full((4, 8), float(hocket.rank() + 1), device="cuda")).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
    if saves:
        hocket.save(folder, model=model, optimizer=optimizer).wait()
        hocket.barrier()
    return [float(p.detach().double().sum()) for p in model.parameters()]


def test_a_checkpoint_goes_on_where_it_was(pool: Pool, tmp_path: Path) -> None:
    whole = pool.run(2, trained, str(tmp_path), 8, False, False, share_gpus=True)
    pool.run(2, trained, str(tmp_path), 5, True, False, share_gpus=True)
    assert pool.run(2, trained, str(tmp_path), 3, False, True, share_gpus=True) == whole
