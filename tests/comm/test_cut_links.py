"""Which host goes if two do not reach each other."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hocket.comm.cut_links import judge


@pytest.mark.parametrize(
    ("hosts", "silent", "goes", "why"),
    [
        ("abc", {1: [2]}, {2}, "b and c do not reach each other, though all reach the coordinator"),
        ("abc", {2: [1]}, {2}, "b and c do not reach each other, though all reach the coordinator"),
        ("abcc", {1: [2, 3]}, {1}, "b and c do not reach each other, though all reach the coordinator"),
        ("abb", {0: [2]}, {1, 2}, "a and b do not reach each other, though all reach the coordinator"),
        ("abcd", {1: [2], 3: [1]}, {1}, "b and c do not reach each other; b and d do not reach each other, though all "
         "reach the coordinator"),
        ("aab", {0: [1]}, set(), ""),
        ("ab", {0: [7]}, set(), ""),
    ],
)  # fmt: skip
def test_who_goes(hosts: str, silent: dict[int, list[int]], goes: set[int], why: str) -> None:
    assert judge(range(len(hosts)), dict(enumerate(hosts)), silent) == (frozenset(goes), why)


@given(st.lists(st.sampled_from("abcde"), min_size=2, max_size=8), st.data())
def test_those_who_stay_reach_each_other(hosts: list[str], data: st.DataObject) -> None:
    ranks = st.integers(0, len(hosts) - 1)
    silent = data.draw(st.dictionaries(ranks, st.lists(ranks, max_size=3)))
    named = dict(enumerate(hosts))
    goes = judge(range(len(hosts)), named, silent).goes
    assert 0 not in goes
    stay = {hosts[rank] for rank in named if rank not in goes}
    assert not stay & {hosts[rank] for rank in goes}
    cut = {frozenset((hosts[one], hosts[other])) for one, others in silent.items() for other in others}
    assert not [pair for pair in cut if len(pair) == 2 and pair <= stay]
