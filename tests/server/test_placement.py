"""Every element of every tensor is on one server, and servers have about the same to do."""

from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from hocket.server import rule
from hocket.server.dense import DenseShard
from hocket.server.placement import _SMALL, METHODS, Placement, place
from hocket.server.terms import Definition, Slice, Terms

SIZES = st.integers(0, 70) | st.integers(_SMALL - 2, _SMALL + 2) | st.integers(0, 200_000)
DTYPES = st.sampled_from(["float64", "float32", "bfloat16"])
TENSORS = st.lists(st.tuples(SIZES, DTYPES), min_size=1, max_size=12)


def make(described: list[tuple[int, str]]) -> list[torch.Tensor]:
    return [torch.empty(size, dtype=getattr(torch, dtype)) for size, dtype in described]


def check(found: Placement, tensors: list[torch.Tensor], servers: int) -> None:
    assert len(found.slices) == servers
    covered = [torch.zeros(tensor.numel(), dtype=torch.int8) for tensor in tensors]
    present = [0] * len(tensors)
    for part in found.slices:
        for each in part:
            where = found.layout.places[each.index]
            bucket = found.layout.buckets[each.bucket]
            assert each.bucket == where.bucket
            assert where.start <= each.start <= each.end <= where.end
            assert each.start * bucket.dtype.itemsize % 64 == 0, "a cut within a cache line"
            assert each.end == where.end or each.end * bucket.dtype.itemsize % 64 == 0
            covered[each.index][each.start - where.start : each.end - where.start] += 1
            present[each.index] += 1
        order = [(each.bucket, each.start) for each in part]
        assert order == sorted(order)
    for i, each in enumerate(covered):
        assert torch.all(each == 1), f"tensor {i} is not on exactly one server"
        assert present[i] >= 1, f"tensor {i} is on no server"


@settings(max_examples=150)
@given(described=TENSORS, servers=st.integers(1, 7), method=st.sampled_from(METHODS), whole=st.booleans())
def test_every_element_is_on_one_server(
    described: list[tuple[int, str]], servers: int, method: str, whole: bool
) -> None:
    tensors = make(described)
    found = place(tensors, [0] * len(tensors), servers, method, whole=whole)
    check(found, tensors, servers)
    if whole or method != "partitioned":
        owners = [each.index for part in found.slices for each in part]
        assert sorted(owners) == list(range(len(tensors)))
    if whole:
        assert all(each.shape == tuple(tensors[each.index].shape) for part in found.slices for each in part)


@settings(max_examples=60)
@given(described=TENSORS, servers=st.integers(1, 5), method=st.sampled_from(METHODS))
def test_a_server_can_hold_what_it_is_given(described: list[tuple[int, str]], servers: int, method: str) -> None:
    """The parts lie there as in the workers' buffers, without gaps."""
    tensors = make(described)
    found = place(tensors, [0] * len(tensors), servers, method, whole=False)
    buckets = tuple((str(b.dtype).removeprefix("torch."), b.count) for b in found.layout.buckets)
    rules = rule.describe(torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))]))
    for part in found.slices:
        definition = Definition(0, 1, Terms(), rules, buckets, tuple(part))
        assert Definition.from_data(definition.as_data()) == definition
        shard = DenseShard(definition)
        assert sum(flat.numel() for flat in shard.flats) >= sum(each.count for each in part)


@given(
    sizes=st.lists(st.integers(1, 300_000), min_size=1, max_size=15),
    servers=st.integers(1, 6),
)
@settings(max_examples=100)
def test_parts_are_equal_but_for_small_tensors(sizes: list[int], servers: int) -> None:
    tensors = [torch.empty(size, device="meta") for size in sizes]
    found = place(tensors, [0] * len(tensors), servers, "partitioned", whole=False)
    spread = max(found.loads) - min(found.loads)
    assert spread <= 4 * 2 * (_SMALL + 16 * len(sizes))  # a cut moves by half a small tensor at most, at both ends


@given(sizes=st.lists(st.integers(1, 10_000), min_size=1, max_size=30), servers=st.integers(1, 6))
@settings(max_examples=100)
def test_greedy_is_never_worse_than_the_largest_tensor(sizes: list[int], servers: int) -> None:
    tensors = [torch.empty(size, device="meta") for size in sizes]
    found = place(tensors, [0] * len(tensors), servers, "greedy", whole=False)
    assert max(found.loads) - min(found.loads) <= 4 * max(sizes)
    mean = 4 * sum(sizes) / servers
    assert max(found.loads) <= mean + 4 * max(sizes)
    assert found.imbalance == pytest.approx(max(found.loads) / mean - 1)


def test_round_robin_takes_turns() -> None:
    tensors = [torch.empty(100) for _ in range(5)]
    found = place(tensors, [0] * 5, 2, "round_robin", whole=False)
    assert [[each.index for each in part] for part in found.slices] == [[0, 2, 4], [1, 3]]
    found = place(tensors, [0] * 5, 2, "round_robin", whole=False, turns=[4, 3, 2, 1, 0])  # made in the other order
    assert [[each.index for each in part] for part in found.slices] == [[0, 2, 4], [1, 3]]
    found = place(tensors[:4], [0] * 4, 2, "round_robin", whole=False, turns=[3, 2, 1, 0])
    assert [[each.index for each in part] for part in found.slices] == [[1, 3], [0, 2]]
    assert "server 0: 0.8 kB" in "\n".join(found.describe(list("abcd")))


def test_a_reader_sees_what_is_where() -> None:
    tensors = [torch.empty(3), torch.empty(100_000)]
    lines = place(tensors, [0, 0], 2, "partitioned", whole=False).describe(["bias", "weight"])
    assert "partitioned of 2 parameters" in lines[0]
    assert "bias" in lines[1] and "weight[0:" in lines[1]
    assert "weight[" in lines[2] and lines[2].endswith(":100,000]")


@pytest.mark.parametrize(
    "change", [{"start": -64}, {"end": -1}, {"start": 128, "end": 64}, {"index": "x"}, {"bucket": None}]
)
def test_a_slice_that_makes_no_sense_is_refused(change: dict[str, Any]) -> None:
    import dataclasses

    data = dataclasses.asdict(Slice(0, 0, 0, 64, 0)) | change
    definition = Definition(0, 1, Terms(), {}, (("float32", 64),), ()).as_data() | {"slices": [data]}
    with pytest.raises((ValueError, TypeError)):
        Definition.from_data(definition)
