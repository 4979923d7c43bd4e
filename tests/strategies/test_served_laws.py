"""The laws of the strategies with parameter servers: at one end they are mirrored, with one worker they are plain."""

import contextlib
import io
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from pool import Pool
from products import product
from strategies.test_laws import MODELS, OPTIMIZERS
from strategies.training import Case, Result, alone, assert_equal, loop, make, together

import hocket

PLACEMENTS = ["partitioned", "greedy", "round_robin"]


def check(pool: Pool, case: Case, workers: int, servers: int, strategy: str, tolerance: float = 1e-9) -> None:
    assert_equal(alone(case, workers), pool.run(workers, together, case, strategy, servers=servers), tolerance)


@pytest.mark.few(6)
@pytest.mark.parametrize("strategy", ["bsp", "ps(staleness=0)", "softsync(1)"])
@pytest.mark.parametrize(("workers", "servers"), [(1, 1), (2, 1), (3, 2), (4, 3)])
def test_bulk_synchronous_is_one_process_with_all_batches(
    pool: Pool, workers: int, servers: int, strategy: str
) -> None:
    check(pool, Case(optimizer="Adam", options={"lr": 0.01}), workers, servers, strategy)


@pytest.mark.few(20)
@pytest.mark.parametrize("strategy", ["bsp", "asynchronous", "ps(staleness=2)", "softsync(1, staleness_aware=True)"])
@pytest.mark.parametrize("name", OPTIMIZERS)
def test_one_worker_is_plain_with_every_optimizer(pool: Pool, name: str, strategy: str) -> None:
    optimizer, options = OPTIMIZERS[name]
    check(pool, Case(optimizer=optimizer, options=options, groups=True), 1, 2, strategy)


@pytest.mark.few(8)
@pytest.mark.parametrize("name", OPTIMIZERS)
def test_bulk_synchronous_with_every_optimizer(pool: Pool, name: str) -> None:
    optimizer, options = OPTIMIZERS[name]
    check(pool, Case(optimizer=optimizer, options=options, groups=True), 3, 2, "bsp")


@pytest.mark.few(3)
@product(model=MODELS, optimizer=["momentum", "adam", "adafactor"])
def test_bulk_synchronous_with_every_model(pool: Pool, model: str, optimizer: str) -> None:
    name, options = OPTIMIZERS[optimizer]
    check(pool, Case(model=model, optimizer=name, options=options), 2, 2, "bsp")


@pytest.mark.parametrize("placement", PLACEMENTS)
def test_any_placement(pool: Pool, placement: str) -> None:
    case = Case(optimizer="Adam", options={"lr": 0.01}, groups=True)
    check(pool, case, 2, 3, f"bsp(placement={placement!r})")


def placed(strategy: str) -> str:
    with contextlib.redirect_stderr(io.StringIO()) as said:
        model = torch.nn.Linear(2, 1)
        hocket.distribute(model, torch.optim.SGD(model.parameters(), lr=0.1), strategy=strategy)
    return said.getvalue()


@pytest.mark.parametrize(
    ("strategy", "factor"),
    [("asynchronous", "0.5"), ("ssp(staleness=1, scale=3)", "3"), ("bsp", ""), ("softsync(2)", "")],
)
def test_the_factor_of_gradients_that_are_applied_one_by_one_is_told(pool: Pool, strategy: str, factor: str) -> None:
    first, second = pool.run(2, placed, strategy, servers=1, verbose=True)
    assert "partitioned of 2 parameters" in first and second == ""
    told = f", times {factor} (scale=)\n" if factor else ""
    assert first.partition("every gradient is applied by itself")[2] == told


def test_over_tcp(pool: Pool) -> None:
    case = Case(optimizer="Adam", options={"lr": 0.01}, groups=True)
    many = pool.run(3, together, case, "bsp", servers=2, transport="gloo")
    assert_equal(alone(case, 3), many)


def test_schedulers_change_the_rate_on_the_servers(pool: Pool) -> None:
    check(pool, Case(schedule=True), 2, 2, "bsp")
    check(pool, Case(schedule=True), 1, 2, "asynchronous")


@pytest.mark.parametrize(("workers", "servers"), [(1, 1), (3, 1), (3, 2)])
def test_servers_clip_the_average(pool: Pool, workers: int, servers: int) -> None:
    case = Case(clip=0.05, optimizer="Adam", options={"lr": 0.01})
    one = alone(case, workers) | {"norms": []}
    unclipped = Case(optimizer="Adam", options={"lr": 0.01})
    assert_equal(one, pool.run(workers, together, unclipped, "bsp(clip=0.05)", servers=servers))


