"""Half of what is left goes to a far member, then half of that to a nearer one: few rounds, and as few bytes as a ring.

After ⌈log₂ P⌉ rounds of a reduce-scatter each member has the sum of its own slice, and the same way back gives it to
all: 2 · ⌈log₂ P⌉ rounds, in which each member sends and receives 2 · (P - 1) / P of the tensor. Distances are halved
and rounded up (P, ⌈P/2⌉, …, 1), and a member sends to the one that far ahead and gets from the one that far behind,
where the older algorithm swaps in pairs. So this holds for any number of members: one that is no power of two costs
neither a round nor a byte more.

Träff, "Optimal, non-pipelined reduce-scatter and allreduce algorithms", 2024; for powers of two, Rabenseifner, 2004.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator

import torch

from hocket.comm.algorithms.collective_algorithm import PIECE, Bounds, Sliced, combine, pieces, widened
from hocket.transport.point_to_point import PointToPoint


class HalvingDoubling(Sliced):
    """Reduce-scatter by halving the distance, and all-gather by doubling it."""

    name = "halving_doubling"

    def reduce_scatter(self, links: PointToPoint, data: torch.Tensor, operation: str, bounds: Bounds) -> None:
        rank, size = links.rank, links.size
        came, whole = data.new_empty(0), widened(data)
        for near, far in _distances(size):
            for parts in _messages(data, bounds, rank + near, far - near):
                for part in parts:
                    _take(part, data, whole)
                links.send((rank + near) % size, *parts)
            for parts in _messages(data, bounds, rank, far - near):
                count = sum(part.numel() for part in parts)
                came = came if came.numel() >= count else data.new_empty(count)
                links.receive((rank - near) % size, came[:count])
                for part, theirs in zip(parts, came[:count].split([part.numel() for part in parts]), strict=True):
                    combine(_same_place(part, data, whole), theirs, operation)
        _take(data[slice(*bounds[rank])], data, whole)
        links.flush()

    def allgather(self, links: PointToPoint, data: torch.Tensor, bounds: Bounds) -> None:
        rank, size = links.rank, links.size
        for near, far in reversed(_distances(size)):
            for parts in _messages(data, bounds, rank, far - near):
                links.send((rank - near) % size, *parts)
            for parts in _messages(data, bounds, rank + near, far - near):
                links.receive((rank + near) % size, *parts)
        links.flush()


def _same_place(part: torch.Tensor, data: torch.Tensor, whole: torch.Tensor) -> torch.Tensor:
    """What ``whole`` has in the place that ``part`` has in ``data``."""
    start = part.storage_offset() - data.storage_offset()
    return whole[start : start + part.numel()]


def _take(part: torch.Tensor, data: torch.Tensor, whole: torch.Tensor) -> None:
    """Round to ``part`` of ``data`` what was added up in ``whole``, if that is another tensor."""
    if whole is not data:
        part.copy_(_same_place(part, data, whole))


def _distances(size: int) -> list[tuple[int, int]]:
    """For each round, how far ahead a member sends, and of how many slices it still adds up before."""
    halves = [size]
    while halves[-1] > 1:
        halves.append(-(-halves[-1] // 2))
    return [(near, far) for far, near in itertools.pairwise(halves)]


def _messages(data: torch.Tensor, bounds: Bounds, first: int, count: int) -> Iterator[list[torch.Tensor]]:
    """The slices of ``count`` members from ``first`` on, round the end, as the parts of one message or of several."""
    size, first = len(bounds), first % len(bounds)
    last = first + count
    runs = [(first, min(last, size)), (0, last - size)]
    parts = [data[bounds[a][0] : bounds[b - 1][1]] for a, b in runs if b > a]
    if sum(part.nbytes for part in parts) <= PIECE:
        if parts := [part for part in parts if part.numel()]:
            yield parts
        return
    for part in parts:
        for piece in pieces(part):
            yield [piece]
