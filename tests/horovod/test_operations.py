"""Horovod's collectives on real workers: results, names, differences, joins, process sets, objects."""

import collections
from collections.abc import Callable
from typing import Any

import pytest
import torch
from pool import Pool

import hocket.horovod.torch as hvd
from hocket.horovod.adasum import adasum


def as_horovod(function: str, *args: Any) -> Any:
    hvd.init()
    try:
        return globals()[function](*args)
    finally:
        hvd.shutdown()


def run(pool: Pool, size: int, function: Callable[..., Any], *args: Any, **settings: Any) -> list[Any]:
    return pool.run(size, as_horovod, function.__name__, *args, **settings)


def mine(rank: int, dtype: torch.dtype, shape: tuple[int, ...] = (3, 5)) -> torch.Tensor:
    generator = torch.Generator().manual_seed(rank)
    whole = torch.randint(-4, 5, shape, generator=generator)
    if dtype.is_complex:
        return torch.complex(whole.double(), torch.randint(-4, 5, shape, generator=generator).double()).to(dtype)
    return (whole > 0) if dtype is torch.bool else whole.abs().to(dtype) if dtype is torch.uint8 else whole.to(dtype)


DTYPES = [
    torch.float32, torch.float64, torch.float16, torch.bfloat16, torch.int8, torch.uint8, torch.int16, torch.int32,
    torch.int64, torch.bool, torch.complex64, torch.complex128,
]  # fmt: skip


def reduce_all() -> None:
    rank, size = hvd.rank(), hvd.size()
    for dtype in DTYPES:
        parts = [mine(each, dtype) for each in range(size)]
        wide = torch.stack([part.to(torch.complex128 if dtype.is_complex else torch.float64) for part in parts])
        total = wide.sum(0)
        expected = {hvd.Sum: total, hvd.Average: total / size, hvd.Product: wide.prod(0)}
        if not dtype.is_complex:
            expected |= {hvd.Min: wide.amin(0), hvd.Max: wide.amax(0)}
        for op, value in expected.items():
            if not (dtype.is_floating_point or dtype.is_complex) and op == hvd.Average:
                value = value.trunc()
            found = hvd.allreduce(parts[rank], op=op)
            assert found.dtype == dtype and torch.allclose(found.to(value.dtype), value.to(dtype).to(value.dtype)), (
                dtype, op, found, value,
            )  # fmt: skip
            assert torch.equal(parts[rank], mine(rank, dtype))
            place = mine(rank, dtype)
            assert hvd.allreduce_(place, op=op) is place and torch.equal(place, found)


def reduce_oddly() -> None:
    rank, size = hvd.rank(), hvd.size()
    columns = torch.arange(12.0).view(3, 4).t() + rank
    expected = torch.arange(12.0).view(3, 4).t() * size + sum(range(size))
    assert torch.equal(hvd.allreduce(columns, op=hvd.Sum), expected)
    hvd.allreduce_(columns, op=hvd.Sum)
    assert torch.equal(columns, expected) and not columns.is_contiguous()
    every_other = torch.zeros(10)[::2]
    hvd.allreduce_(every_other.add_(rank), op=hvd.Sum)
    assert every_other.tolist() == [float(sum(range(size)))] * 5
    assert hvd.allreduce(torch.tensor(float(rank)), op=hvd.Max).item() == size - 1
    assert hvd.allreduce(torch.empty(0, 3)).shape == (0, 3)
    scaled = hvd.allreduce(torch.full((2,), 3.0), op=hvd.Sum, prescale_factor=0.5, postscale_factor=4.0)
    assert scaled.tolist() == [6.0 * size] * 2
    whole = hvd.allreduce(torch.full((2,), 3), op=hvd.Sum, prescale_factor=2.0, postscale_factor=0.5)
    assert whole.tolist() == [3 * size] * 2
    grouped = hvd.grouped_allreduce([torch.ones(2), torch.ones(3, dtype=torch.int64), torch.ones(())], op=hvd.Sum)
    assert [each.sum().item() for each in grouped] == [2 * size, 3 * size, size]
    packed = hvd.allreduce(torch.full((2,), 0.5, dtype=torch.float64), compression=hvd.Compression.fp16)
    assert packed.dtype == torch.float64 and packed.tolist() == [0.5, 0.5]
    with pytest.warns(DeprecationWarning):
        assert hvd.allreduce(torch.ones(1), average=False).item() == size
    with pytest.raises(ValueError, match="supersedes average"):
        hvd.allreduce(torch.ones(1), average=True, op=hvd.Sum)
    large = torch.arange(600_000, dtype=torch.float64)  # travels in parts
    assert torch.equal(hvd.allreduce(large, op=hvd.Average), large)


