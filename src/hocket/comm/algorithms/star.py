"""One member takes what all others have, and gives them the result: the shape of a parameter server with one server.

Two rounds, but all 2 · N · (P - 1) bytes go through the root: best where messages are small and members few.
"""

from __future__ import annotations

import torch

from hocket.comm.algorithms.collective_algorithm import Rooted, pieces, receive_and_combine, room_for
from hocket.transport.point_to_point import PointToPoint


class Star(Rooted):
    """Everyone sends to the root, and gets the result from it, piece by piece."""

    name = "star"

    def allreduce(self, links: PointToPoint, data: torch.Tensor, operation: str) -> None:
        self._carry_out(links, data, operation, 0, collects=True, spreads=True)

    def reduce(self, links: PointToPoint, data: torch.Tensor, operation: str, root: int) -> None:
        self._carry_out(links, data, operation, root, collects=True, spreads=False)

    def broadcast(self, links: PointToPoint, data: torch.Tensor, root: int) -> None:
        self._carry_out(links, data, "", root, collects=False, spreads=True)

    def _carry_out(
        self, links: PointToPoint, data: torch.Tensor, operation: str, root: int, *, collects: bool, spreads: bool
    ) -> None:
        parts = pieces(data)
        if links.rank != root:
            for piece in parts if collects else ():
                links.send(root, piece)
            for piece in parts if spreads else ():
                links.receive(root, piece)
            links.flush()
            return
        others = [rank for rank in range(links.size) if rank != root]
        came = room_for(parts, data)
        for piece in parts:
            if collects:
                receive_and_combine(links, others, piece, came, operation)
            for other in others if spreads else ():
                links.send(other, piece)
        links.flush()
