"""What collectives give, over shared memory, TCP, Gloo and alone."""

import itertools
import math
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from pool import Pool, RemoteError
from products import product

import hocket
from hocket.comm.bucket_layout import Layout, cut
from hocket.job.worker import current

SHAPES = [(), (1,), (3, 5), (70_001,), (0,)]
TYPES = ["float64", "float32", "bfloat16", "float16", "int64", "int32", "uint8", "bool"]


def value(rank: int, shape: tuple[int, ...], dtype: str) -> torch.Tensor:
    random = torch.Generator().manual_seed(rank)
    return (torch.rand(shape, generator=random) * 4).to(getattr(torch, dtype))


def gather(shape: tuple[int, ...], dtype: str) -> torch.Tensor:
    mine = value(hocket.rank(), shape, dtype)
    result = hocket.allgather(mine)
    sent = hocket.broadcast(value(hocket.rank(), shape, dtype), root=hocket.size() - 1)
    assert torch.equal(sent, value(hocket.size() - 1, shape, dtype))
    return result


@pytest.mark.few(14)
@pytest.mark.parametrize("dtype", TYPES)
@pytest.mark.parametrize("shape", SHAPES)
def test_gather_and_broadcast(pool: Pool, shape: tuple[int, ...], dtype: str) -> None:
    expected = torch.stack([value(rank, shape, dtype) for rank in range(3)])
    assert all(torch.equal(result, expected) for result in pool.run(3, gather, shape, dtype))


def collect(lengths: list[int]) -> list[list[int]]:
    mine = torch.full((lengths[hocket.rank()],), hocket.rank() + 1, dtype=torch.uint8)
    parts = current().communicator.collect(mine, hocket.size() - 1)
    return [part.tolist() for part in parts]


@pytest.mark.few(5)
@pytest.mark.parametrize(
    ("hosts", "transport"), [(None, "auto"), *itertools.product([(2, 1), (1, 1, 1)], ["auto", "gloo"])]
)
@pytest.mark.parametrize("lengths", [[0, 0, 0], [3, 0, 992], [5, 70_001, 0]])
def test_collect(pool: Pool, lengths: list[int], hosts: tuple[int, ...] | None, transport: str) -> None:
    expected = [[rank + 1] * length for rank, length in enumerate(lengths)]
    assert pool.run(3, collect, lengths, hosts=hosts, transport=transport) == [[], [], expected]


def reduce_all(shape: tuple[int, ...], dtype: str, operation: str) -> torch.Tensor:
    mine = value(hocket.rank(), shape, dtype)
    before = mine.clone()
    result = hocket.allreduce(mine, operation)
    assert torch.equal(mine, before), "the input was changed"
    hocket.allreduce(mine, operation, out=mine)
    assert torch.equal(mine, result)
    return result


def reference(workers: int, shape: tuple[int, ...], dtype: str, operation: str) -> torch.Tensor:
    parts = torch.stack([value(rank, shape, dtype).double() for rank in range(workers)])
    by = {"mean": parts.mean, "sum": parts.sum, "max": parts.amax, "min": parts.amin, "product": parts.prod}
    return by[operation](0)


@pytest.mark.few(5)
@product("workers", workers=[1, 2, 5], shape=SHAPES, operation=["mean", "sum", "max", "min", "product"])
def test_reduce(pool: Pool, workers: int, shape: tuple[int, ...], operation: str) -> None:
    results = pool.run(workers, reduce_all, shape, "float64", operation)
    assert all(torch.equal(results[0], result) for result in results)
    assert torch.allclose(results[0], reference(workers, shape, "float64", operation))


@pytest.mark.parametrize("workers", [2, 4])
def test_narrow_types_are_summed_in_float32(pool: Pool, workers: int) -> None:
    result = pool.run(workers, reduce_all, (5000,), "bfloat16", "mean")[0]
    assert torch.equal(result, reference(workers, (5000,), "bfloat16", "mean").float().bfloat16())


def test_reduce_over_gloo(pool: Pool, free_port: int) -> None:
    result = pool.run(3, reduce_all, (1000,), "float64", "mean", transport="gloo", port=free_port)[0]
    assert torch.allclose(result, reference(3, (1000,), "float64", "mean"))