def the_others() -> None:
    rank, size = hvd.rank(), hvd.size()
    for dtype in DTYPES:
        rows = [mine(each, dtype, (each + 1, 2)) for each in range(size)]
        assert torch.equal(hvd.allgather(rows[rank]), torch.cat(rows))
        assert torch.equal(hvd.broadcast(mine(rank, dtype), root_rank=size - 1), mine(size - 1, dtype))
        given = mine(rank, dtype)
        assert hvd.broadcast_(given, 0) is given and torch.equal(given, mine(0, dtype))
    first, second = hvd.grouped_allgather([torch.full((rank,), 1.0), torch.full((1, 2), rank)])
    assert len(first) == sum(range(size)) and second.tolist() == [[each, each] for each in range(size)]
    assert hvd.allgather(torch.tensor(rank)).tolist() == list(range(size))
    assert torch.equal(hvd.alltoall(torch.arange(size) + 10 * rank), torch.arange(size) * 10 + rank)
    splits = [(rank + to) % 3 for to in range(size)]
    given = torch.cat([torch.full((count, 2), 100.0 * rank + to) for to, count in enumerate(splits)])
    found, received = hvd.alltoall(given, splits=torch.tensor(splits))
    assert received.tolist() == [(source + rank) % 3 for source in range(size)]
    assert torch.equal(
        found, torch.cat([torch.full((count, 2), 100.0 * source + rank) for source, count in enumerate(received)])
    )
    whole = torch.arange((2 * size + 1) * 2.0).view(-1, 2)
    part = hvd.reducescatter(whole * (rank + 1), op=hvd.Sum)
    expected = (whole * sum(range(1, size + 1))).split([3, *[2] * (size - 1)])[rank]
    assert torch.equal(part, expected)
    assert torch.equal(hvd.grouped_reducescatter([whole, whole])[1], whole.split([3, *[2] * (size - 1)])[rank])
    sparse = torch.sparse_coo_tensor([[rank, size]], [1.0, 2.0], (size + 2,))
    summed = hvd.sparse_allreduce_async(sparse, name="sparse", op=hvd.Sum)()
    assert summed.to_dense().tolist() == [1.0] * size + [2.0 * size, 0.0]
    hvd.barrier()


@pytest.mark.parametrize("size", [1, 2, 3])
def test_reductions(pool: Pool, size: int) -> None:
    run(pool, size, reduce_all)
    run(pool, size, reduce_oddly)


BETWEEN: dict[str, dict[str, Any]] = {
    "TCP": {"hosts": (2, 1), "transport": "tcp", "algorithm": "tree"},
    "TLS": {"hosts": (1, 1, 1), "transport": "tcp", "tls": "on"},
    "Gloo": {"hosts": (1, 2), "transport": "gloo"},
    "that goes on": {"hosts": (2, 1), "transport": "tcp", "on_loss": "continue"},
}


@pytest.mark.parametrize("place", list(BETWEEN))
def test_between_hosts(pool: Pool, place: str) -> None:
    run(pool, 3, reduce_all, **BETWEEN[place])
    run(pool, 3, reduce_oddly, **BETWEEN[place])
    run(pool, 3, the_others, **BETWEEN[place])
    run(pool, 3, in_any_order, 5, **BETWEEN[place])
    run(pool, 3, with_sets, **BETWEEN[place])


@pytest.mark.parametrize("size", [1, 2, 3])
def test_collectives_that_move(pool: Pool, size: int) -> None:
    run(pool, size, the_others)


def in_any_order(rounds: int) -> None:
    generator = torch.Generator().manual_seed(hvd.rank())
    for number in range(rounds):
        order = torch.randperm(20, generator=generator).tolist()
        handles = {i: hvd.allreduce_async(torch.full((i + 1,), float(i + number)), name=f"t{i}") for i in order}
        if number % 2:
            hvd.allreduce(torch.ones(1), name="between")
        for i in torch.randperm(20, generator=generator).tolist():
            assert hvd.synchronize(handles[i]).tolist() == [float(i + number)] * (i + 1)
            assert hvd.poll(handles[i]) and hvd.synchronize(handles[i]) is None


def test_names_count_and_not_the_order_of_calls(pool: Pool) -> None:
    run(pool, 3, in_any_order, 10)


