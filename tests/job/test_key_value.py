"""Parameter servers by hand."""

import pytest
import torch
from pool import Pool, RemoteError

import hocket


def sgd(parameters: list[torch.nn.Parameter]) -> torch.optim.Optimizer:
    return torch.optim.SGD(parameters, lr=0.5)


def momentum(parameters: list[torch.nn.Parameter]) -> torch.optim.Optimizer:
    return torch.optim.SGD(parameters, lr=0.1, momentum=0.9)


def dense() -> tuple[list[float], list[float]]:
    store = hocket.KeyValue({"a": torch.ones(3) + hocket.rank(), "b": torch.zeros(40_000)}, sgd)
    hocket.barrier()
    for _ in range(4):
        store.push("a", torch.ones(3))
        store.push("b", torch.full((40_000,), 2.0))
    store.wait()
    hocket.barrier()
    found = store.pull("a").tolist(), store.pull("b").unique().tolist()
    store.close()
    return found


@pytest.mark.few(2)
@pytest.mark.parametrize("transport", ["auto", "gloo"])
@pytest.mark.parametrize(("workers", "servers"), [(1, 1), (2, 1), (2, 3)])
def test_every_push_is_one_step(pool: Pool, workers: int, servers: int, transport: str) -> None:
    for a, b in pool.run(workers, dense, servers=servers, transport=transport):
        assert a == [1.0 - 0.5 * 4 * workers] * 3  # rank 0's values are the start
        assert b == [-0.5 * 2 * 4 * workers]


def averaged() -> list[float]:
    store = hocket.KeyValue({"a": torch.zeros(5, dtype=torch.float64)}, sgd, strategy="bsp")
    store.push("a", torch.full((5,), 1.0 + hocket.rank(), dtype=torch.float64), weight=1.0 + hocket.rank())
    found: list[float] = store.pull("a").tolist()
    store.close()
    return found


def test_bulk_synchronous_pushes_are_averaged_by_weight(pool: Pool) -> None:
    for found in pool.run(2, averaged, servers=1):
        assert found == pytest.approx([-0.5 * (1 * 1 + 2 * 2) / 3] * 5)


def by_rows() -> tuple[list[float], float, int]:
    store = hocket.KeyValue({"table": torch.zeros(1000, 4)}, sgd, rows=["table"])
    hocket.barrier()
    store.push("table", torch.ones(4, 4), rows=torch.tensor([999, 0, 500, 0]))  # row 0 twice, in no order
    store.wait()
    hocket.barrier()
    found = store.pull("table", rows=[500, 999, 0, 1, 0])[:, 0].tolist()
    whole = float(store.pull("table", rows=torch.arange(1000)).sum())
    store.close()
    return found, whole, hocket.size()


@pytest.mark.few(2)
@pytest.mark.parametrize("transport", ["auto", "gloo"])
@pytest.mark.parametrize(("workers", "servers"), [(1, 1), (3, 2)])
def test_only_rows_are_updated(pool: Pool, workers: int, servers: int, transport: str) -> None:
    for found, whole, size in pool.run(workers, by_rows, servers=servers, transport=transport):
        assert found == [-0.5 * size, -0.5 * size, -1.0 * size, 0.0, -1.0 * size]
        assert whole == -0.5 * 4 * 4 * size


def by_a_list() -> list[float]:
    store = hocket.KeyValue({"table": torch.zeros(5, 2)}, sgd, rows=["table"])
    store.push("table", torch.ones(3, 2), rows=[3, 0, 3])
    found: list[float] = store.pull("table", rows=range(5))[:, 0].tolist()
    store.close()
    return found


def test_rows_may_be_a_list(pool: Pool) -> None:
    assert pool.run(1, by_a_list, servers=1) == [[-0.5, 0.0, 0.0, -1.0, 0.0]]


def momentum_state() -> dict[str, list[float]]:
    store = hocket.KeyValue({"a": torch.zeros(40_000)}, momentum)
    store.push("a", torch.ones(40_000))
    parts = store.state("a")
    store.close()
    return {each.key: each.value.unique().tolist() for each in parts}


def test_the_optimizers_state_can_be_looked_at(pool: Pool) -> None:
    assert pool.run(1, momentum_state, servers=2) == [{"momentum_buffer": [1.0]}]


def misuse(how: str) -> None:
    store = hocket.KeyValue({"a": torch.zeros(3), "t": torch.zeros(9, 2)}, sgd, rows=["t"])
    try:
        if how == "unknown":
            store.push("b", torch.zeros(3))
        elif how == "shape":
            store.push("a", torch.zeros(4))
        elif how == "rows":
            store.push("a", torch.zeros(1, 3), rows=torch.tensor([0]))
        elif how == "no rows":
            store.pull("t")
        elif how == "far rows":
            store.push("t", torch.zeros(1, 2), rows=torch.tensor([9]))
            store.wait()
    finally:
        store._pool.shutdown()


@pytest.mark.parametrize(
    ("how", "text"),
    [
        ("unknown", "the keys are a, t"),
        ("shape", "a gradient [4] for [3]"),
        ("rows", "is not a table of rows"),
        ("no rows", "say which, with rows="),
        ("far rows", "row 9 is not in the table, which has rows 0 to 8"),
    ],
)
def test_misuse_is_told(pool: Pool, how: str, text: str) -> None:
    with pytest.raises(RemoteError) as raised:
        pool.run(1, misuse, how, servers=1)
    assert text in raised.value.message


def without_servers() -> None:
    hocket.KeyValue({"a": torch.zeros(3)}, sgd)


def test_servers_are_needed(pool: Pool) -> None:
    with pytest.raises(RemoteError, match="hocket run --servers 1"):
        pool.run(1, without_servers)
