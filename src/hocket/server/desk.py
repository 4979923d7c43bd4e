"""One worker's place at a table: where its gradients come in and its parameters go out.

A worker on this host has both in memory that it shares with the server, so nothing but signals needs to travel.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from hocket.server.terms import Definition
from hocket.transport.area import Area, aligned


class Desk:
    """The flat tensors of one worker, one per range of the definition.

    Attributes:
        is_shared: Whether the tensors are in memory that the worker shares.
    """

    def __init__(self, definition: Definition, area: Area | None) -> None:
        self.is_shared = area is not None
        if area is None:
            self.gradients = _allocate(definition)
            self.parameters = _allocate(definition)
            return
        both = buffers(definition.buckets, area)
        self.gradients, self.parameters = (pick(definition, flats) for flats in both)
        self._area = area


def needed(buckets: Sequence[tuple[str, int]]) -> int:
    """Bytes of the area in which a worker has its gradients and its parameters."""
    return 2 * sum(aligned(count * _dtype(name).itemsize) for name, count in buckets)


def buffers(buckets: Sequence[tuple[str, int]], area: Area) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
    """A worker's gradients and parameters in ``area``, one flat tensor per bucket each."""
    if area.nbytes < needed(buckets):
        raise ValueError(f"{area.nbytes:,} bytes of shared memory, and {needed(buckets):,} are needed")
    offset, found = 0, []
    for _ in range(2):
        flats = []
        for name, count in buckets:
            flats.append(area.tensor(offset, count, _dtype(name)))
            offset += aligned(count * _dtype(name).itemsize)
        found.append(flats)
    return found[0], found[1]


def pick(definition: Definition, flats: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    """A server's ranges of a worker's flat buffers."""
    found = []
    for bucket, start, end in definition.ranges:
        per_line = 64 // flats[bucket].element_size()
        found.append(flats[bucket][start : start + -(-(end - start) // per_line) * per_line])
    return found


def _allocate(definition: Definition) -> list[torch.Tensor]:
    whole = [torch.empty(count, dtype=_dtype(name), device="meta") for name, count in definition.buckets]
    return [torch.zeros(part.numel(), dtype=part.dtype) for part in pick(definition, whole)]


def _dtype(name: str) -> torch.dtype:
    found = getattr(torch, name, None)
    if not isinstance(found, torch.dtype):
        raise ValueError(f"{name!r} is no type of a tensor")
    return found
