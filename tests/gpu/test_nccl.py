"""Every strategy that trains on GPUs, with 2 to 4 ranks over NCCL, which share one GPU (``--share-gpus``)."""

import dataclasses
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from pool import Pool, RemoteError
from strategies.training import Case, alone, assert_equal, make, together, with_mean_state
from torch import nn

import hocket
from hocket.capture.bucket_order import Readiness
from hocket.comm import communicator as comm_communicator
from hocket.comm.algorithms.gpu_reductions import Nccl
from hocket.comm.bucket_layout import Limits
from hocket.job.worker import current
from hocket.strategies import averaged_gradients

pytestmark = [pytest.mark.skipif(not torch.cuda.is_available(), reason="there is no GPU here"), pytest.mark.keeps_ports]

ADAM = Case(optimizer="Adam", options={"lr": 0.01}, device="cuda")
MOMENTUM = Case(options={"lr": 0.02, "momentum": 0.9, "nesterov": True, "weight_decay": 0.01}, clip=0.05, device="cuda")
SGD = Case(options={"lr": 0.05}, samples=48, device="cuda")
MODELS = ["mlp", "tied", "sometimes", "channels_last", "checkpointed", "checkpointed reentrant"]


@pytest.fixture(scope="module", autouse=True)
def ended(pool: Pool) -> Iterator[None]:
    yield
    pool.close()  # NCCL keeps a port open for as long as a process lives


def shared(pool: Pool, size: int, function: Any, *args: Any, **settings: Any) -> list[Any]:
    return pool.run(size, function, *args, share_gpus=True, **settings)


def in_buckets(case: Case, strategy: str = "mirrored") -> Any:
    """With buckets so small that several travel in every step, also after their number has been measured."""
    before = comm_communicator.bucket_limits, averaged_gradients.limits_by_cost
    comm_communicator.bucket_limits = lambda _: Limits(64, 512)
    averaged_gradients.limits_by_cost = lambda *_: Limits(128, 1024)
    try:
        result = together(case, strategy)
    finally:
        comm_communicator.bucket_limits, averaged_gradients.limits_by_cost = before
    strategies = current().training.strategies
    engines = [part._exchange._engine for part in strategies if hasattr(part, "_exchange")]
    assert all(isinstance(turn.algorithm, Nccl) for engine in engines for turn in engine._turns), "not over NCCL"
    return result


@pytest.mark.parametrize("size", [2, 3, 4])
@pytest.mark.parametrize("case", [ADAM, MOMENTUM], ids=["adam", "momentum with clipping"])
def test_many_workers_are_one(pool: Pool, case: Case, size: int) -> None:
    assert_equal(alone(case, size), shared(pool, size, in_buckets, case))


@pytest.mark.parametrize("model", MODELS)
def test_every_model(pool: Pool, model: str) -> None:
    case = dataclasses.replace(ADAM, model=model)
    assert_equal(alone(case, 2), shared(pool, 2, in_buckets, case))


@pytest.mark.parametrize(
    "change",
    [
        {"accumulate": 3, "samples": 50}, {"zero": True}, {"groups": True}, {"schedule": True},
        {"compile": True}, {"compile": True, "model": "tied"},
    ],
    ids=str,
)  # fmt: skip
def test_scripts_of_all_kinds(pool: Pool, change: dict[str, Any]) -> None:
    case = dataclasses.replace(ADAM, **change)
    assert_equal(alone(case, 2), shared(pool, 2, in_buckets, case))


@pytest.mark.parametrize(("dtype", "tolerance"), [("float32", 1e-3), ("bfloat16", 0.1)])
def test_narrow_types(pool: Pool, dtype: str, tolerance: float) -> None:
    case = dataclasses.replace(ADAM, dtype=dtype)
    assert_equal(alone(case, 2), shared(pool, 2, in_buckets, case), tolerance)


