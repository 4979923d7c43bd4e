"""Which server holds which parameters, or parts of them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from hocket.comm.bucket_layout import Layout, align
from hocket.server.terms import Slice

METHODS = ("partitioned", "greedy", "round_robin")
_SMALL = 1 << 14  # elements below which a tensor is not split


@dataclass(frozen=True)
class Placement:
    """Where parameters lie.

    Attributes:
        layout: The layout of a worker's flat buffers; what is on one server is together there.
        slices: The slices on each server.
        method: The name of the placement.
    """

    layout: Layout
    slices: list[list[Slice]]
    method: str

    @property
    def loads(self) -> list[int]:
        """Bytes on each server."""
        size = [bucket.dtype.itemsize for bucket in self.layout.buckets]
        return [sum(each.count * size[each.bucket] for each in part) for part in self.slices]

    @property
    def imbalance(self) -> float:
        """How much more than the mean the fullest server has; 0 is perfect."""
        mean = sum(self.loads) / len(self.loads)
        return max(self.loads) / mean - 1 if mean else 0.0

    def describe(self, names: Sequence[str]) -> list[str]:
        """The placement as lines of text, for a reader."""
        lines = [f"hocket: placement {self.method} of {len(names)} parameters, imbalance {self.imbalance:.1%}"]
        for server, (part, load) in enumerate(zip(self.slices, self.loads, strict=True)):
            said = [self._say(each, names[each.index]) for each in part]
            shown = said if len(said) <= 8 else [*said[:4], f"… {len(said) - 8} more …", *said[-4:]]
            size = f"{load / 1e6:,.1f} MB" if load >= 1e5 else f"{load / 1e3:,.1f} kB"
            lines.append(f"hocket:   server {server}: {size}: {', '.join(shown) or 'nothing'}")
        return lines

    def _say(self, each: Slice, name: str) -> str:
        place = self.layout.places[each.index]
        if each.count == place.count:
            return name
        return f"{name}[{each.start - place.start:,}:{each.end - place.start:,}]"


def place(
    tensors: Sequence[torch.Tensor],
    groups: Sequence[int],
    servers: int,
    method: str,
    *,
    whole: bool,
    turns: Sequence[int] | None = None,
) -> Placement:
    """Place ``tensors`` on ``servers`` servers.

    Args:
        tensors: The parameters.
        groups: The optimizer group of each tensor.
        servers: How many servers there are.
        method: ``partitioned``: equal parts, for which large tensors are split. ``greedy``: whole tensors, the largest
            first to the server that has the least. ``round_robin``: whole tensors, one after the other.
        whole: Whether the optimizer needs whole tensors, with their shapes.
        turns: The order in which tensors are dealt out one after the other; that of ``tensors`` by default.
    """
    if method == "partitioned" and not whole:
        layout = Layout(tensors)
        return Placement(layout, _cut(layout, groups, servers), method)
    owners = _deal(tensors, servers)
    if method == "round_robin":
        order = sorted(range(len(tensors)), key=lambda i: turns[i] if turns is not None else i)
        owners = [order.index(i) % servers for i in range(len(tensors))]
    layout = Layout(tensors, order=sorted(range(len(tensors)), key=lambda i: (owners[i], i)))
    slices: list[list[Slice]] = [[] for _ in range(servers)]
    for i in sorted(range(len(tensors)), key=lambda i: (layout.places[i].bucket, layout.places[i].start)):
        place = layout.places[i]
        shape, stride = (tuple(place.shape), tuple(place.stride)) if whole else (None, None)
        slices[owners[i]].append(Slice(i, place.bucket, place.start, place.end, groups[i], shape, stride))
    return Placement(layout, slices, "greedy" if method == "partitioned" else method)


def _deal(tensors: Sequence[torch.Tensor], servers: int) -> list[int]:
    """The server of each tensor: the largest tensors first, to the server that has the least."""
    loads, owners = [0] * servers, [0] * len(tensors)
    for i in sorted(range(len(tensors)), key=lambda i: -tensors[i].nbytes):
        owners[i] = loads.index(min(loads))
        loads[owners[i]] += tensors[i].nbytes
    return owners


def _cut(layout: Layout, groups: Sequence[int], servers: int) -> list[list[Slice]]:
    """Cut every bucket into equal parts, at a cache line of a large tensor or between small ones."""
    slices: list[list[Slice]] = [[] for _ in range(servers)]
    for number, bucket in enumerate(layout.buckets):
        members = layout.members(number)
        ends = [_snap(layout, members, bucket.count * (server + 1) // servers) for server in range(servers)]
        ends[-1] = bucket.count
        start = 0
        for server, end in enumerate(ends):
            for i in members:
                place = layout.places[i]
                first, last = max(place.start, start), min(place.end, end)
                is_last = server == servers - 1 and place.start == bucket.count  # empty tensors may lie at the end
                if first < last or (place.count == 0 and (start <= place.start < end or is_last)):
                    slices[server].append(Slice(i, number, first, max(first, last), groups[i]))
            start = max(start, end)
    return slices


def _snap(layout: Layout, members: Sequence[int], position: int) -> int:
    """The nearest place at or around ``position`` where a bucket may be cut."""
    for i in members:
        place = layout.places[i]
        dtype = layout.buckets[place.bucket].dtype
        end = align(place.end, dtype)
        if place.start <= position < end:
            if place.count < _SMALL:
                return place.start if position - place.start < end - position else end
            return min(align(position, dtype), end)
    return position
