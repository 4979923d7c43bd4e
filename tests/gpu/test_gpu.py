"""The laws on a GPU with several workers that meet through the CPU's memory; test_nccl.py has those over NCCL."""

import contextlib
import dataclasses
import io
from pathlib import Path
from typing import Any

import pytest
import torch
from pool import Pool, RemoteError
from strategies.training import Case, alone, assert_equal, together
from torch import nn

import hocket
from hocket.comm import communicator as comm_communicator
from hocket.comm.bucket_layout import Limits

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="there is no GPU here")

CASE = Case(optimizer="Adam", options={"lr": 0.01}, device="cuda")
THROUGH_CPU = {"transport": "shared-memory"}
MODELS = ["mlp", "tied", "sometimes", "channels_last", "checkpointed", "checkpointed reentrant"]


def in_buckets(case: Case) -> Any:
    comm_communicator.bucket_limits = lambda _: Limits(64, 512)
    return together(case, "mirrored")


@pytest.mark.parametrize("model", MODELS)
@pytest.mark.parametrize("hosts", [None, (1, 1), (2, 1)])
def test_workers_that_share_a_gpu_are_one(pool: Pool, hosts: tuple[int, ...] | None, model: str) -> None:
    case = dataclasses.replace(CASE, model=model)
    size = sum(hosts or (2,))
    assert_equal(alone(case, size), pool.run(size, in_buckets, case, hosts=hosts, **THROUGH_CPU))


@pytest.mark.parametrize("change", [{"clip": 0.05}, {"accumulate": 3, "samples": 50}, {"zero": True}, {"groups": True}])
def test_scripts_of_all_kinds(pool: Pool, change: dict[str, Any]) -> None:
    case = dataclasses.replace(CASE, **change)
    assert_equal(alone(case, 2), pool.run(2, in_buckets, case, **THROUGH_CPU))


@pytest.mark.parametrize(("dtype", "tolerance"), [("float32", 1e-3), ("bfloat16", 0.1)])
def test_narrow_types(pool: Pool, dtype: str, tolerance: float) -> None:
    case = dataclasses.replace(CASE, dtype=dtype)
    assert_equal(alone(case, 2), pool.run(2, in_buckets, case, **THROUGH_CPU), tolerance)


def test_more_workers_than_gpus_are_refused(pool: Pool) -> None:
    for outcome in pool.outcomes(torch.cuda.device_count() + 1, together, CASE, "mirrored"):
        assert isinstance(outcome, RemoteError) and outcome.kind == "UsageError"
        assert "one worker per GPU" in outcome.message and "--transport shared-memory" in outcome.message


def summed(reduction: str) -> str:
    model = nn.Linear(3, 3, device="cuda")
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    hocket.distribute(model, optimizer)
    with contextlib.redirect_stderr(io.StringIO()) as said:
        for _ in range(2):
            optimizer.zero_grad()
            x = torch.ones(4, 3, device="cuda")
            nn.functional.mse_loss(model(x), x, reduction=reduction).backward()
            optimizer.step()
    return said.getvalue()


@pytest.mark.parametrize("reduction", ["sum", "mean"])
def test_a_loss_that_is_a_sum_is_seen_from_autograds_own_thread(pool: Pool, reduction: str) -> None:
    first, second = pool.run(2, summed, reduction, **THROUGH_CPU)
    assert ("(MseLoss with reduction='sum')" in first) == (reduction == "sum") and second == ""


def some_on_cpu() -> None:
    model = nn.Linear(3, 3, device="cuda" if hocket.rank() else "cpu")
    hocket.distribute(model, torch.optim.SGD(model.parameters(), lr=0.1))


def test_a_model_that_is_on_a_gpu_here_only_is_refused(pool: Pool) -> None:
    for outcome in pool.outcomes(2, some_on_cpu, **THROUGH_CPU):
        assert isinstance(outcome, RemoteError) and "on the CPU on rank 0" in outcome.message


def by_hand() -> list[Any]:
    mine = torch.full((1000,), float(hocket.rank()), device="cuda")
    small = torch.tensor(float(hocket.rank()), device="cuda")
    results = [
        hocket.allreduce(mine), hocket.allgather(mine), hocket.broadcast(mine.clone(), root=1),
        torch.tensor(hocket.mean(small)), hocket.allreduce(mine, out=mine),
    ]  # fmt: skip
    assert all(result.is_cuda for result in results[:3])
    return [float(result.double().mean()) for result in results]


