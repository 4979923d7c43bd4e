"""Groups of members that are close to each other, groups of such groups, and so on: few bytes cross the slow links.

For an all-reduce each member of a group makes the sum of a slice over its group, and then the sum of that slice over
all groups, with the members that carry the same slice there, who may be groups of groups again. So every byte crosses
each level once in each direction, over as many links as the smallest group has members. In the other collectives one
member speaks for its group: the root, or the first one.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

import torch

from hocket.comm.algorithms.collective_algorithm import Bounds, CollectiveAlgorithm, gather, scatter, slices
from hocket.comm.algorithms.ring import Ring
from hocket.comm.bucket_layout import cut
from hocket.transport.point_to_point import Members, PointToPoint

Group = Sequence["int | Group"]
"""Ranks, or groups of ranks, or groups of such groups …: ``[[0, 1], [2, 3, 4]]``."""

_Same = tuple["int | _Same", ...]  # a group whose members are all as deep as each other


class Hierarchical(CollectiveAlgorithm):
    """Collectives in groups of groups of members.

    Args:
        groups: The groups; each rank is in one of them.
        within: How the members of each group, and those who speak for the groups, work together.
    """

    name = "hierarchical"

    def __init__(self, groups: Group, within: CollectiveAlgorithm | None = None) -> None:
        self._groups, self._within = _as_deep(groups, _depth(groups)), within or Ring()
        members = sorted(_members(self._groups))
        if members != list(range(len(members))):
            raise ValueError(f"groups {groups}: every rank from 0 on must be in one group, and in no other")

    def allreduce(self, links: PointToPoint, data: torch.Tensor, operation: str) -> None:
        self._allreduce(links, self._groups, data, operation)

    def reduce(self, links: PointToPoint, data: torch.Tensor, operation: str, root: int) -> None:
        self._reduce(links, self._groups, data, operation, root)

    def broadcast(self, links: PointToPoint, data: torch.Tensor, root: int) -> None:
        self._broadcast(links, self._groups, data, root)

    def reduce_scatter(self, links: PointToPoint, data: torch.Tensor, operation: str, bounds: Bounds) -> None:
        start, end = bounds[links.rank]
        ordered, places = self._in_order(data, bounds)
        for rank, (first, last) in places.items():
            ordered[first:last] = data[slice(*bounds[rank])]
        self._reduce_scatter(links, self._groups, ordered, operation, places)
        data[start:end] = ordered[slice(*places[links.rank])]

    def allgather(self, links: PointToPoint, data: torch.Tensor, bounds: Bounds) -> None:
        start, end = bounds[links.rank]
        ordered, places = self._in_order(data, bounds)
        ordered[slice(*places[links.rank])] = data[start:end]
        self._allgather(links, self._groups, ordered, places)
        for rank, (first, last) in places.items():
            data[slice(*bounds[rank])] = ordered[first:last]

    def _in_order(self, data: torch.Tensor, bounds: Bounds) -> tuple[torch.Tensor, dict[int, tuple[int, int]]]:
        """Memory in which the slices of each group follow each other, and where each member's slice is there."""
        places, end = {}, 0
        for rank in _members(self._groups):
            start, end = end, end + bounds[rank][1] - bounds[rank][0]
            places[rank] = start, end
        return data.new_empty(end), places

    def _allreduce(self, links: PointToPoint, groups: _Same, data: torch.Tensor, operation: str) -> None:
        near = _near(groups)
        own = _own(near, links.rank)
        inside = Members(links, own)
        if len(near) == 1:
            self._within.allreduce(inside, data, operation)
            return
        carriers, count = min(map(len, near)), data.numel()
        bounds = cut(count, data.dtype, carriers) + [(count, count)] * (len(own) - carriers)
        self._within.reduce_scatter(inside, data, operation, bounds)
        if inside.rank < carriers:
            start, end = bounds[inside.rank]
            self._allreduce(links, _outer(groups, lambda group: group[inside.rank]), data[start:end], operation)
        self._within.allgather(inside, data, bounds)

    def _reduce(self, links: PointToPoint, groups: _Same, data: torch.Tensor, operation: str, root: int) -> None:
        near = _near(groups)
        own = _own(near, links.rank)
        speaker = _speaker(own, root)
        self._within.reduce(Members(links, own), data, operation, own.index(speaker))
        if links.rank == speaker and len(near) > 1:
            self._reduce(links, _outer(groups, lambda group: _speaker(group, root)), data, operation, root)

    def _broadcast(self, links: PointToPoint, groups: _Same, data: torch.Tensor, root: int) -> None:
        near = _near(groups)
        own = _own(near, links.rank)
        speaker = _speaker(own, root)
        if links.rank == speaker and len(near) > 1:
            self._broadcast(links, _outer(groups, lambda group: _speaker(group, root)), data, root)
        self._within.broadcast(Members(links, own), data, own.index(speaker))

    def _reduce_scatter(
        self,
        links: PointToPoint,
        groups: _Same,
        data: torch.Tensor,
        operation: str,
        places: dict[int, tuple[int, int]],
    ) -> None:
        near = _near(groups)
        own = _own(near, links.rank)
        inside, bounds = Members(links, own), [places[rank] for rank in own]
        if len(near) == 1:
            self._within.reduce_scatter(inside, data, operation, bounds)
            return
        self._within.reduce(inside, data, operation, 0)
        if inside.rank == 0:
            outer = _outer(groups, lambda group: group[0])
            self._reduce_scatter(links, outer, data, operation, _joined(near, places))
        scatter(inside, slices(data, bounds), 0)

    def _allgather(
        self, links: PointToPoint, groups: _Same, data: torch.Tensor, places: dict[int, tuple[int, int]]
    ) -> None:
        near = _near(groups)
        own = _own(near, links.rank)
        inside, bounds = Members(links, own), [places[rank] for rank in own]
        if len(near) == 1:
            self._within.allgather(inside, data, bounds)
            return
        gather(inside, slices(data, bounds), 0)
        if inside.rank == 0:
            self._allgather(links, _outer(groups, lambda group: group[0]), data, _joined(near, places))
        self._within.broadcast(inside, data, 0)