@pytest.mark.parametrize("size", [2, 3])
@pytest.mark.parametrize(
    "strategy",
    [
        "local_sgd(period=1, optimizer_state=True)",
        "local_sgd(time=1e-9)",
        "diloco(period=1, outer_lr=1.0, outer_momentum=0.0)",
        "mirrored -> local_sgd(period=1) @ step 3",
    ],
)
def test_averages_after_every_batch_are_one_process(pool: Pool, strategy: str, size: int) -> None:
    case = dataclasses.replace(SGD, samples=24 * size)
    assert_equal(alone(case, size), with_mean_state(shared(pool, size, together, case, strategy)))


def test_dmb_without_predictions_is_mirrored(pool: Pool) -> None:
    assert_equal(alone(SGD, 2), shared(pool, 2, together, SGD, "dmb(extra=0)"))


def delayed_law(case: Case) -> list[torch.Tensor]:
    """The gradient of each batch is applied one step late, and the last one at the end."""
    model, optimizer, loader = make(case, 2)
    late: list[torch.Tensor] | None = None

    def apply() -> None:
        for parameter, gradient in zip(model.parameters(), late or [], strict=False):
            parameter.grad = gradient
        if late is not None:
            optimizer.step()

    for _ in range(case.epochs):
        for x, y in loader:
            optimizer.zero_grad()
            ((model(x.to(case.device)) - y.to(case.device)) ** 2).mean().backward()
            fresh = [p.grad.clone() for p in model.parameters() if p.grad is not None]
            apply()
            late = fresh
    apply()
    return [p.detach().cpu() for p in model.parameters()]


def test_delayed_applies_every_gradient_one_step_late(pool: Pool) -> None:
    case = dataclasses.replace(SGD, epochs=1)
    for result in shared(pool, 2, together, case, "delayed"):
        for mine, theirs in zip(delayed_law(case), result["parameters"], strict=True):
            assert torch.allclose(mine, theirs, rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize("model", ["mlp", "tied", "sometimes"])
def test_bulk_synchronous_is_one_process(pool: Pool, model: str) -> None:
    case = dataclasses.replace(ADAM, model=model)
    assert_equal(alone(case, 3), shared(pool, 3, together, case, "bsp", servers=1))


def test_gossip_with_everybody_is_one_process(pool: Pool) -> None:
    many = shared(pool, 2, together, SGD, "gossip(topology='complete')", coordinated=True)
    assert_equal(alone(SGD, 2), with_mean_state(many))


def train(strategy: str) -> tuple[float, float]:
    """The loss at the beginning, and after some passes."""
    model, optimizer, loader = hocket.distribute(*make(SGD, 1), strategy=strategy)
    losses = []
    for _ in range(6):
        total = 0.0
        for x, y in loader:
            loss = ((model(x.cuda()) - y.cuda()) ** 2).mean()
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            total += float(loss)
        losses.append(hocket.mean(total / max(len(loader), 1)))
    return losses[0], losses[-1]


@pytest.mark.parametrize(
    ("strategy", "more"),
    [
        ("delayed", {}),
        ("dmb(extra=1)", {}),
        ("diloco(period=4, fragments=2, outer_lr=1.0, outer_momentum=0.5)", {}),
        ("easgd(period=2, alpha=0.3)", {}),
        ("easgd(period=2, alpha=0.3)", {"servers": 1}),
        ("asynchronous", {"servers": 1}),
        ("gossip(topology='pairs', asynchronous=True)", {"coordinated": True}),
        ("gossip(topology='ring', push_sum=True)", {"coordinated": True}),
    ],
)
def test_it_learns(pool: Pool, strategy: str, more: dict[str, Any]) -> None:
    for first, last in shared(pool, 3, train, strategy, **more):
        assert last < first


def scaled(spoils: bool) -> tuple[list[float], float]:
    """Mixed precision with a GradScaler; in one step, one rank has an infinity."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(6, 64), nn.ReLU(), nn.Linear(64, 1)).cuda()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    model, optimizer = hocket.distribute(model, optimizer)
    scaler = torch.amp.GradScaler(init_scale=1024.0)
    random = torch.Generator().manual_seed(hocket.rank())
    losses = []
    for step in range(20):
        x = torch.randn(32, 6, generator=random).cuda()
        with torch.autocast("cuda", dtype=torch.float16):
            loss = ((model(x) - x.sum(1, keepdim=True)) ** 2).mean()
        optimizer.zero_grad()
        if spoils and step == 7 and hocket.rank() == 1:
            loss = loss * float("inf")
        scaler.scale(loss).backward()
        scaler.unscale_(optimizer)
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        scaler.step(optimizer)
        scaler.update()
        losses.append(float(loss))
    assert losses[-1] < losses[0]
    return [float(p.detach().double().sum()) for p in model.parameters()], scaler.get_scale()


@pytest.mark.parametrize("spoils", [False, True])
def test_mixed_precision(pool: Pool, spoils: bool) -> None:
    first, second = shared(pool, 2, scaled, spoils)
    assert first == second
    assert first[1] == (512.0 if spoils else 1024.0)


def automatic(size: int) -> list[torch.Tensor]:
    """bf16 autocast; ``size`` is how many batches of 16 make a step."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(6, 64), nn.ReLU(), nn.Linear(64, 1)).cuda()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    if size == 1:
        model, optimizer = hocket.distribute(model, optimizer)
    random = torch.Generator().manual_seed(3)
    for _ in range(10):
        x = torch.randn(2 * 16, 6, generator=random).cuda()
        mine = x if size == 2 else x.chunk(2)[hocket.rank()]
        with torch.autocast("cuda", dtype=torch.bfloat16):
            loss = ((model(mine).float() - mine.sum(1, keepdim=True)) ** 2).mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    return [p.detach().cpu() for p in model.parameters()]


def test_automatic_precision(pool: Pool) -> None:
    one, (first, second) = automatic(2), shared(pool, 2, automatic, 1)
    for plain, mine, theirs in zip(one, first, second, strict=True):
        assert torch.equal(mine, theirs)
        assert torch.allclose(plain, mine, rtol=0.02, atol=0.02)


def two_models(factor: int) -> list[torch.Tensor]:
    """Two models in one loss, which train with an optimizer each; factor 2 is one process with both batches."""
    torch.manual_seed(0)
    models = [nn.Linear(6, 300, dtype=torch.float64, device="cuda") for _ in range(2)]
    optimizers = [torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9) for model in models]
    if factor == 1:
        for model, optimizer in zip(models, optimizers, strict=True):
            hocket.distribute(model, optimizer)
    random = torch.Generator().manual_seed(3)
    for _ in range(6):
        x = torch.randn(8, 6, generator=random, dtype=torch.float64).cuda()
        mine = x if factor == 2 else x.chunk(2)[hocket.rank()]
        ((models[0](mine) - models[1](mine).sin()) ** 2).mean().backward()
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
    return [p.detach().cpu() for model in models for p in model.parameters()]


