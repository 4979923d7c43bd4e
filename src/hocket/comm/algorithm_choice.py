"""Which algorithm carries an all-reduce between hosts: the one that was asked for, or the one that the links favour."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import torch

from hocket.comm.algorithms.collective_algorithm import Bounds, CollectiveAlgorithm
from hocket.comm.algorithms.direct import Direct
from hocket.comm.algorithms.halving_doubling import HalvingDoubling
from hocket.comm.algorithms.hierarchical import Hierarchical
from hocket.comm.algorithms.ring import Ring
from hocket.comm.algorithms.star import Star
from hocket.comm.algorithms.tree import Tree
from hocket.comm.link_model import LinkModel
from hocket.transport.point_to_point import Members, PointToPoint

_SMALL = 1 << 17  # bytes that a member sends to all others together, where nothing is known of the links
MOST = 32
"""Members of a group up to which links are measured: to predict all algorithms for one size takes 0.1 to 0.2 s then."""

_DIRECT = 1 << 24  # bytes that a member sends to all others together, beyond which that is not looked at
_SLOW = 1.5e8  # bytes per second up to which an exchange leaves the processor idle
_SPARE = 4  # cores of a host from which on one of them is free for an exchange

_ALIKE: dict[str, Callable[[], CollectiveAlgorithm]] = {
    "ring": Ring,
    "tree": Tree,
    "halving_doubling": HalvingDoubling,
    "star": Star,
    "direct": Direct,
}
_WITH_ROOT = ("tree", "star", "hierarchical")  # those in which some members speak for others


class Pick(NamedTuple):
    """How an all-reduce of some bytes is carried out.

    Attributes:
        algorithm: The algorithm.
        order: In which order the members take part; None is that of their ranks.
        seconds: What was predicted; None if nothing is known of the links.
    """

    algorithm: CollectiveAlgorithm
    order: Sequence[int] | None = None
    seconds: float | None = None

    def allreduce(self, links: PointToPoint, data: torch.Tensor, operation: str) -> None:
        """Replace ``data`` by the result over all members."""
        self.algorithm.allreduce(self._in_order(links), data, operation)

    def reduce(self, links: PointToPoint, data: torch.Tensor, operation: str, root: int) -> None:
        """See ``CollectiveAlgorithm``; ``root`` is the rank of a member."""
        self.algorithm.reduce(self._in_order(links), data, operation, self._place_of(root))

    def broadcast(self, links: PointToPoint, data: torch.Tensor, root: int) -> None:
        """See ``CollectiveAlgorithm``; ``root`` is the rank of a member."""
        self.algorithm.broadcast(self._in_order(links), data, self._place_of(root))

    def reduce_scatter(self, links: PointToPoint, data: torch.Tensor, operation: str, bounds: Bounds) -> None:
        """See ``CollectiveAlgorithm``; ``bounds`` has the slices of the members by rank."""
        self.algorithm.reduce_scatter(self._in_order(links), data, operation, self._ordered(bounds))

    def allgather(self, links: PointToPoint, data: torch.Tensor, bounds: Bounds) -> None:
        """See ``CollectiveAlgorithm``; ``bounds`` has the slices of the members by rank."""
        self.algorithm.allgather(self._in_order(links), data, self._ordered(bounds))

    def _in_order(self, links: PointToPoint) -> PointToPoint:
        return links if self.order is None else Members(links, self.order)

    def _place_of(self, rank: int) -> int:
        return rank if self.order is None else self.order.index(rank)

    def _ordered(self, bounds: Bounds) -> Bounds:
        """The slices in the order of the members: a ring, which alone has an order, takes them from anywhere."""
        return bounds if self.order is None else [bounds[rank] for rank in self.order]


@dataclass
class Choice:
    """Picks algorithms for the collectives of a group; the same on all members.

    Attributes:
        asked: The name of an algorithm, or ``auto``.
        size: How many members the group has.
        model: What is known of the links, if they were measured.
    """

    asked: str
    size: int
    model: LinkModel | None = None
    _picks: dict[tuple[int, bool, bool], Pick] = field(default_factory=dict)

    def learn(self, model: LinkModel) -> None:
        """The links were measured."""
        self.model = model
        self._picks.clear()

    @property
    def travels_aside(self) -> bool:
        """Whether an exchange that goes on while the script computes leaves it the processor that it needs."""
        return self.model is not None and (
            self.model.slowest < _SLOW or self.model.is_long or len(os.sched_getaffinity(0)) >= _SPARE
        )

    def pick(self, nbytes: int, *, in_slices: bool = False, knows: bool = True) -> Pick:
        """The algorithm for so many bytes, as predicted for an all-reduce: the other collectives are parts of that.

        Args:
            nbytes: The bytes of a member.
            in_slices: Whether each member has a slice of its own, as in a reduce-scatter or an all-gather: then nobody
                is the root, unless that was asked for.
            knows: Whether all members know the links; any thread may have learned of them a moment ago.
        """
        model = self.model if knows else None
        key = nbytes, in_slices, model is not None
        if key not in self._picks:
            self._picks[key] = self._pick(nbytes, in_slices, model)
        return self._picks[key]

    def _pick(self, nbytes: int, in_slices: bool, model: LinkModel | None) -> Pick:
        sent = nbytes * (self.size - 1)
        if model is None:
            default = "direct" if sent <= _SMALL else "ring"
            return Pick(_make(default if self.asked == "auto" else self.asked, self.size, None))
        if self.asked != "auto":  # who asks for an algorithm gets the same sums in every run, whatever is measured
            return _predict(self.asked, nbytes, model, in_order=False)
        names = [name for name in choices(model) if not (in_slices and name in _WITH_ROOT)]
        names = [name for name in names if name != "direct" or sent <= _DIRECT]
        return min((_predict(name, nbytes, model) for name in names), key=lambda pick: pick.seconds or 0.0)

    def predict(self, name: str, nbytes: int) -> Pick:
        """How ``auto`` would use the algorithm of this name."""
        assert self.model is not None
        return _predict(name, nbytes, self.model)


def _predict(name: str, nbytes: int, model: LinkModel, *, in_order: bool = True) -> Pick:
    algorithm = _make(name, model.size, model)
    order = model.order if in_order and name == "ring" and model.has_sites else None
    return Pick(algorithm, order, model.predict(algorithm, nbytes, order))


def _make(name: str, size: int, model: LinkModel | None) -> CollectiveAlgorithm:
    if name == "hierarchical":
        return Hierarchical(model.sites if model else list(range(size)))
    return _ALIKE[name]()


def choices(model: LinkModel) -> list[str]:
    """The algorithms that may be the fastest over these links."""
    return [*_ALIKE, *(["hierarchical"] if model.has_sites else [])]
