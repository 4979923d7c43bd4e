"""Every algorithm: all members get the same bits, which are the sum, and nothing is read too late."""

import itertools
from collections.abc import Callable
from itertools import pairwise

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from products import product

from comm.algorithms.members import (
    MAKES,
    OPERATIONS,
    TYPES,
    assert_close,
    in_threads,
    reference,
    simulated,
    values,
)
from hocket.comm.algorithms import collective_algorithm, halving_doubling
from hocket.comm.algorithms.hierarchical import Group, Hierarchical
from hocket.comm.bucket_layout import cut
from hocket.transport.point_to_point import Members, PointToPoint
from hocket.transport.simulated import Speed

Run = Callable[[int, Callable[[PointToPoint], object]], object]


def in_simulation(size: int, call: Callable[[PointToPoint], object]) -> None:
    simulated(size, call, Speed(1e-5, 1e8))


RUNS: dict[str, Run] = {"threads": in_threads, "simulation": in_simulation}
SIZES = range(1, 10)
COUNTS = [0, 1, 7, 1000, 70_001]


def uneven(size: int, count: int) -> list[tuple[int, int]]:
    """Slices of different lengths, of which some are empty."""
    cuts = sorted(torch.randint(0, count + 1, (size - 1,), generator=torch.Generator().manual_seed(size)).tolist())
    return list(pairwise([0, *cuts, count]))


def check_allreduce(name: str, run: Run, size: int, count: int, dtype: torch.dtype, operation: str) -> None:
    mine, algorithm = values(size, count, dtype), MAKES[name](size)
    expected = reference(mine, operation)
    again = [each.clone() for each in mine]
    run(size, lambda links: algorithm.allreduce(links, mine[links.rank], operation))
    assert all(torch.equal(each, mine[0]) for each in mine)
    assert_close(mine[0], expected, size)
    run(size, lambda links: algorithm.allreduce(links, again[links.rank], operation))
    assert torch.equal(again[0], mine[0])


@pytest.mark.few(18)
@product("name", name=MAKES, size=SIZES, count=COUNTS, run=RUNS)
def test_allreduce(name: str, size: int, count: int, run: str) -> None:
    check_allreduce(name, RUNS[run], size, count, torch.float64, "sum")


@pytest.mark.few(14)
@product("name", name=MAKES, dtype=TYPES, operation=OPERATIONS)
def test_types_and_operations(name: str, dtype: torch.dtype, operation: str) -> None:
    check_allreduce(name, in_simulation, 5, 1000, dtype, operation)


@product("name", name=MAKES, dtype=[torch.bfloat16, torch.float16], scattered=[False, True])
def test_narrow_types_lose_no_more_than_one_rounding_with_each_message(
    name: str, dtype: torch.dtype, scattered: bool
) -> None:
    """A sum of four, against one in float32 that is rounded whenever it would be sent to the next member."""
    size, count = 4, 40_000
    mine, bounds = values(size, count, dtype), cut(count, dtype, size)
    exact, hops = torch.stack(mine).double().sum(0), mine[0]
    for each in mine[1:]:
        hops = (hops.float() + each.float()).to(dtype)

    def call(links: PointToPoint) -> None:
        data = mine[links.rank]
        if scattered:
            MAKES[name](size).reduce_scatter(links, data, "sum", bounds)
        else:
            MAKES[name](size).allreduce(links, data, "sum")

    in_simulation(size, call)
    if scattered:
        mine = [torch.cat([each[slice(*part)] for each, part in zip(mine, bounds, strict=True)])]
    assert all(torch.equal(each, mine[0]) for each in mine)
    error, accepted = ((each.double() - exact).abs().mean() for each in (mine[0], hops))
    assert error <= 1.02 * accepted


@product(name=["star", "direct"], dtype=[torch.bfloat16, torch.float16])
def test_who_adds_up_all_values_rounds_once(name: str, dtype: torch.dtype) -> None:
    mine = values(5, 3000, dtype)
    expected = torch.stack(mine).float().sum(0).to(dtype)
    in_simulation(5, lambda links: MAKES[name](5).allreduce(links, mine[links.rank], "sum"))
    assert all(torch.equal(each, expected) for each in mine)