def test_two_models(pool: Pool) -> None:
    one = two_models(2)
    for many in shared(pool, 2, two_models, 1):
        for plain, mine in zip(one, many, strict=True):
            assert torch.allclose(plain, mine, rtol=1e-9, atol=1e-9)


def dropped_out(folder: str, steps: int, saves: bool, loads: bool) -> list[float]:
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


def test_a_checkpoint_goes_on_where_it_was(pool: Pool, tmp_path: Path) -> None:
    def run(steps: int, saves: bool, loads: bool) -> Any:
        return shared(pool, 2, dropped_out, str(tmp_path), steps, saves, loads)

    whole = run(8, saves=False, loads=False)
    run(5, saves=True, loads=False)
    assert run(3, saves=False, loads=True) == whole


def spoil(on_nan: str) -> None:
    model = nn.Linear(3, 1, device="cuda")
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    hocket.distribute(model, optimizer, on_nan=on_nan)
    before = model.weight.detach().clone()
    x = torch.full((2, 3), float("nan") if hocket.rank() else 1.0, device="cuda")
    model(x).sum().backward()
    optimizer.step()
    assert torch.equal(before, model.weight)


def test_nan_is_found_where_it_is_asked_for(pool: Pool) -> None:
    shared(pool, 2, spoil, "skip")
    for outcome in pool.outcomes(2, spoil, "raise", share_gpus=True):
        assert isinstance(outcome, RemoteError) and "rank 1: " in outcome.message