@pytest.mark.parametrize("hosts", [None, (1, 1)])
def test_collectives_by_hand(pool: Pool, hosts: tuple[int, ...] | None) -> None:
    assert pool.run(2, by_hand, hosts=hosts) == [[0.5, 0.5, 1.0, 0.5, 0.5]] * 2


def spoil(on_nan: str) -> tuple[list[float], int]:
    model = nn.Linear(3, 1, device="cuda")
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    hocket.distribute(model, optimizer, on_nan=on_nan)
    before = model.weight.detach().clone()
    x = torch.full((2, 3), float("nan") if hocket.rank() else 1.0, device="cuda")
    model(x).sum().backward()
    optimizer.step()
    assert torch.equal(before, model.weight)
    return model.weight.tolist(), hocket.rank()


def test_nan_is_found_where_it_is_asked_for(pool: Pool) -> None:
    assert len(pool.run(2, spoil, "skip", **THROUGH_CPU)) == 2
    for outcome in pool.outcomes(2, spoil, "raise", **THROUGH_CPU):
        assert isinstance(outcome, RemoteError) and "rank 1: " in outcome.message


def scaled() -> list[float]:
    """Mixed precision with a GradScaler, as scripts for GPUs have it."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(6, 64), nn.ReLU(), nn.Linear(64, 1)).cuda()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    model, optimizer = hocket.distribute(model, optimizer)
    scaler = torch.amp.GradScaler()
    random = torch.Generator().manual_seed(hocket.rank())
    losses = []
    for _ in range(20):
        x = torch.randn(32, 6, generator=random).cuda()
        with torch.autocast("cuda", dtype=torch.float16):
            loss = ((model(x) - x.sum(1, keepdim=True)) ** 2).mean()
        optimizer.zero_grad()
        scaler.scale(loss).backward()
        scaler.unscale_(optimizer)
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        scaler.step(optimizer)
        scaler.update()
        losses.append(float(loss))
    assert losses[-1] < losses[0]
    return [float(p.detach().double().sum()) for p in model.parameters()]


def test_mixed_precision(pool: Pool) -> None:
    first, second = pool.run(2, scaled, **THROUGH_CPU)
    assert first == second


def normalised() -> list[float]:
    torch.manual_seed(0)
    model = hocket.sync_batchnorm(nn.Sequential(nn.Linear(6, 8), nn.BatchNorm1d(8), nn.Linear(8, 1))).cuda()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    model, optimizer = hocket.distribute(model, optimizer)
    x = torch.randn(8, 6, generator=torch.Generator().manual_seed(3)).cuda()
    mine = x.chunk(hocket.size())[hocket.rank()]
    for _ in range(4):
        (model(mine) ** 2).mean().backward()
        optimizer.step()
        optimizer.zero_grad()
    return [float(p.detach().double().sum()) for p in [*model.parameters(), *model.buffers()]]


def test_sync_batchnorm(pool: Pool) -> None:
    (one,) = pool.run(1, normalised)
    for many in pool.run(2, normalised, **THROUGH_CPU):
        assert many == pytest.approx(one, abs=1e-4)


def train(folder: str, steps: int, saves: bool, loads: bool) -> list[float]:
    """Some steps with dropout, whose random numbers are the GPU's; a checkpoint after the last or before the first."""
    torch.manual_seed(hocket.rank())
    model = nn.Sequential(nn.Linear(6, 16), nn.Dropout(0.5), nn.Linear(16, 1)).cuda()
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
    model, optimizer = hocket.distribute(model, optimizer)
    if loads:
        hocket.load(folder, model=model, optimizer=optimizer)
    for _ in range(steps):
        (model(torch.ones(4, 6, device="cuda")) ** 2).mean().backward()
        optimizer.step()
        optimizer.zero_grad()
    if saves:
        hocket.save(folder, model=model, optimizer=optimizer).wait()
        hocket.barrier()
    return [float(p.detach().double().sum()) for p in model.parameters()]


@pytest.mark.parametrize("hosts", [None, (1, 1)])
def test_a_checkpoint_goes_on_where_it_was(pool: Pool, tmp_path: Path, hosts: tuple[int, ...] | None) -> None:
    def run(steps: int, saves: bool, loads: bool) -> Any:
        return pool.run(2, train, str(tmp_path), steps, saves, loads, hosts=hosts, **THROUGH_CPU)

    whole = run(8, saves=False, loads=False)
    run(5, saves=True, loads=False)
    assert run(3, saves=False, loads=True) == whole