def test_one_worker_clips_its_own(pool: Pool) -> None:
    one = alone(Case(clip=0.05), 1) | {"norms": []}
    assert_equal(one, pool.run(1, together, Case(), "asynchronous(clip=0.05)", servers=2))


@pytest.mark.parametrize(("dtype", "tolerance"), [("float32", 1e-4), ("bfloat16", 0.1)])
def test_narrow_types(pool: Pool, dtype: str, tolerance: float) -> None:
    check(pool, Case(dtype=dtype), 3, 2, "bsp", tolerance)


def downpour(case: Case, strategy: str) -> Result:
    """The script's own optimizer is SGD with momentum, of which only the rate counts."""
    model, _, loader = make(case, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    model, optimizer, loader = hocket.distribute(model, optimizer, loader, strategy=strategy)
    return loop(case, model, optimizer, loader, held=None)


@pytest.mark.parametrize("servers", [1, 2])
def test_downpour_of_one_worker_is_adagrad(pool: Pool, servers: int) -> None:
    one = alone(Case(optimizer="Adagrad", options={"lr": 0.05}), 1)
    many = pool.run(1, downpour, Case(), "downpour", servers=servers)
    for mine, theirs in zip(one["parameters"], many[0]["parameters"], strict=True):
        assert torch.allclose(mine, theirs, rtol=1e-9, atol=1e-9)


def test_downpour_without_adagrad_is_sgd(pool: Pool) -> None:
    one = alone(Case(options={"lr": 0.2}), 1)
    many = pool.run(1, downpour, Case(), "downpour(adagrad=False, rate=0.2)", servers=1)
    for mine, theirs in zip(one["parameters"], many[0]["parameters"], strict=True):
        assert torch.allclose(mine, theirs, rtol=1e-9, atol=1e-9)


@settings(max_examples=20, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    workers=st.integers(1, 4),
    servers=st.integers(1, 3),
    optimizer=st.sampled_from(sorted(OPTIMIZERS)),
    model=st.sampled_from(MODELS),
    samples=st.integers(1, 60),
    batch=st.integers(1, 7),
    drop_last=st.booleans(),
    zero=st.booleans(),
    groups=st.booleans(),
    placement=st.sampled_from(PLACEMENTS),
)
def test_the_law_holds_for_any_case(
    pool: Pool, workers: int, servers: int, optimizer: str, model: str, samples: int, batch: int, drop_last: bool,
    zero: bool, groups: bool, placement: str,
) -> None:  # fmt: skip
    name, options = OPTIMIZERS[optimizer]
    case = Case(model=model, optimizer=name, options=options, samples=samples, batch=batch,
                drop_last=drop_last and samples >= batch * workers, zero=zero, groups=groups)  # fmt: skip
    check(pool, case, workers, servers, f"bsp(placement={placement!r})", tolerance=1e-7)


def embedded(strategy: str, optimizer: str, options: dict[str, Any], workers: int = 1) -> list[torch.Tensor]:
    """A model with a sparse embedding; alone if there is no strategy."""
    torch.manual_seed(0)
    table = torch.nn.Embedding(50, 4, sparse=True, dtype=torch.float64)
    head = torch.nn.Linear(4, 1, dtype=torch.float64)
    model = torch.nn.Sequential(table, head)
    kind = getattr(torch.optim, optimizer)
    trained: Any = [kind(table.parameters(), **options), torch.optim.SGD(head.parameters(), lr=0.1)]
    random = torch.Generator().manual_seed(1)
    rows = torch.randint(0, 50, (24,), generator=random)
    data = torch.utils.data.TensorDataset(rows, torch.sin(rows.double())[:, None])
    loader: Any = torch.utils.data.DataLoader(data, 3 * workers, shuffle=False)
    if strategy:
        model, trained, loader = hocket.distribute(model, trained, loader, strategy=strategy)
    for _ in range(2):
        for x, y in loader:
            ((model(x) - y) ** 2).mean().backward()
            for each in trained:
                each.step()
                each.zero_grad()
    return list(model.state_dict().values())


@pytest.mark.few(5)
@pytest.mark.parametrize(
    ("optimizer", "options"), [("SGD", {"lr": 0.1}), ("Adagrad", {"lr": 0.1}), ("SparseAdam", {"lr": 0.01})]
)
@pytest.mark.parametrize(("workers", "servers"), [(1, 1), (2, 1), (2, 2)])
def test_sparse_embeddings(pool: Pool, workers: int, servers: int, optimizer: str, options: dict[str, Any]) -> None:
    one = embedded("", optimizer, options, workers)
    for many in pool.run(workers, embedded, "bsp", optimizer, options, servers=servers):
        for mine, theirs in zip(one, many, strict=True):
            assert torch.allclose(mine, theirs, rtol=1e-9, atol=1e-9)
