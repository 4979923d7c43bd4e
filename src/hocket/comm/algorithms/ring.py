"""Each member sends to the next one only, and all links are busy all the time: best for large tensors.

A slice goes round once and is added up on the way (reduce-scatter), then round once more as it is (all-gather): each
member sends and receives 2 · (P - 1) / P of the tensor, the least that is possible, in 2 · (P - 1) rounds. Slices
travel in pieces, and a member passes on a piece as soon as it has it, so that no link waits for a whole slice.

Patarasuk and Yuan, "Bandwidth optimal all-reduce algorithms for clusters of workstations", 2009.
"""

from __future__ import annotations

import torch

from hocket.comm.algorithms.collective_algorithm import Bounds, Sliced, pieces, receive_and_combine, room_for, slices
from hocket.comm.bucket_layout import cut
from hocket.transport.point_to_point import PointToPoint

_LEAST = 1 << 19  # bytes of a piece: all links are busy also with few pieces, and each message wakes a thread


class Ring(Sliced):
    """Reduce-scatter and all-gather round a ring; from and to a root, a chain along it."""

    name = "ring"

    def allreduce(self, links: PointToPoint, data: torch.Tensor, operation: str) -> None:
        bounds = cut(data.numel(), data.dtype, links.size)
        self._go_round(links, data, operation, bounds, 1, 2 * links.size - 2)

    def reduce_scatter(self, links: PointToPoint, data: torch.Tensor, operation: str, bounds: Bounds) -> None:
        self._go_round(links, data, operation, bounds, 1, links.size - 1)

    def allgather(self, links: PointToPoint, data: torch.Tensor, bounds: Bounds) -> None:
        self._go_round(links, data, "", bounds, links.size, 2 * links.size - 2)

    def reduce(self, links: PointToPoint, data: torch.Tensor, operation: str, root: int) -> None:
        left, right = _neighbours(links)
        parts = pieces(data)
        came = room_for(parts, data)
        for piece in parts:
            if left != root:
                receive_and_combine(links, [left], piece, came, operation)
            if links.rank != root:
                links.send(right, piece)
        links.flush()

    def broadcast(self, links: PointToPoint, data: torch.Tensor, root: int) -> None:
        left, right = _neighbours(links)
        for piece in pieces(data):
            if links.rank != root:
                links.receive(left, piece)
            if right != root:
                links.send(right, piece)
        links.flush()

    def _go_round(
        self, links: PointToPoint, data: torch.Tensor, operation: str, bounds: Bounds, first: int, last: int
    ) -> None:
        """Steps ``first`` to ``last`` of an all-reduce: the first P - 1 add up slices, the others copy them."""
        rank, size = links.rank, links.size
        left, right = _neighbours(links)
        parts = [pieces(part, _LEAST) for part in slices(data, bounds)]
        came = room_for([piece for each in parts for piece in each], data)
        for piece in parts[(rank - first) % size] if first <= last else ():
            links.send(right, piece)
        for step in range(first, last + 1):
            for piece in parts[(rank - 1 - step) % size]:
                if step < size:
                    receive_and_combine(links, [left], piece, came, operation)
                else:  # what was sent from here has been round, so that nobody reads this piece any more
                    links.receive(left, piece)
                if step < last:
                    links.send(right, piece)
        links.flush()


def _neighbours(links: PointToPoint) -> tuple[int, int]:
    return (links.rank - 1) % links.size, (links.rank + 1) % links.size
