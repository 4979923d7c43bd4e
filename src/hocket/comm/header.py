"""A few numbers of every rank that travel with the data.

Each rank has elements of its own behind the data of a bucket, one for each byte, which all others leave zero: the
sum over the ranks then has them all, whatever floating-point type the bucket is of, and no message more is sent.
"""

from __future__ import annotations

import struct
from typing import NamedTuple

import torch

_FORMAT = struct.Struct("<qqI")


class Entry(NamedTuple):
    """What one rank says: the signature of what it does, a payload, and microseconds that it was busy before."""

    number: int
    payload: int
    busy: int


class Header:
    """Of ``size`` ranks."""

    def __init__(self, size: int) -> None:
        self.count = size * _FORMAT.size
        """How many elements it has."""

    def write(self, elements: torch.Tensor, rank: int, entry: Entry) -> None:
        """Let the ``elements`` of this rank's header be ``entry``, and zero for the others."""
        raw = _FORMAT.pack(entry.number, entry.payload, min(entry.busy, 0xFFFFFFFF))
        values = bytearray(self.count)
        values[rank * len(raw) : (rank + 1) * len(raw)] = raw
        elements.copy_(torch.frombuffer(values, dtype=torch.uint8))

    def read(self, elements: torch.Tensor) -> list[Entry]:
        """What every rank has said, from the sum of their elements."""
        raw = bytes(elements.to(torch.uint8).tolist())
        return [Entry(*fields) for fields in _FORMAT.iter_unpack(raw)]
