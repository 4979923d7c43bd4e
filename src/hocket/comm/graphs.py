"""Graphs of gossip: who mixes with whom, and by how much, among the workers that take part in a round.

Everything here follows from the members, the round and the seed, so that workers that know the same members agree
without a word. Members are any ranks: when one is lost, the graph is made anew over those that are left. This module
imports no torch.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import lru_cache

from hocket.specs.local_steps import rows_of_torus


@dataclass(frozen=True)
class Graph:
    """A topology over whatever members a round has.

    Attributes:
        topology: ``ring``, ``torus``, ``exponential``, ``complete`` or ``pairs``; a torus of a prime number of members
            is a ring.
        seed: The seed of the pairs that are drawn anew in every round.
    """

    topology: str = "ring"
    seed: int = 0

    def neighbours(self, members: Sequence[int], rank: int, number: int = 0) -> dict[int, float]:
        """The ranks with which ``rank`` mixes in round ``number``, and their weights; the rest of 1 is its own weight.

        These are the weights of Metropolis and Hastings, which are doubly stochastic and symmetric: 1 over one more
        than the larger degree of the two members; so in regular graphs all weights are equal.
        """
        ordered, count = sorted(members), len(members)
        place = ordered.index(rank)
        if self.topology == "pairs":
            other = _partner(count, place, self.seed, number)
            return {} if other is None else {ordered[other]: 0.5}
        reach = _REACH[self.topology]
        mine = reach(count, place)
        return {ordered[other]: 1 / (1 + max(len(mine), len(reach(count, other)))) for other in sorted(mine)}

    def successors(self, members: Sequence[int], rank: int, number: int = 0) -> list[int]:
        """The ranks to which ``rank`` sends in round ``number`` of push-sum, whose edges are directed and change.

        The rank sends an equal share to each, and keeps one.
        """
        ordered = sorted(members)
        place = ordered.index(rank)
        return [ordered[(place + hop) % len(ordered)] for hop in self._hops(len(ordered), number)]

    def predecessors(self, members: Sequence[int], rank: int, number: int = 0) -> list[int]:
        """The ranks from which ``rank`` hears in round ``number`` of push-sum."""
        ordered = sorted(members)
        place = ordered.index(rank)
        return [ordered[(place - hop) % len(ordered)] for hop in self._hops(len(ordered), number)]

    def cycle(self, count: int) -> int:
        """After how many rounds the graphs of push-sum come again."""
        if self.topology == "exponential":
            return max(1, len(_powers(count)))
        return 2 if self.topology == "torus" and rows_of_torus(count) > 1 else 1

    def mixing(self, count: int, number: int = 0) -> list[list[float]]:
        """The doubly stochastic matrix of round ``number``: row i has the weights with which member i mixes."""
        matrix = [[0.0] * count for _ in range(count)]
        for i in range(count):
            found = self.neighbours(range(count), i, number)
            for j, weight in found.items():
                matrix[i][j] = weight
            matrix[i][i] = 1 - sum(found.values())
        return matrix

    def pushing(self, count: int, number: int = 0) -> list[list[float]]:
        """The matrix of round ``number`` of push-sum, whose columns sum to 1: column i is what member i sends."""
        matrix = [[0.0] * count for _ in range(count)]
        for i in range(count):
            targets = self.successors(range(count), i, number)
            for j in (i, *targets):
                matrix[j][i] = 1 / (1 + len(targets))
        return matrix

    def expected(self, count: int) -> list[list[float]]:
        """The mean of ``mixing`` over all rounds: the matrix itself, but for pairs."""
        if self.topology != "pairs" or count < 2:
            return self.mixing(count)
        chance = 1 / (count - 1 if count % 2 == 0 else count)  # the chance that two given members are a pair
        return [[1 - (count - 1) * chance / 2 if i == j else chance / 2 for j in range(count)] for i in range(count)]

    def _hops(self, count: int, number: int) -> list[int]:
        if count < 2:
            return []
        if self.topology == "complete":
            return list(range(1, count))
        if self.topology == "exponential":
            powers = _powers(count)
            return [powers[number % len(powers)]]
        if self.topology == "torus" and (rows := rows_of_torus(count)) > 1:
            return [1 if number % 2 == 0 else count // rows]
        return [1]


def is_connected(matrix: Sequence[Sequence[float]]) -> bool:
    """Whether what one member knows reaches all others, sooner or later."""
    reached, fresh = {0}, {0}
    while fresh:
        fresh = {j for i in fresh for j, row in enumerate(matrix) if row[i] > 0} - reached
        reached |= fresh
    return len(reached) == len(matrix)


def _ring(count: int, place: int) -> set[int]:
    return {(place + hop) % count for hop in (1, -1)} - {place}


def _torus(count: int, place: int) -> set[int]:
    rows = rows_of_torus(count)
    if rows < 2:
        return _ring(count, place)
    width = count // rows
    row, column = divmod(place, width)
    beside = {row * width + (column + hop) % width for hop in (1, -1)}
    above = {(row + hop) % rows * width + column for hop in (1, -1)}
    return (beside | above) - {place}


def _exponential(count: int, place: int) -> set[int]:
    return {(place + hop * sign) % count for hop in _powers(count) for sign in (1, -1)} - {place}


def _complete(count: int, place: int) -> set[int]:
    return set(range(count)) - {place}


_REACH: dict[str, Callable[[int, int], set[int]]] = {
    "ring": _ring,
    "torus": _torus,
    "exponential": _exponential,
    "complete": _complete,
}


def _powers(count: int) -> list[int]:
    """1, 2, 4 … below ``count``."""
    return [1 << k for k in range(max(0, count - 1).bit_length())]


@lru_cache(maxsize=64)
def _matching(count: int, seed: int, number: int) -> tuple[int, ...]:
    order = list(range(count))
    random.Random(f"{seed} {number}").shuffle(order)
    return tuple(order)


def _partner(count: int, place: int, seed: int, number: int) -> int | None:
    """The place of the member's partner; None if it rests, as one does in an odd number of members."""
    order = _matching(count, seed, number)
    at = order.index(place)
    other = at ^ 1
    return order[other] if other < count else None
