"""The contract of messages between any two members of a group, whatever carries them; collectives are made of these."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import torch


class PointToPoint(Protocol):
    """Messages between any two members of a group. Those from one member to another come in the order sent.

    Tensors are contiguous, and on the CPU.

    Attributes:
        rank: The rank of this member in the group.
        size: How many members the group has.
    """

    @property
    def rank(self) -> int: ...
    @property
    def size(self) -> int: ...

    def send(self, to: int, *parts: torch.Tensor) -> None:
        """Have ``parts`` sent as one message; waits for no other member.

        They must stay as they are until ``flush``, or until something has come that could not without them.
        """

    def receive(self, source: int, *into: torch.Tensor) -> None:
        """Wait for the next message of ``source``, which fills ``into``; it may have been cut into other parts."""

    def flush(self) -> None:
        """Wait until all that was sent is on its way."""


class Members:
    """Some members of a group as a group of their own, or all of them in another order; see ``PointToPoint``.

    Args:
        links: The messages of the whole group.
        members: The rank in it of each member of the smaller one, by its rank there.
    """

    def __init__(self, links: PointToPoint, members: Sequence[int]) -> None:
        self._links, self._members = links, members
        self.rank, self.size = members.index(links.rank), len(members)

    def send(self, to: int, *parts: torch.Tensor) -> None:
        self._links.send(self._members[to], *parts)

    def receive(self, source: int, *into: torch.Tensor) -> None:
        self._links.receive(self._members[source], *into)

    def flush(self) -> None:
        self._links.flush()