def wrong_calls() -> list[str]:
    rank, said = hvd.rank(), []
    wrong: list[Callable[[], Any]] = [
        lambda: hvd.allreduce(torch.ones(rank + 1), name="shape"),
        lambda: hvd.allreduce(torch.ones(2, dtype=torch.float64 if rank else torch.float32), name="type"),
        lambda: hvd.allreduce(torch.ones(2), op=hvd.Sum if rank else hvd.Average, name="operation"),
        lambda: hvd.broadcast(torch.ones(2), root_rank=rank, name="root"),
        lambda: hvd.allgather(torch.ones(2, rank + 1), name="columns"),
        lambda: hvd.allreduce(torch.ones(2), name="kind") if rank else hvd.allgather(torch.ones(2), name="kind"),
    ]
    for call in wrong:
        with pytest.raises(hvd.HorovodInternalError) as caught:
            call()
        said.append(str(caught.value))
        assert hvd.allreduce(torch.ones(1), op=hvd.Sum, name="shape").item() == hvd.size()
    hvd.barrier()
    handle = hvd.allreduce_async(torch.ones(1), name="twice") if rank == 0 else 0
    if rank == 0:
        with pytest.raises(ValueError, match="'twice' is under way already"):
            hvd.allreduce_async(torch.ones(1), name="twice")
    hvd.barrier()  # passes while 'twice' is pending
    assert hvd.synchronize(handle or hvd.allreduce_async(torch.ones(1), name="twice")).item() == 1
    with pytest.raises(ValueError, match="root_rank=7"):
        hvd.broadcast(torch.ones(1), 7)
    with pytest.raises(ValueError, match="splits="):
        hvd.alltoall(torch.ones(3), splits=[1] * (hvd.size() + 1))
    with pytest.raises(TypeError, match="list is no tensor"):
        hvd.allreduce_async([1.0])  # type: ignore[arg-type]
    return said


def test_a_difference_is_told_to_all_and_the_job_goes_on(pool: Pool) -> None:
    first, second = run(pool, 2, wrong_calls)
    assert first == second
    for text, name in zip(first, ("shape", "type", "operation", "root", "columns", "kind"), strict=True):
        assert f"'{name}'" in text and "rank 0: " in text and "rank 1: " in text


def uneven(steps: list[int]) -> tuple[list[float], int, float]:
    rank, size = hvd.rank(), hvd.size()
    found = [hvd.allreduce(torch.tensor([float(rank + 1)]), op=hvd.Average).item() for _ in range(steps[rank])]
    for step, value in enumerate(found):
        assert value == pytest.approx(sum(each + 1 for each in range(size) if steps[each] > step) / size)
    if steps[rank] == max(steps):
        with pytest.raises(hvd.HorovodInternalError, match="not possible after join"):
            hvd.allgather(torch.ones(1), name="all")
        with pytest.raises(hvd.HorovodInternalError, match="not possible after join"):
            hvd.broadcast(torch.ones(1), rank, name="one")
    last = hvd.join()
    unnamed = hvd.allreduce(torch.tensor([float(rank)]), op=hvd.Sum).item()  # matches though calls were not as many
    hvd.allgather(torch.ones(1))
    return found, last, unnamed


def test_a_rank_that_has_joined_takes_part_with_zeros(pool: Pool) -> None:
    for _, last, unnamed in run(pool, 3, uneven, [4, 2, 1]):
        assert last == 0 and unnamed == 3.0


def with_sets() -> None:
    rank = hvd.rank()
    even, pair = hvd.ProcessSet([2, 0]), hvd.add_process_set([1, 2])
    hvd.add_process_set(even)
    assert even.ranks == [0, 2] and even.included() == (rank != 1) and pair.size() == 2
    if even.included():
        assert even.rank() == rank // 2
        assert hvd.allreduce(torch.tensor([float(rank)]), op=hvd.Sum, process_set=even, name="x").item() == 2.0
        assert hvd.broadcast(torch.tensor([rank]), 2, process_set=even).item() == 2  # a rank of the job
        assert hvd.allgather_object(rank, process_set=even) == [0, 2]
        with pytest.raises(ValueError, match="root_rank=1"):
            hvd.broadcast(torch.tensor([rank]), 1, process_set=even)
    if pair.included():
        assert hvd.allgather(torch.tensor([rank]), process_set=pair, name="x").tolist() == [1, 2]
        hvd.barrier(process_set=pair)
    else:
        with pytest.raises(ValueError, match="no member"):
            hvd.allreduce(torch.ones(1), process_set=pair)
    with pytest.raises(ValueError, match=r"ranks \[1, 2\] already"):
        hvd.add_process_set([2, 1])
    assert hvd.global_process_set.ranks == [0, 1, 2] and not hvd.remove_process_set(hvd.global_process_set)
    assert hvd.remove_process_set(pair) and not hvd.remove_process_set(pair)
    with pytest.raises(ValueError, match="not added"):
        hvd.allreduce(torch.ones(1), process_set=pair)
    assert hvd.allreduce(torch.ones(1), op=hvd.Sum).item() == 3
    with pytest.raises(hvd.HorovodInternalError, match="add the process set of ranks 0, 1"):
        hvd.add_process_set([0, 1] if rank else [1, 2])


