"""Every member sends to every other at once: one round, and so best for small tensors.

For an all-reduce each member sends the whole of its tensor to all others, N · (P - 1) bytes, and adds up what has come
in the order of the ranks. In the other collectives only slices travel.
"""

from __future__ import annotations

import torch

from hocket.comm.algorithms.collective_algorithm import Bounds, Sliced, pieces, receive_and_combine, room_for, slices
from hocket.comm.kernels import reduce_into
from hocket.transport.point_to_point import PointToPoint


class Direct(Sliced):
    """All to all, in one round."""

    name = "direct"

    def allreduce(self, links: PointToPoint, data: torch.Tensor, operation: str) -> None:
        if links.size == 1 or not data.numel():
            return
        rank, size = links.rank, links.size
        came = list(data.new_empty(size - 1, data.numel()).unbind())
        parts = [*came[:rank], data, *came[rank:]]
        for distance in range(1, size):
            for piece in pieces(data):
                links.send((rank + distance) % size, piece)
        for distance in range(1, size):
            for piece in pieces(parts[(rank - distance) % size]):
                links.receive((rank - distance) % size, piece)
        links.flush()
        if data.is_meta:
            return  # a rehearsal
        total = data if size == 2 else parts[0]
        reduce_into(total, parts, operation)
        if total is not data:
            data.copy_(total)

    def reduce_scatter(self, links: PointToPoint, data: torch.Tensor, operation: str, bounds: Bounds) -> None:
        rank, size = links.rank, links.size
        parts = [pieces(part) for part in slices(data, bounds)]
        came = room_for(parts[rank], data)
        for distance in range(1, size):
            for piece in parts[(rank + distance) % size]:
                links.send((rank + distance) % size, piece)
        sources = [(rank - distance) % size for distance in range(1, size)]
        for piece in parts[rank]:
            receive_and_combine(links, sources, piece, came, operation)
        links.flush()

    def allgather(self, links: PointToPoint, data: torch.Tensor, bounds: Bounds) -> None:
        rank, size = links.rank, links.size
        parts = [pieces(part) for part in slices(data, bounds)]
        for distance in range(1, size):
            for piece in parts[rank]:
                links.send((rank + distance) % size, piece)
        for distance in range(1, size):
            for piece in parts[(rank - distance) % size]:
                links.receive((rank - distance) % size, piece)
        links.flush()
