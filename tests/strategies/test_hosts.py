"""The same laws over several hosts: shared memory inside each, Gloo or TCP between them. Here, all are this machine."""

from typing import Any

import pytest
import torch
from pool import Pool
from products import product
from strategies.test_laws import MODELS, OPTIMIZERS, STRATEGIES
from strategies.training import Case, alone, assert_equal, together
from torch import nn

import hocket
from hocket.comm import communicator as comm_communicator
from hocket.comm.bucket_layout import Limits, bucket_limits
from hocket.errors import MismatchError
from hocket.job.worker import current

HOSTS = [(1, 1), (2, 1), (1, 2), (2, 2), (3, 1), (1, 1, 1), (2, 2, 1), (2, 3)]
ADAM: dict[str, Any] = {"optimizer": "Adam", "options": {"lr": 0.01}}


def in_small_buckets(case: Case, strategy: str) -> Any:
    """Training with many buckets, although the models are small."""
    original = comm_communicator.bucket_limits
    comm_communicator.bucket_limits = lambda _: Limits(64, 512)
    try:
        return together(case, strategy)
    finally:
        comm_communicator.bucket_limits = original


def check(
    pool: Pool, case: Case, hosts: tuple[int, ...], strategy: str, tolerance: float = 1e-9, **settings: Any
) -> None:
    expected = alone(case, sum(hosts))
    assert_equal(expected, pool.run(sum(hosts), in_small_buckets, case, strategy, hosts=hosts, **settings), tolerance)


@pytest.mark.few(8)
@pytest.mark.parametrize("strategy", STRATEGIES)
@pytest.mark.parametrize("hosts", HOSTS)
def test_any_hosts(pool: Pool, hosts: tuple[int, ...], strategy: str) -> None:
    check(pool, Case(**ADAM), hosts, strategy)


@pytest.mark.parametrize("hosts", [(1, 1), (2, 1)])
def test_over_gloo(pool: Pool, hosts: tuple[int, ...]) -> None:
    check(pool, Case(**ADAM), hosts, "mirrored", transport="gloo")


@pytest.mark.parametrize(("dtype", "tolerance"), [("float32", 1e-4), ("bfloat16", 0.1), ("float16", 0.05)])
def test_narrow_types_over_tcp(pool: Pool, dtype: str, tolerance: float) -> None:
    check(pool, Case(dtype=dtype), (2, 1), "mirrored", tolerance)


def test_encrypted(pool: Pool) -> None:
    check(pool, Case(**ADAM), (2, 1), "mirrored", tls="on")


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_one_bucket(pool: Pool, strategy: str) -> None:
    case = Case(**ADAM)
    assert_equal(alone(case, 3), pool.run(3, together, case, strategy, hosts=(2, 1)))


@pytest.mark.few(6)
@product("strategy", strategy=STRATEGIES, model=MODELS, hosts=[(1, 1), (2, 1)])
def test_every_model(pool: Pool, model: str, hosts: tuple[int, ...], strategy: str) -> None:
    check(pool, Case(model=model, **ADAM), hosts, strategy)


@pytest.mark.few(3)
@pytest.mark.parametrize("strategy", STRATEGIES)
@pytest.mark.parametrize("name", ["momentum", "fused adam", "adafactor"])
def test_optimizers(pool: Pool, name: str, strategy: str) -> None:
    optimizer, options = OPTIMIZERS[name]
    check(pool, Case(optimizer=optimizer, options=options, groups=True), (2, 2), strategy)


@pytest.mark.few(2)
@pytest.mark.parametrize("strategy", STRATEGIES[:2])
@pytest.mark.parametrize("hosts", [(1, 1), (2, 1)])
def test_clipping_sees_the_average(pool: Pool, hosts: tuple[int, ...], strategy: str) -> None:
    check(pool, Case(clip=0.05, **ADAM), hosts, strategy)


@pytest.mark.few(2)
@product("strategy", strategy=STRATEGIES, hosts=[(1, 1), (2, 1)], zero=[False, True])
def test_accumulated_batches_add_up(pool: Pool, zero: bool, hosts: tuple[int, ...], strategy: str) -> None:
    check(pool, Case(accumulate=3, samples=50, zero=zero), hosts, strategy)


@pytest.mark.few(3)
@pytest.mark.parametrize("strategy", STRATEGIES)
@pytest.mark.parametrize(("dtype", "tolerance"), [("float32", 1e-4), ("bfloat16", 0.1), ("float16", 0.05)])
def test_narrow_types(pool: Pool, dtype: str, tolerance: float, strategy: str) -> None:
    check(pool, Case(dtype=dtype), (2, 1), strategy, tolerance)


@pytest.mark.few(1)
@pytest.mark.parametrize("strategy", STRATEGIES[:2])
def test_compiled_model(pool: Pool, strategy: str) -> None:
    check(pool, Case(model="tied", compile=True), (2, 1), strategy)


