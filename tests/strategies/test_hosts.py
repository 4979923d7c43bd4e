"""The same laws over several hosts: shared memory inside each, Gloo between them. Here, all hosts are this machine."""

from typing import Any

import pytest
from pool import Pool
from strategies.test_laws import MODELS, OPTIMIZERS, STRATEGIES
from strategies.training import Case, alone, assert_equal, together

from hocket.comm import gpu
from hocket.comm import hosts as comm_hosts
from hocket.comm.layout import Limits

HOSTS = [(1, 1), (2, 1), (1, 2), (2, 2), (3, 1), (1, 1, 1), (2, 2, 1), (2, 3)]
ADAM: dict[str, Any] = {"optimizer": "Adam", "options": {"lr": 0.01}}


def in_small_buckets(case: Case, strategy: str) -> Any:
    """Training with many buckets, although the models are small."""
    original = comm_hosts.bucket_limits
    comm_hosts.bucket_limits = gpu.bucket_limits = lambda _: Limits(64, 512)
    try:
        return together(case, strategy)
    finally:
        comm_hosts.bucket_limits = gpu.bucket_limits = original


def check(pool: Pool, case: Case, hosts: tuple[int, ...], strategy: str, tolerance: float = 1e-9) -> None:
    expected = alone(case, sum(hosts))
    assert_equal(expected, pool.run(sum(hosts), in_small_buckets, case, strategy, hosts=hosts), tolerance)


@pytest.mark.parametrize("strategy", STRATEGIES)
@pytest.mark.parametrize("hosts", HOSTS)
def test_any_hosts(pool: Pool, hosts: tuple[int, ...], strategy: str) -> None:
    check(pool, Case(**ADAM), hosts, strategy)


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_one_bucket(pool: Pool, strategy: str) -> None:
    case = Case(**ADAM)
    assert_equal(alone(case, 3), pool.run(3, together, case, strategy, hosts=(2, 1)))


@pytest.mark.parametrize("strategy", STRATEGIES)
@pytest.mark.parametrize("hosts", [(1, 1), (2, 1)])
@pytest.mark.parametrize("model", MODELS)
def test_every_model(pool: Pool, model: str, hosts: tuple[int, ...], strategy: str) -> None:
    check(pool, Case(model=model, **ADAM), hosts, strategy)


@pytest.mark.parametrize("strategy", STRATEGIES)
@pytest.mark.parametrize("name", ["momentum", "fused adam", "adafactor"])
def test_optimizers(pool: Pool, name: str, strategy: str) -> None:
    optimizer, options = OPTIMIZERS[name]
    check(pool, Case(optimizer=optimizer, options=options, groups=True), (2, 2), strategy)


@pytest.mark.parametrize("strategy", STRATEGIES[:2])
@pytest.mark.parametrize("hosts", [(1, 1), (2, 1)])
def test_clipping_sees_the_average(pool: Pool, hosts: tuple[int, ...], strategy: str) -> None:
    check(pool, Case(clip=0.05, **ADAM), hosts, strategy)


@pytest.mark.parametrize("strategy", STRATEGIES)
@pytest.mark.parametrize("hosts", [(1, 1), (2, 1)])
@pytest.mark.parametrize("zero", [False, True])
def test_accumulated_batches_add_up(pool: Pool, zero: bool, hosts: tuple[int, ...], strategy: str) -> None:
    check(pool, Case(accumulate=3, samples=50, zero=zero), hosts, strategy)


@pytest.mark.parametrize("strategy", STRATEGIES)
@pytest.mark.parametrize(("dtype", "tolerance"), [("float32", 1e-4), ("bfloat16", 0.1), ("float16", 0.05)])
def test_narrow_types(pool: Pool, dtype: str, tolerance: float, strategy: str) -> None:
    check(pool, Case(dtype=dtype), (2, 1), strategy, tolerance)


@pytest.mark.parametrize("strategy", STRATEGIES[:2])
def test_compiled_model(pool: Pool, strategy: str) -> None:
    check(pool, Case(model="tied", compile=True), (2, 1), strategy)