def of_nan(count: int, dtype: str) -> list[torch.Tensor]:
    mine = torch.full((count,), float(hocket.rank()), dtype=getattr(torch, dtype))
    if hocket.rank() == 0:
        mine[count // 2] = math.nan
    return [hocket.allreduce(mine, operation) for operation in ("sum", "max", "min", "product")]


@product("transport", transport=["shared", "tcp", "gloo"], count=[3, 5000], dtype=["float32", "bfloat16"])
def test_what_is_no_number_on_one_rank_is_none_in_the_result(
    pool: Pool, transport: str, count: int, dtype: str
) -> None:
    """Gloo's own maximum of 0 and NaN is 0 or NaN, as it comes."""
    place = {} if transport == "shared" else {"hosts": (1, 2), "transport": transport}
    for found in pool.run(3, of_nan, count, dtype, **place):
        for result in found:
            assert result.isnan().nonzero().tolist() == [[count // 2]]


@pytest.mark.few(11)
@product("hosts", hosts=[(1, 1), (2, 1), (1, 1, 1), (2, 2)], dtype=TYPES, shape=SHAPES)
def test_over_tcp(pool: Pool, hosts: tuple[int, ...], dtype: str, shape: tuple[int, ...]) -> None:
    size = sum(hosts)
    expected = torch.stack([value(rank, shape, dtype) for rank in range(size)])
    for result in pool.run(size, gather, shape, dtype, hosts=hosts):
        assert torch.equal(result, expected)


@pytest.mark.few(5)
@product("hosts", hosts=[(1, 1), (2, 1), (2, 2)], shape=SHAPES, operation=["mean", "sum", "max", "min", "product"])
def test_reduce_over_tcp(pool: Pool, hosts: tuple[int, ...], shape: tuple[int, ...], operation: str) -> None:
    size = sum(hosts)
    results = pool.run(size, reduce_all, shape, "float64", operation, hosts=hosts)
    assert all(torch.equal(results[0], result) for result in results)
    assert torch.allclose(results[0], reference(size, shape, "float64", operation))


def many(seed: int) -> list[Any]:
    """A random sequence of collectives, of sizes that make the scratch memory grow in between."""
    random = torch.Generator().manual_seed(seed)
    results: list[Any] = []
    for _ in range(30):
        count = int(2 ** (torch.rand((), generator=random) * 18))
        kind = int(torch.randint(4, (), generator=random))
        mine = torch.full((count,), float(hocket.rank() + 1))
        if kind == 0:
            results.append(float(hocket.allreduce(mine, "sum").max()))
        elif kind == 1:
            results.append(hocket.allgather(mine)[:, -1].tolist())
        elif kind == 2:
            results.append(float(hocket.broadcast(mine, root=count % hocket.size())[0]))
        else:
            hocket.barrier()
    return results


@settings(max_examples=10, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(seed=st.integers(0, 10**6), workers=st.integers(2, 5))
def test_any_sequence_gives_all_ranks_the_same(pool: Pool, seed: int, workers: int) -> None:
    results = pool.run(workers, many, seed)
    assert all(result == results[0] for result in results)


@settings(max_examples=5, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(seed=st.integers(0, 10**6), hosts=st.sampled_from([(1, 1), (2, 1), (1, 1, 1), (2, 3)]))
def test_any_sequence_over_tcp(pool: Pool, seed: int, hosts: tuple[int, ...]) -> None:
    results = pool.run(sum(hosts), many, seed, hosts=hosts)
    assert all(result == results[0] for result in results)


def other_shapes() -> None:
    hocket.allreduce(torch.zeros(3 + hocket.rank()))


def test_other_shapes_are_named(pool: Pool) -> None:
    for outcome in pool.outcomes(2, other_shapes):
        assert isinstance(outcome, RemoteError) and outcome.kind == "MismatchError"
        for rank, count in enumerate((3, 4)):
            assert f"rank {rank}: hocket.allreduce(): allreduce of float32[{count}], mean" in outcome.message


def wrong_use(what: str) -> None:
    if what == "operation":
        hocket.allreduce(torch.zeros(3), "median")
    elif what == "integer":
        hocket.allreduce(torch.zeros(3, dtype=torch.int64))
    elif what == "out":
        hocket.allreduce(torch.zeros(3), out=torch.zeros(4))
    elif what == "root":
        hocket.broadcast(torch.zeros(3), root=2)
    elif what == "sparse":
        hocket.allgather(torch.eye(3).to_sparse())


@pytest.mark.parametrize(
    ("what", "remedy"),
    [
        ("operation", "the choices are mean, sum, max, min, product"),
        ("integer", "use operation='sum'"),
        ("out", "they must be equal"),
        ("root", "root 2 is none of the ranks 0, 1"),
        ("sparse", "dense tensors with values"),
    ],
)
def test_wrong_use_is_told(pool: Pool, what: str, remedy: str) -> None:
    outcome = pool.outcomes(2, wrong_use, what)[1]
    assert outcome.kind == "UsageError" and remedy in outcome.message


@given(count=st.integers(0, 10**6), parts=st.integers(1, 16), dtype=st.sampled_from([torch.float64, torch.bfloat16]))
def test_slices_cover_everything_once(count: int, parts: int, dtype: torch.dtype) -> None:
    bounds = cut(count, dtype, parts)
    assert bounds[0][0] == 0 and bounds[-1][1] == count
    assert all(a[1] == b[0] for a, b in itertools.pairwise(bounds))
    assert all(start * dtype.itemsize % 64 == 0 for start, end in bounds if end > start)


def test_layout_keeps_shape_and_strides() -> None:
    tensors = [
        torch.randn(3, 4, 5, 6).to(memory_format=torch.channels_last), torch.randn(7).double(), torch.tensor(2.0),
        torch.randn(4, 3).t(), torch.randn(5, 1, 3), torch.randn(1).expand(4),
    ]  # fmt: skip
    layout = Layout(tensors)
    views = layout.views(layout.allocate())
    for tensor, view in zip(tensors, views, strict=True):
        view.copy_(tensor)
    for tensor, view in zip(tensors, views, strict=True):
        assert torch.equal(tensor, view) and view.data_ptr() % 64 == views[0].data_ptr() % 64
    assert [v.stride() for v in views[:5]] == [t.stride() for t in tensors[:5]]