def _depth(group: Group) -> int:
    return 1 + max((_depth(each) for each in group if not isinstance(each, int)), default=0)


def _as_deep(group: Group, depth: int) -> _Same:
    """The group with members that are all as deep: a rank beside groups is a group of one."""
    if depth == 1:
        return tuple(each for each in group if isinstance(each, int))
    return tuple(_as_deep([each] if isinstance(each, int) else each, depth - 1) for each in group)


def _members(group: _Same) -> Iterator[int]:
    for each in group:
        if isinstance(each, int):
            yield each
        else:
            yield from _members(each)


def _near(groups: _Same) -> list[list[int]]:
    """The innermost groups."""
    inner = [each for each in groups if not isinstance(each, int)]
    return [group for each in inner for group in _near(each)] if inner else [list(_members(groups))]


def _own(near: list[list[int]], rank: int) -> list[int]:
    return next(group for group in near if rank in group)


def _outer(groups: _Same, pick: Callable[[list[int]], int]) -> _Same:
    """The groups with one member in the place of each innermost group."""
    found: list[int | _Same] = []
    for each in groups:
        assert not isinstance(each, int)
        is_innermost = isinstance(each[0], int)
        found.append(pick(list(_members(each))) if is_innermost else _outer(each, pick))
    return tuple(found)


def _speaker(group: list[int], root: int) -> int:
    return root if root in group else group[0]


def _joined(near: list[list[int]], places: dict[int, tuple[int, int]]) -> dict[int, tuple[int, int]]:
    """Where the slices of each innermost group are, by its first member."""
    return {group[0]: (places[group[0]][0], places[group[-1]][1]) for group in near}
