"""The law of mirrored and central: P workers with batch B are one process with batch P·B."""

import dataclasses
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from pool import Pool
from products import product
from strategies.training import Case, alone, assert_equal, together

STRATEGIES = ["mirrored", "central", "central(fused=True)"]
OPTIMIZERS: dict[str, tuple[str, dict[str, Any]]] = {
    "sgd": ("SGD", {"lr": 0.05}),
    "momentum": ("SGD", {"lr": 0.02, "momentum": 0.9, "nesterov": True, "weight_decay": 0.01}),
    "adam": ("Adam", {"lr": 0.01}),
    "amsgrad": ("Adam", {"lr": 0.01, "amsgrad": True, "weight_decay": 0.1}),
    "fused adam": ("Adam", {"lr": 0.01, "fused": True}),
    "foreach adam": ("Adam", {"lr": 0.01, "foreach": True}),
    "adamw": ("AdamW", {"lr": 0.01}),
    "adagrad": ("Adagrad", {"lr": 0.05, "initial_accumulator_value": 0.1}),
    "rmsprop": ("RMSprop", {"lr": 0.01, "centered": True, "momentum": 0.5}),
    "adadelta": ("Adadelta", {"lr": 1.0}),
    "adamax": ("Adamax", {"lr": 0.01}),
    "nadam": ("NAdam", {"lr": 0.01}),
    "radam": ("RAdam", {"lr": 0.01}),
    "rprop": ("Rprop", {"lr": 0.01}),
    "asgd": ("ASGD", {"lr": 0.01}),
    "adafactor": ("Adafactor", {"lr": 0.01}),
}
MODELS = ["mlp", "tied", "sometimes", "channels_last", "checkpointed", "checkpointed reentrant"]


def check(pool: Pool, case: Case, workers: int, strategy: str, tolerance: float = 1e-9) -> None:
    assert_equal(alone(case, workers), pool.run(workers, together, case, strategy), tolerance)


@pytest.mark.few(8)
@pytest.mark.parametrize("strategy", STRATEGIES)
@pytest.mark.parametrize("workers", [1, 2, 3, 4, 5])
def test_many_workers_are_one(pool: Pool, workers: int, strategy: str) -> None:
    check(pool, Case(optimizer="Adam", options={"lr": 0.01}), workers, strategy)


@pytest.mark.few(20)
@pytest.mark.parametrize("strategy", STRATEGIES)
@pytest.mark.parametrize("name", OPTIMIZERS)
def test_every_optimizer(pool: Pool, name: str, strategy: str) -> None:
    optimizer, options = OPTIMIZERS[name]
    check(pool, Case(optimizer=optimizer, options=options, groups=True), 3, strategy)


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_muon(pool: Pool, strategy: str) -> None:
    # Muon itself computes in bfloat16, so sums in another order show earlier.
    check(pool, Case(model="matrices", optimizer="Muon", options={"lr": 0.01}), 2, strategy, tolerance=1e-3)


@pytest.mark.few(9)
@product("strategy", strategy=STRATEGIES, model=MODELS, optimizer=["momentum", "adam", "adafactor"])
def test_every_model(pool: Pool, model: str, optimizer: str, strategy: str) -> None:
    name, options = OPTIMIZERS[optimizer]
    check(pool, Case(model=model, optimizer=name, options=options), 3, strategy)


@pytest.mark.few(3)
@pytest.mark.parametrize("strategy", STRATEGIES)
@pytest.mark.parametrize("compiled", ["mlp", "tied"])
def test_compiled_model(pool: Pool, compiled: str, strategy: str) -> None:
    check(pool, Case(model=compiled, compile=True), 2, strategy)


@pytest.mark.parametrize("strategy", STRATEGIES[:2])
def test_clipping_sees_the_average(pool: Pool, strategy: str) -> None:
    check(pool, Case(clip=0.05, optimizer="Adam", options={"lr": 0.01}), 3, strategy)


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_schedulers(pool: Pool, strategy: str) -> None:
    check(pool, Case(schedule=True), 2, strategy)


@pytest.mark.parametrize("strategy", STRATEGIES)
@pytest.mark.parametrize("zero", [False, True])
def test_accumulated_batches_add_up(pool: Pool, zero: bool, strategy: str) -> None:
    check(pool, Case(accumulate=3, samples=50, zero=zero), 3, strategy)


@pytest.mark.few(3)
@product("strategy", strategy=STRATEGIES, dtype=["float32", "bfloat16"], workers=[2, 3])
def test_narrow_types(pool: Pool, dtype: str, workers: int, strategy: str) -> None:
    check(pool, Case(dtype=dtype), workers, strategy, {"float32": 1e-4, "bfloat16": 0.1}[dtype])


@settings(max_examples=25, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    workers=st.integers(1, 5),
    strategy=st.sampled_from(STRATEGIES),
    optimizer=st.sampled_from(sorted(OPTIMIZERS)),
    model=st.sampled_from(MODELS),
    samples=st.integers(1, 60),
    batch=st.integers(1, 7),
    drop_last=st.booleans(),
    zero=st.booleans(),
    groups=st.booleans(),
)
def test_the_law_holds_for_any_case(
    pool: Pool, workers: int, strategy: str, optimizer: str, model: str, samples: int, batch: int, drop_last: bool,
    zero: bool, groups: bool,
) -> None:  # fmt: skip
    name, options = OPTIMIZERS[optimizer]
    case = Case(model=model, optimizer=name, options=options, samples=samples, batch=batch, drop_last=drop_last,
                zero=zero, groups=groups)  # fmt: skip
    check(pool, case, workers, strategy, tolerance=1e-7)


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_two_runs_are_bit_identical(pool: Pool, strategy: str) -> None:
    case = Case(dtype="float32", optimizer="Adam", options={"lr": 0.01})
    first, second = (pool.run(3, together, case, strategy)[0]["parameters"] for _ in range(2))
    assert all(a.equal(b) for a, b in zip(first, second, strict=True))


def test_gloo_obeys_the_law_too(pool: Pool, free_port: int) -> None:
    case = dataclasses.replace(Case(), optimizer="Adam", options={"lr": 0.01})
    many = pool.run(3, together, case, "mirrored", transport="gloo", port=free_port)
    assert_equal(alone(case, 3), many)