def all_the_data(workers: int, optimizer: str, options: dict[str, Any]) -> list[torch.Tensor]:
    """Three steps over 43 samples; ``workers`` 0 is one plain process."""
    case = Case(optimizer=optimizer, options=options, samples=43, device="cuda")
    model, chosen, loader = make(case, max(workers, 1))
    if workers:
        model, chosen, loader = hocket.distribute(model, chosen, loader, strategy="full_batch")
    else:
        loader = torch.utils.data.DataLoader(loader.dataset, case.samples)

    def closure() -> torch.Tensor:
        chosen.zero_grad()
        total = torch.zeros((), dtype=torch.float64, device="cuda")
        for x, y in loader:
            loss = ((model(x.cuda()) - y.cuda()) ** 2).mean() / len(loader)
            loss.backward()
            total += loss.detach()
        return total

    for _ in range(3):
        chosen.step(closure)
    return [p.detach().cpu() for p in model.parameters()]


@pytest.mark.parametrize("size", [2, 3])
@pytest.mark.parametrize(
    ("optimizer", "options"),
    [("SGD", {"lr": 0.1}), ("LBFGS", {"max_iter": 4, "history_size": 3, "line_search_fn": "strong_wolfe"})],
)
def test_full_batches_are_all_the_data(pool: Pool, optimizer: str, options: dict[str, Any], size: int) -> None:
    plain = all_the_data(0, optimizer, options)
    for mine in shared(pool, size, all_the_data, 1, optimizer, options):
        for expected, parameter in zip(plain, mine, strict=True):
            assert torch.allclose(expected, parameter, rtol=1e-7, atol=1e-9)


