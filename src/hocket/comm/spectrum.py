"""How fast gossip on a graph brings workers together: the spectral gap of its mixing matrix."""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache

import torch

from hocket.comm.graphs import Graph


@lru_cache
def gap(graph: Graph, members: int, *, push_sum: bool = False) -> float:
    """1 − |second largest eigenvalue|: by how much a round shortens the distance from consensus, at the slowest.

    For pairs, which are drawn anew in every round, it is the gap of the expected matrix: the mean square of the
    distance shrinks by this much in a round. For push-sum, whose graphs come again after a cycle of rounds, it is that
    of the product over a cycle, per round: 1 − |eigenvalue| ^ (1 / rounds).
    """
    if members < 2:
        return 1.0
    if not push_sum:
        return 1 - second(graph.expected(members))
    rounds = graph.cycle(members)
    product = torch.eye(members, dtype=torch.float64)
    for number in range(rounds):
        product = torch.tensor(graph.pushing(members, number), dtype=torch.float64) @ product
    return float(1 - second(product.tolist()) ** (1 / rounds))


def second(matrix: Sequence[Sequence[float]]) -> float:
    """The absolute value of the second largest eigenvalue of a matrix that keeps the mean."""
    # Without the mean, whose eigenvalue is 1 and becomes 0, the others are as they were. With it, where many of them
    # are equal, as on a complete graph, some processors find none.
    rest = torch.tensor(matrix, dtype=torch.float64) - 1 / len(matrix)
    rest[rest.abs() < 1e-14] = 0.0
    found = float(torch.linalg.eigvals(rest).abs().max()) if rest.any() else 0.0
    return found if found > 1e-12 else 0.0
