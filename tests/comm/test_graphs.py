"""Laws of the graphs of gossip: means are preserved, everyone is reached, and known gaps are found."""

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from hocket.comm.graphs import Graph, is_connected
from hocket.comm.spectrum import gap, second
from hocket.specs.local_steps import TOPOLOGIES

MEMBERS = st.sets(st.integers(0, 60), min_size=1, max_size=17).map(sorted)
ROUNDS = st.integers(0, 1000)


@given(topology=st.sampled_from(TOPOLOGIES), count=st.integers(1, 17), number=ROUNDS, seed=st.integers(0, 9))
def test_mixing_preserves_the_mean_and_is_symmetric(topology: str, count: int, number: int, seed: int) -> None:
    graph = Graph(topology, seed)
    matrix = torch.tensor(graph.mixing(count, number), dtype=torch.float64)
    assert (matrix >= 0).all() and torch.equal(matrix, matrix.T)
    assert torch.allclose(matrix.sum(0), torch.ones(count, dtype=torch.float64), atol=1e-12)
    assert torch.allclose(matrix.sum(1), torch.ones(count, dtype=torch.float64), atol=1e-12)
    assert is_connected(graph.expected(count))
    if topology != "pairs":
        assert is_connected(matrix.tolist())


@given(topology=st.sampled_from(TOPOLOGIES[:4]), count=st.integers(1, 17))
def test_push_sum_loses_nothing_and_reaches_everyone_in_a_cycle(topology: str, count: int) -> None:
    graph, reached = Graph(topology), torch.eye(count, dtype=torch.float64)
    for number in range(graph.cycle(count)):
        matrix = torch.tensor(graph.pushing(count, number), dtype=torch.float64)
        assert torch.allclose(matrix.sum(0), torch.ones(count, dtype=torch.float64), atol=1e-12)
        reached = matrix @ reached
    assert is_connected(reached.tolist())
    if topology == "exponential" and count & (count - 1) == 0:
        assert torch.allclose(reached, torch.full_like(reached, 1 / count))  # the exact mean


@given(topology=st.sampled_from(TOPOLOGIES), members=MEMBERS, number=ROUNDS, push_sum=st.booleans())
def test_workers_that_know_the_same_members_agree(
    topology: str, members: list[int], number: int, push_sum: bool
) -> None:
    graph = Graph(topology)
    for rank in members:
        if push_sum and topology != "pairs":
            for other in graph.successors(members, rank, number):
                assert rank in graph.predecessors(members, other, number) and other != rank
        for other, weight in graph.neighbours(members, rank, number).items():
            assert graph.neighbours(members, other, number)[rank] == weight and other != rank


@given(count=st.integers(1, 17), number=ROUNDS, seed=st.integers(0, 9))
def test_of_pairs_at_most_one_rests(count: int, number: int, seed: int) -> None:
    graph = Graph("pairs", seed)
    resting = [rank for rank in range(count) if not graph.neighbours(range(count), rank, number)]
    assert len(resting) == count % 2


@given(count=st.integers(2, 17))
def test_the_gap_of_the_complete_graph_is_1(count: int) -> None:
    assert gap(Graph("complete"), count) == pytest.approx(1.0)
    assert gap(Graph("complete"), count, push_sum=True) == pytest.approx(1.0)


@given(count=st.integers(3, 17))
def test_the_gap_of_the_ring(count: int) -> None:
    eigenvalues = [abs(1 / 3 + 2 / 3 * math.cos(2 * math.pi * k / count)) for k in range(1, count)]
    assert gap(Graph("ring"), count) == pytest.approx(1 - max(eigenvalues))
    assert gap(Graph("ring"), count, push_sum=True) == pytest.approx(1 - math.cos(math.pi / count))


def test_other_gaps() -> None:
    assert gap(Graph("torus"), 16) > gap(Graph("ring"), 16)
    assert gap(Graph("torus"), 7) == gap(Graph("ring"), 7)  # it does not fit any more
    assert gap(Graph("exponential"), 16) > gap(Graph("torus"), 16)
    assert gap(Graph("exponential"), 8, push_sum=True) == pytest.approx(1.0)
    assert gap(Graph("pairs"), 4) == pytest.approx(4 / 6) and gap(Graph("pairs"), 5) == pytest.approx(0.5)
    assert gap(Graph("ring"), 1) == 1.0


@pytest.mark.parametrize("count", [4, 5])
def test_the_expected_matrix_of_pairs_is_their_mean(count: int) -> None:
    graph, rounds = Graph("pairs"), 4000
    mean = sum(torch.tensor(graph.mixing(count, number), dtype=torch.float64) for number in range(rounds)) / rounds
    assert torch.allclose(mean, torch.tensor(graph.expected(count), dtype=torch.float64), atol=0.03)
    assert second(graph.expected(count)) < 1
