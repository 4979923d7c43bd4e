"""An optimizer's state on its way between a server and a worker: described in plain data, with tensors as they are."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch

from hocket.errors import StrategyError
from hocket.server.shard import Stored


@dataclass(frozen=True)
class Packed:
    """An optimizer's state as plain descriptions, and its tensors, flat."""

    described: list[list[Any]]
    tensors: list[torch.Tensor]


def pack(stored: Sequence[Stored]) -> Packed:
    """Pack a state; its tensors are copied, because the server goes on changing them."""
    described: list[list[Any]] = []
    tensors = []
    for each in stored:
        value, kind, shape = each.value, "", None
        if isinstance(value, torch.Tensor):
            kind, shape = str(value.dtype).removeprefix("torch."), list(value.shape)
            tensors.append(value.detach().clone(memory_format=torch.contiguous_format).view(-1))
            value = None
        elif not (value is None or isinstance(value, (bool, int, float, str))):
            raise StrategyError(f"the optimizer keeps {each.key!r} as a {type(value).__name__}, which cannot travel")
        described.append([each.index, each.start, each.key, kind, shape, value])
    return Packed(described, tensors)


def allocate(described: Any, length: int) -> Packed:
    """Room for the tensors of a described state, which must have ``length`` bytes together."""
    tensors, total = [], 0
    for index, start, key, kind, shape, _ in described:
        if not isinstance(index, int) or not isinstance(start, int) or not isinstance(key, str):
            raise ValueError("no description of a state")
        if kind:
            dtype = getattr(torch, kind)
            count = 1
            for size in shape:
                count *= int(size)
            total += count * dtype.itemsize
            if count < 0 or total > length:
                raise ValueError(f"a state of {total:,} bytes, and {length:,} are there")
            tensors.append(torch.empty(count, dtype=dtype))
    if total != length:
        raise ValueError(f"a state of {total:,} bytes, and {length:,} are there")
    return Packed(described, tensors)


def unpack(packed: Packed) -> list[Stored]:
    """The state that ``pack`` was given."""
    tensors = iter(packed.tensors)
    return [
        Stored(index, start, key, next(tensors).view(shape) if kind else value)
        for index, start, key, kind, shape, value in packed.described
    ]