def test_process_sets(pool: Pool) -> None:
    run(pool, 3, with_sets)


def again_and_again() -> None:
    for number in range(3):
        pair = hvd.ProcessSet([1])
        hvd.init(process_sets=[pair] if number else None)
        hvd.init()
        assert hvd.is_initialized() and (number == 0 or pair.process_set_id == 1)
        assert hvd.allreduce(torch.ones(1), op=hvd.Sum).item() == 2
        hvd.shutdown()
        hvd.shutdown()
        assert not hvd.is_initialized()
        with pytest.raises(ValueError, match="has not been initialized"):
            hvd.rank()


def test_it_may_be_initialised_again(pool: Pool) -> None:
    pool.run(2, again_and_again)


def one_shuts_down() -> str:
    hvd.init()
    if hvd.rank() == 1:
        hvd.shutdown()
        return ""
    with pytest.raises(hvd.HorovodInternalError) as caught:
        hvd.allreduce(torch.ones(1))
    hvd.shutdown()
    return str(caught.value)


def test_a_rank_that_shuts_down_is_not_waited_for(pool: Pool) -> None:
    assert "rank 1 has called hvd.shutdown()" in pool.run(2, one_shuts_down)[0]


class Own:
    def __init__(self, value: int) -> None:
        self.value = value


def with_objects() -> None:
    rank, size = hvd.rank(), hvd.size()
    plain = {"a": (1, 2.5, None), 3: [torch.arange(3), b"x"], "s": {1, 2}, "o": collections.OrderedDict(x=1)}
    found = hvd.broadcast_object(plain if rank == 0 else None)
    assert torch.equal(found[3][0], torch.arange(3)) and found["a"] == (1, 2.5, None) and found["s"] == {1, 2}
    assert hvd.broadcast_object({"r": rank}, root_rank=size - 1, name="o") == {"r": size - 1}
    assert hvd.allgather_object([rank] * rank) == [[each] * each for each in range(size)]
    assert [each.value for each in hvd.allgather_object(Own(rank))] == list(range(size))
    assert hvd.broadcast_object(Own(rank), 1).value == 1


def test_objects(pool: Pool) -> None:
    run(pool, 2, with_objects)


def gradients() -> None:
    rank, size = hvd.rank(), hvd.size()
    x = torch.full((2, 3), float(rank + 1), dtype=torch.float64, requires_grad=True)

    def gradient_of(result: torch.Tensor) -> torch.Tensor:
        weights = torch.arange(float(result.numel()), dtype=torch.float64).view_as(result) + rank
        (found,) = torch.autograd.grad((result * weights).sum(), x)
        return found

    base = torch.arange(6.0, dtype=torch.float64).view(2, 3)
    shift = sum(range(size))
    assert torch.allclose(gradient_of(hvd.allreduce(x, op=hvd.Sum)), base * size + shift)
    assert torch.allclose(gradient_of(hvd.allreduce(x, op=hvd.Average)), (base * size + shift) / size)
    assert torch.allclose(gradient_of(hvd.grouped_allreduce([x, x * 2], op=hvd.Sum)[1]), 2 * (base * size + shift))
    at_root = gradient_of(hvd.broadcast(x, 1))
    assert torch.allclose(at_root, base * size + shift if rank == 1 else torch.zeros(2, 3, dtype=torch.float64))
    assert torch.allclose(gradient_of(hvd.allgather(x)), (base + 6 * rank) * size + shift)
    assert gradient_of(hvd.alltoall(x)).shape == x.shape
    back = gradient_of(hvd.reducescatter(x, op=hvd.Sum))
    own = torch.arange(3.0, dtype=torch.float64)
    assert torch.allclose(back, torch.stack([own, own + 1]))


def test_gradients_flow_back(pool: Pool) -> None:
    run(pool, 2, gradients)


def by_adasum() -> None:
    rank, size = hvd.rank(), hvd.size()
    parts = [torch.randn(5, generator=torch.Generator().manual_seed(each), dtype=torch.float64) for each in range(size)]
    assert torch.allclose(hvd.allreduce(parts[rank], op=hvd.Adasum), adasum(parts))
    same = torch.arange(4.0)
    assert torch.allclose(hvd.allreduce(same, op=hvd.Adasum), same)
    own = torch.zeros(size)
    own[rank] = 1.0
    assert torch.allclose(hvd.allreduce(own, op=hvd.Adasum), torch.ones(size))


@pytest.mark.parametrize("size", [2, 3])
def test_adasum_adds_what_differs_and_averages_what_is_alike(pool: Pool, size: int) -> None:
    run(pool, size, by_adasum)