@settings(max_examples=40)
@given(
    name=st.sampled_from(sorted(MAKES)),
    size=st.integers(1, 9),
    count=st.integers(0, 5000),
    piece=st.sampled_from([64, 256, 4096]),
)
def test_pieces_of_any_length(name: str, size: int, count: int, piece: int) -> None:
    with pytest.MonkeyPatch.context() as patch:
        for module in (collective_algorithm, halving_doubling):
            patch.setattr(module, "PIECE", piece)
        check_allreduce(name, in_simulation, size, count, torch.float64, "sum")


@pytest.mark.few(18)
@product("name", name=MAKES, size=SIZES, count=COUNTS, root=[0, 1, 7], run=RUNS)
def test_reduce_and_broadcast(name: str, size: int, count: int, root: int, run: str) -> None:
    mine, algorithm, root = values(size, count, torch.float64), MAKES[name](size), root % size
    expected = reference(mine, "sum")

    def both(links: PointToPoint) -> None:
        algorithm.reduce(links, mine[links.rank], "sum", root)
        if links.rank == root:
            assert_close(mine[root], expected, size)
        else:
            mine[links.rank].fill_(-1)
        algorithm.broadcast(links, mine[links.rank], root)

    RUNS[run](size, both)
    assert all(torch.equal(each, mine[0]) for each in mine)
    assert_close(mine[0], expected, size)


@pytest.mark.few(18)
@product("name", name=MAKES, size=SIZES, count=COUNTS, run=RUNS)
def test_reduce_scatter_and_allgather(name: str, size: int, count: int, run: str) -> None:
    mine, algorithm, bounds = values(size, count, torch.float64), MAKES[name](size), uneven(size, count)
    expected = reference(mine, "sum")

    def both(links: PointToPoint) -> None:
        data, (start, end) = mine[links.rank], bounds[links.rank]
        algorithm.reduce_scatter(links, data, "sum", bounds)
        assert_close(data[start:end], expected[start:end], size)
        data[:start], data[end:] = -1, -1
        algorithm.allgather(links, data, bounds)

    RUNS[run](size, both)
    assert all(torch.equal(each, mine[0]) for each in mine)
    assert_close(mine[0], expected, size)


@pytest.mark.parametrize("name", MAKES)
def test_members_in_another_order(name: str) -> None:
    """Four of six members, in an order of their own; the other two take no part."""
    order, mine = [5, 0, 3, 2], values(6, 5000, torch.float64)
    expected = reference([mine[rank] for rank in order], "sum")

    def call(links: PointToPoint) -> None:
        if links.rank in order:
            MAKES[name](len(order)).allreduce(Members(links, order), mine[links.rank], "sum")

    in_threads(6, call)
    for rank in order:
        assert_close(mine[rank], expected, 6)


def levels(draw: st.DrawFn, ranks: list[int], depth: int) -> Group:
    if depth == 0 or len(ranks) < 2:
        return ranks
    cuts = draw(st.lists(st.integers(1, len(ranks) - 1), unique=True, max_size=3))
    return [levels(draw, ranks[a:b], depth - 1) for a, b in pairwise([0, *sorted(cuts), len(ranks)])]


@st.composite
def any_groups(draw: st.DrawFn) -> tuple[int, Group]:
    """Groups of groups, with members in any order, and branches that may end earlier than others."""
    size = draw(st.integers(1, 9))
    return size, levels(draw, draw(st.permutations(range(size))), draw(st.integers(0, 3)))


@settings(max_examples=60)
@given(made=any_groups(), count=st.integers(0, 3000), root=st.integers(0, 8))
def test_any_levels(made: tuple[int, Group], count: int, root: int) -> None:
    size, groups = made
    algorithm, mine = Hierarchical(groups), values(size, count, torch.float64)
    expected, bounds = reference(mine, "sum"), uneven(size, count)
    others = [[each.clone() for each in mine] for _ in range(2)]

    def all_of_them(links: PointToPoint) -> None:
        rank = links.rank
        algorithm.allreduce(links, mine[rank], "sum")
        algorithm.reduce(links, others[0][rank], "sum", root % size)
        algorithm.broadcast(links, others[0][rank], root % size)
        algorithm.reduce_scatter(links, others[1][rank], "sum", bounds)
        algorithm.allgather(links, others[1][rank], bounds)

    in_simulation(size, all_of_them)
    for found in itertools.chain(mine, *others):
        assert_close(found, expected, size)


@pytest.mark.parametrize("groups", [[[0, 1], [1, 2]], [[0, 2]], [[1, 2], [3]]])
def test_groups_that_are_none(groups: Group) -> None:
    with pytest.raises(ValueError, match="in one group"):
        Hierarchical(groups)