def normalized(workers: int) -> list[torch.Tensor]:
    """Batch norm over the batch of all workers; ``workers`` 0 is one plain process with whole batches of 8."""
    torch.manual_seed(0)
    layers = [nn.Linear(4, 8), nn.BatchNorm1d(8), nn.Tanh(), nn.Linear(8, 1)]
    model = nn.Sequential(*layers).double().cuda()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    random = torch.Generator().manual_seed(1)
    x = torch.randn(44, 4, generator=random, dtype=torch.float64)
    data = torch.utils.data.TensorDataset(x, x.sum(1, keepdim=True).sin())
    loader: Any = torch.utils.data.DataLoader(data, 8 // max(workers, 1))
    if workers:
        hocket.sync_batchnorm(model)
        model, optimizer, loader = hocket.distribute(model, optimizer, loader)
    for _ in range(2):
        for inputs, targets in loader:
            ((model(inputs.cuda()) - targets.cuda()) ** 2).mean().backward()
            optimizer.step()
            optimizer.zero_grad()
    return [each.detach().double().cpu() for each in model.state_dict().values()]


@pytest.mark.parametrize("size", [2, 4])
def test_batch_norm_is_over_all_workers(pool: Pool, size: int) -> None:
    plain = normalized(0)
    for mine in shared(pool, size, normalized, size):
        for expected, each in zip(plain, mine, strict=True):
            assert torch.allclose(expected, each, rtol=1e-9, atol=1e-9)


def by_hand() -> list[float]:
    mine = torch.full((1000,), float(hocket.rank()), device="cuda")
    return [
        float(result.double().mean())
        for result in (hocket.allreduce(mine), hocket.allgather(mine), hocket.broadcast(mine.clone(), root=1))
    ]


def test_collectives_by_hand(pool: Pool) -> None:
    assert shared(pool, 2, by_hand) == [[0.5, 0.5, 1.0]] * 2


def in_groups() -> list[list[float]]:
    rank = hocket.rank()
    mine = torch.arange(6.0, device="cuda").view(3, 2) + 10 * rank
    rows = hocket.allgather_rows(mine[: rank + 1])
    part = hocket.reduce_scatter(mine, "sum", rows=[2, 0, 1])
    parts, counts = hocket.alltoall(mine, [1, 1, 1])
    handle = hocket.allreduce(mine, "max", wait=False)
    pair = hocket.allreduce(mine, "sum", group=hocket.group([0, 2])) if rank != 1 else mine
    result = handle.wait(30)
    assert all(each.is_cuda for each in (rows, part, parts, result, pair)) and counts == [1, 1, 1]
    if rank == 0:
        hocket.send(mine, 2)
    elif rank == 2:
        assert torch.equal(hocket.receive(0, out=torch.empty_like(mine)), mine - 20)
    return [each.flatten().tolist() for each in (rows, part, parts, result, pair)]


def test_collectives_in_groups(pool: Pool) -> None:
    base = torch.arange(6.0).view(3, 2)
    rows = [value for rank in range(3) for value in (base[: rank + 1] + 10 * rank).flatten().tolist()]
    summed = (3 * base + 30).tolist()
    for rank, found in enumerate(shared(pool, 3, in_groups)):
        mine = base + 10 * rank
        assert found[0] == rows
        assert found[1] == [v for row in (summed[:2], [], summed[2:])[rank] for v in row]
        assert found[2] == [v for other in range(3) for v in (base[rank] + 10 * other).tolist()]
        assert found[3] == (base + 20).flatten().tolist()
        assert found[4] == (mine if rank == 1 else 2 * base + 20).flatten().tolist()


def measured() -> tuple[int, int, float, float]:
    """How many buckets there are at first, and after costs were measured; how long a pass took; a sum of weights."""
    seen: list[float] = []
    seconds = Readiness.seconds
    Readiness.seconds = property(lambda self: seen.append(seconds.fget(self)) or seen[-1])  # type: ignore
    layers = [nn.Linear(1024, 1024, device="cuda") for _ in range(8)]  # 32 MB
    model = nn.Sequential(*layers)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    model, optimizer = hocket.distribute(model, optimizer)
    exchange = current().training.strategies[-1]._exchange  # type: ignore[attr-defined]
    before = len(exchange._engine.layout.buckets)
    for _ in range(6):
        model(torch.ones(64, 1024, device="cuda")).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
    assert exchange.collector.readiness is None or exchange.collector.readiness.is_early
    Readiness.seconds = seconds  # type: ignore[method-assign]
    total = float(sum(p.double().sum() for p in layers[0].parameters()))
    return before, len(exchange._engine.layout.buckets), seen[0], total


def test_the_number_of_buckets_is_measured(pool: Pool) -> None:
    first, second = shared(pool, 2, measured)
    assert first[0] == second[0] > 1
    assert first[1] == second[1] >= 1
    assert 0 < first[2] < 1
    assert first[3] == second[3]


SCRIPT = """
import os, time, torch, hocket
hocket.init()
torch.manual_seed(0)
model = torch.nn.Sequential(*(torch.nn.Linear(512, 512) for _ in range(6))).cuda()
optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
model, optimizer = hocket.distribute(model, optimizer)
for step in range(100000):
    loss = model(torch.ones(16, 512, device="cuda")).square().mean()
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    if step % 10 == 0:
        float(loss)
    if step == 20:
        print("running", os.getpid(), hocket.rank(), flush=True)
"""


def test_the_others_end_when_one_is_killed(tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text(SCRIPT)
    command = [sys.executable, "-m", "hocket", "run", "-n", "3", "--share-gpus", "--on-loss", "end", "train.py"]
    # An MPS of its own: a process that is killed while it computes takes all others of its MPS along.
    env = {**os.environ, "CUDA_MPS_PIPE_DIRECTORY": str(tmp_path / "none")}
    job = subprocess.Popen(command, cwd=tmp_path, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, env=env)
    assert job.stdout is not None
    try:
        found: dict[int, int] = {}
        said = ""
        while len(found) < 3:
            line = job.stdout.readline()
            assert line, said
            said += line
            if match := re.search(r"running (\d+) (\d+)", line):
                found[int(match[2])] = int(match[1])
        os.kill(found[1], signal.SIGKILL)
        begin = time.monotonic()
        said += job.stdout.read()
        assert job.wait(60) != 0
        assert time.monotonic() - begin < 20, "a fault deadline: the others waited for the dead one"
        assert "rank 1" in said and "SIGKILL" in said, said
    finally:
        job.kill()
        job.wait()
    assert not [pid for pid in found.values() if Path(f"/proc/{pid}").exists()]
