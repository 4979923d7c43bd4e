"""Parameter servers for models on a GPU: parameters and gradients pass through the memory of the host."""

import dataclasses

import pytest
import torch
from pool import Pool
from strategies.training import Case, alone, assert_equal, together

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="there is no GPU here")

CASE = Case(optimizer="Adam", options={"lr": 0.01}, device="cuda")


@pytest.mark.parametrize("transport", ["auto", "gloo"])
@pytest.mark.parametrize("model", ["mlp", "tied", "sometimes", "channels_last"])
def test_bulk_synchronous_is_one_process(pool: Pool, model: str, transport: str) -> None:
    case = dataclasses.replace(CASE, model=model)
    assert_equal(alone(case, 2), pool.run(2, together, case, "bsp", servers=2, transport=transport))


@pytest.mark.parametrize("strategy", ["asynchronous", "ps(staleness=2)", "asynchronous(clip=1000.0)"])
def test_one_worker_is_plain(pool: Pool, strategy: str) -> None:
    assert_equal(alone(CASE, 1), pool.run(1, together, CASE, strategy, servers=1))


@pytest.mark.parametrize(("dtype", "tolerance"), [("float32", 1e-3), ("bfloat16", 0.1)])
def test_narrow_types(pool: Pool, dtype: str, tolerance: float) -> None:
    case = dataclasses.replace(CASE, dtype=dtype)
    assert_equal(alone(case, 2), pool.run(2, together, case, "bsp", servers=1), tolerance)
