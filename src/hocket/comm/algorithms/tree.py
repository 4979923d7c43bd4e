"""A sum is made on the way up a tree, and passed down the same tree: few rounds, whatever the number of members.

The root has one child, below which the tree is binary: member v, counted from the root, is below member v // 2, and as
deep as v has binary digits. So the tree is ⌈log₂ P⌉ deep, and nobody has more than three neighbours. Large tensors
travel in pieces: while the first ones are on the way down, the last ones are still on the way up.

Sanders, Speck and Träff, "Two-tree algorithms for full bandwidth broadcast, reduction and scan", 2009, for one tree.
"""

from __future__ import annotations

import torch

from hocket.comm.algorithms.collective_algorithm import Rooted, pieces, receive_and_combine, room_for
from hocket.transport.point_to_point import PointToPoint


class Tree(Rooted):
    """Reduce to a root and back along a binary tree, pipelined."""

    name = "tree"

    def allreduce(self, links: PointToPoint, data: torch.Tensor, operation: str) -> None:
        place = _Place(links, data, operation, 0)
        # A piece comes back when it has been up to the root and down again, one step for each edge. Members further
        # down must never come earlier to what the same piece needs, or two of them would wait for each other.
        lag = 2 * place.depth
        for step in range(len(place.pieces) + lag):
            if step < len(place.pieces):
                place.up(step)
            if step >= lag:
                place.down(step - lag)
        links.flush()

    def reduce(self, links: PointToPoint, data: torch.Tensor, operation: str, root: int) -> None:
        place = _Place(links, data, operation, root)
        for number in range(len(place.pieces)):
            place.up(number)
        links.flush()

    def broadcast(self, links: PointToPoint, data: torch.Tensor, root: int) -> None:
        place = _Place(links, data, "", root)
        for number in range(len(place.pieces)):
            place.down(number)
        links.flush()


class _Place:
    """A member's place in the tree."""

    def __init__(self, links: PointToPoint, data: torch.Tensor, operation: str, root: int) -> None:
        rank, size = links.rank, links.size
        own = (rank - root) % size
        self.depth = own.bit_length()
        self._parent = (own // 2 + root) % size if own else None
        below = [2 * own, 2 * own + 1] if own else [1]
        self._children = [(child + root) % size for child in below if child < size]
        self.pieces = pieces(data)
        self._links, self._operation, self._came = links, operation, room_for(self.pieces, data)

    def up(self, number: int) -> None:
        """Add up a piece over all members below this one, and send the sum to the parent."""
        piece = self.pieces[number]
        receive_and_combine(self._links, self._children, piece, self._came, self._operation)
        if self._parent is not None:
            self._links.send(self._parent, piece)

    def down(self, number: int) -> None:
        """Take the result from the parent, and pass it on."""
        piece = self.pieces[number]
        if self._parent is not None:
            self._links.receive(self._parent, piece)
        for child in self._children:
            self._links.send(child, piece)
