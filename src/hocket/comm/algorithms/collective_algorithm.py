"""The contract of collectives between hosts: who sends what to whom, over messages between any two members.

There are two families. Where all members are alike (``Sliced``), each one makes the sum of a slice, and gives it to the
others. Where one member is the root (``Rooted``), the sum is made on the way to it, and passed on from there.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence

import torch

from hocket.comm.bucket_layout import align, cut
from hocket.comm.kernels import NARROW, PAIRWISE
from hocket.transport.point_to_point import PointToPoint

Bounds = Sequence[tuple[int, int]]
"""The first element of each member's slice, and the one after its last; slices follow each other, and may be empty."""

PIECE, _LEAST = 1 << 21, 1 << 18  # bytes that travel as one message, at most, and where there are more of them
_PIECES = 8  # messages for a part between these bounds: the first can be passed on while the last one is under way
_AT_ONCE = (1 << 15) - 64  # elements that torch adds up in the calling thread, without threads of its own


class CollectiveAlgorithm(ABC):
    """A way in which the members of a group carry out collectives. Objects have no state, and serve any group.

    All members call each method together, with ``data`` that is flat, contiguous, and of the same length and type. An
    operation is ``sum``, ``max``, ``min`` or ``product``. Each result is made once and then copied, so all members get
    the same bits. Which values are added first depends on the algorithm, the number of elements, and the order in which
    the members take part, and on nothing else: where these are the same, every run has the same bits.
    """

    name: str
    """What the algorithm is called in settings and reports."""

    @abstractmethod
    def allreduce(self, links: PointToPoint, data: torch.Tensor, operation: str) -> None:
        """Replace ``data`` by the result over all members."""

    @abstractmethod
    def reduce(self, links: PointToPoint, data: torch.Tensor, operation: str, root: int) -> None:
        """Replace ``data`` of ``root`` by the result; what others have in ``data`` then is of no use."""

    @abstractmethod
    def broadcast(self, links: PointToPoint, data: torch.Tensor, root: int) -> None:
        """Replace ``data`` by that of ``root``."""

    @abstractmethod
    def reduce_scatter(self, links: PointToPoint, data: torch.Tensor, operation: str, bounds: Bounds) -> None:
        """Replace each member's slice of its ``data`` by the result; the rest of ``data`` is of no use then."""

    @abstractmethod
    def allgather(self, links: PointToPoint, data: torch.Tensor, bounds: Bounds) -> None:
        """Replace each slice of ``data`` by that of the member whose slice it is."""


class Sliced(CollectiveAlgorithm):
    """All members do the same: a reduce-scatter, and the same way back, an all-gather."""

    def allreduce(self, links: PointToPoint, data: torch.Tensor, operation: str) -> None:
        bounds = cut(data.numel(), data.dtype, links.size)
        self.reduce_scatter(links, data, operation, bounds)
        self.allgather(links, data, bounds)

    def reduce(self, links: PointToPoint, data: torch.Tensor, operation: str, root: int) -> None:
        bounds = cut(data.numel(), data.dtype, links.size)
        self.reduce_scatter(links, data, operation, bounds)
        gather(links, slices(data, bounds), root)

    def broadcast(self, links: PointToPoint, data: torch.Tensor, root: int) -> None:
        bounds = cut(data.numel(), data.dtype, links.size)
        scatter(links, slices(data, bounds), root)
        self.allgather(links, data, bounds)


class Rooted(CollectiveAlgorithm):
    """One member is the root, rank 0 if nobody says which."""

    def allreduce(self, links: PointToPoint, data: torch.Tensor, operation: str) -> None:
        self.reduce(links, data, operation, 0)
        self.broadcast(links, data, 0)

    def reduce_scatter(self, links: PointToPoint, data: torch.Tensor, operation: str, bounds: Bounds) -> None:
        self.reduce(links, data, operation, 0)
        scatter(links, slices(data, bounds), 0)

    def allgather(self, links: PointToPoint, data: torch.Tensor, bounds: Bounds) -> None:
        gather(links, slices(data, bounds), 0)
        self.broadcast(links, data, 0)


def gather(links: PointToPoint, parts: Sequence[torch.Tensor], root: int) -> None:
    """Replace each of the ``parts`` of ``root`` by that of the member whose part it is; others need their own only."""
    if links.rank != root:
        for piece in pieces(parts[links.rank]):
            links.send(root, piece)
        links.flush()
        return
    for source, part in enumerate(parts):
        for piece in pieces(part) if source != root else ():
            links.receive(source, piece)


def scatter(links: PointToPoint, parts: Sequence[torch.Tensor], root: int) -> None:
    """Replace each member's part by that of ``root``; others than ``root`` need their own part only."""
    if links.rank != root:
        for piece in pieces(parts[links.rank]):
            links.receive(root, piece)
        return
    for to, part in enumerate(parts):
        for piece in pieces(part) if to != root else ():
            links.send(to, piece)
    links.flush()


def slices(data: torch.Tensor, bounds: Bounds) -> list[torch.Tensor]:
    """The slice of each member."""
    return [data[start:end] for start, end in bounds]


def pieces(data: torch.Tensor, least: int = _LEAST) -> list[torch.Tensor]:
    """The parts of ``data`` that travel as one message each; the same on all members."""
    if not data.numel():
        return []
    nbytes = min(max(data.nbytes // _PIECES, least), PIECE)
    return list(data.split(align(nbytes // data.dtype.itemsize, data.dtype)))


def room_for(parts: Sequence[torch.Tensor], data: torch.Tensor) -> torch.Tensor:
    """Memory for any one of ``parts`` that comes from another member."""
    return data.new_empty(max((part.numel() for part in parts), default=0))


def receive_and_combine(
    links: PointToPoint, sources: Sequence[int], part: torch.Tensor, came: torch.Tensor, operation: str
) -> None:
    """Receive what other members have for ``part`` into ``came``, and combine it with what this one has.

    Types of less than 32 bits are rounded once, however many members there are.
    """
    came, whole = came[: part.numel()], widened(part) if len(sources) > 1 else part
    for source in sources:
        links.receive(source, came)
        combine(whole, came, operation)
    if whole is not part:
        part.copy_(whole)


def widened(data: torch.Tensor) -> torch.Tensor:
    """A copy in float32 of data of less than 32 bits; other data itself."""
    return data.float() if data.dtype in NARROW else data


def combine(part: torch.Tensor, came: torch.Tensor, operation: str) -> None:
    """Replace ``part`` by its sum, maximum, minimum or product with ``came``, in the type of ``part``.

    Torch adds two numbers of less than 32 bits in float32, and rounds the result.
    """
    if part.is_meta:
        return  # a rehearsal, for what is sent and received
    pairwise = PAIRWISE[operation]
    for mine, theirs in zip(part.split(_AT_ONCE), came.split(_AT_ONCE), strict=True):
        pairwise(mine, theirs, out=mine)