def unfreeze(strategy: str, only: int | None) -> Any:
    """Steps in which a layer, frozen at first, is unfrozen after the second one, on all ranks or on one only."""
    torch.manual_seed(0)
    model = nn.Sequential(*(nn.Linear(20, 20) for _ in range(4))).double()
    model[1].requires_grad_(False)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    comm_communicator.bucket_limits = lambda _: Limits(64, 4096)
    try:
        hocket.distribute(model, optimizer, strategy=strategy)
        x = torch.randn(12, 20, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
        for step in range(6):
            if step == 2 and only in (None, hocket.rank()):
                model[1].requires_grad_(True)
            (model(x.chunk(hocket.size())[hocket.rank()]) ** 2).mean().backward()
            optimizer.step()
            optimizer.zero_grad()
    finally:
        comm_communicator.bucket_limits = bucket_limits
    return [p.detach().clone() for p in model.parameters()]


@pytest.mark.few(4)
@pytest.mark.parametrize("strategy", STRATEGIES)
@pytest.mark.parametrize("hosts", [(1, 1), (2, 1), (2, 2)])
def test_unfrozen_parameters_join(pool: Pool, hosts: tuple[int, ...], strategy: str) -> None:
    (one,) = pool.run(1, unfreeze, strategy, None)
    for many in pool.run(sum(hosts), unfreeze, strategy, None, hosts=hosts):
        assert all(torch.allclose(a, b, rtol=1e-9, atol=1e-9) for a, b in zip(one, many, strict=True))


@pytest.mark.parametrize("transport", ["auto", "gloo"])
def test_what_one_rank_unfreezes_alone_is_found(pool: Pool, transport: str) -> None:
    outcomes = pool.outcomes(2, unfreeze, "mirrored", 1, hosts=(1, 1), transport=transport)
    assert {outcome.kind for outcome in outcomes} == {"MismatchError"}
    assert all("unfreezing" in outcome.message for outcome in outcomes)
    if transport == "gloo":
        pool.close()  # what Gloo still has under way goes with the process


def spoil_once(on_nan: str) -> list[float]:
    """One step with a NaN among good ones; how much each step changes the parameters."""
    torch.manual_seed(0)
    model = nn.Sequential(*(nn.Linear(20, 20) for _ in range(4)))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    comm_communicator.bucket_limits = lambda _: Limits(64, 4096)
    try:
        hocket.distribute(model, optimizer, on_nan=on_nan)
        changes = []
        for step in range(6):
            before = model[0].weight.detach().clone()
            x = torch.full((2, 20), float("nan") if step == 3 and hocket.rank() else 1.0)
            (model(x) ** 2).mean().backward()
            optimizer.step()
            optimizer.zero_grad()
            changes.append(float((model[0].weight - before).abs().max()))
    finally:
        comm_communicator.bucket_limits = bucket_limits
    return changes


@pytest.mark.parametrize("hosts", [(1, 1), (2, 1)])
def test_a_nan_costs_one_step(pool: Pool, hosts: tuple[int, ...]) -> None:
    for changes in pool.run(sum(hosts), spoil_once, "skip", hosts=hosts):
        assert [change > 0 for change in changes] == [True, True, True, False, True, True]


def twice(strategy: str) -> Any:
    """Two backward passes before a step, without anything between them."""
    torch.manual_seed(0)
    model = nn.Linear(5, 1).double()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    hocket.distribute(model, optimizer, strategy=strategy)
    x = torch.randn(12, 5, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    for _ in range(2):
        for _ in range(2):
            (model(x.chunk(hocket.size())[hocket.rank()]) ** 2).mean().backward()
        optimizer.step()
        optimizer.zero_grad()
    return [p.detach().clone() for p in model.parameters()]


@pytest.mark.few(3)
@pytest.mark.parametrize("strategy", STRATEGIES)
@pytest.mark.parametrize("hosts", [(1, 1), (1, 2), (2, 2)])
def test_two_backward_passes_add_up(pool: Pool, hosts: tuple[int, ...], strategy: str) -> None:
    (one,) = pool.run(1, twice, strategy)
    for many in pool.run(sum(hosts), twice, strategy, hosts=hosts):
        assert all(torch.allclose(a, b, rtol=1e-9, atol=1e-9) for a, b in zip(one, many, strict=True))


def differ_and_go_on() -> list[float]:
    """A step in which learning rates differ, caught; then steps in which they do not."""
    model = nn.Linear(5, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    hocket.distribute(model, optimizer)
    optimizer.param_groups[0]["lr"] = 0.1 + hocket.rank()
    with pytest.raises(MismatchError, match=r"learning rate 0\.1.*learning rate 1\.1"):
        model(torch.ones(2, 5)).sum().backward()
    optimizer.param_groups[0]["lr"] = 0.1
    optimizer.zero_grad()
    for scale in (1.0, 3.0):
        model(torch.full((2, 5), scale)).sum().backward()
        optimizer.step()
        optimizer.zero_grad()
    return [float(p.detach().double().sum()) for p in model.parameters()]


@pytest.mark.few(2)
@pytest.mark.parametrize("transport", ["auto", "gloo"])
@pytest.mark.parametrize("hosts", [(1, 1), (2, 2)])
def test_after_a_mismatch_one_may_go_on(pool: Pool, hosts: tuple[int, ...], transport: str) -> None:
    results = pool.run(sum(hosts), differ_and_go_on, hosts=hosts, transport=transport)
    assert all(result == results[0] for result in results)


def sent_early() -> int:
    """How many buckets of a model whose first layers are frozen are under way before backward is over."""
    model = nn.Sequential(*(nn.Linear(20, 20) for _ in range(6)))
    model[:3].requires_grad_(False)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    comm_communicator.bucket_limits = lambda _: Limits(64, 512)
    try:
        hocket.distribute(model, optimizer)
        early: list[int] = []
        for _ in range(3):
            loss = model(torch.ones(2, 20)).sum()
            (strategy,) = current().training.strategies
            algorithm = strategy.collector._exchange._turns[0].algorithm
            model[3].weight.register_post_accumulate_grad_hook(lambda _, a=algorithm: early.append(a._next))
            loss.backward()
            optimizer.zero_grad()
    finally:
        comm_communicator.bucket_limits = bucket_limits
    return early[-1]


@pytest.mark.parametrize("hosts", [(1, 1), (2, 1)])
def test_what_is_frozen_holds_up_nobody(pool: Pool, hosts: tuple[int, ...]) -> None:
    assert min(pool.run(sum(hosts), sent_early, hosts=hosts)) > 3
