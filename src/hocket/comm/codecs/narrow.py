"""``fp16``, ``bf16``, ``int8`` and ``int4``: every value, in fewer bits."""

from __future__ import annotations

from collections.abc import Iterator

import torch

from hocket.comm.codecs.codec import Scattered
from hocket.messages import WireError


class Cast(Scattered):
    """Values in a floating-point type of 16 bits. What is too large for it is sent in several rounds."""

    def __init__(self, dtype: torch.dtype) -> None:
        super().__init__()
        self._dtype, self._most = dtype, torch.finfo(dtype).max

    def size(self, count: int) -> int:
        return count * self._dtype.itemsize

    def encode(self, values: torch.Tensor) -> torch.Tensor:
        message = torch.empty(values.numel(), dtype=self._dtype)
        for part, out in zip(values.split(_CHUNK), message.split(_CHUNK), strict=True):
            out.copy_(part.clamp(-self._most, self._most))
        return message.view(torch.uint8)

    def decode(self, message: torch.Tensor, into: torch.Tensor) -> None:
        into.copy_(message.view(self._dtype))


class Integers(Scattered):
    """Whole numbers of 8 or 4 bits, times a scale that each block of values has.

    A value is wrong by half a quantum of its block at most; a quantum is the largest value over 127, or 7.

    Args:
        bits: 8 or 4.
        block: How many values have a scale in common; an even number.
    """

    def __init__(self, bits: int, block: int) -> None:
        super().__init__()
        self._bits, self.unit, self._most = bits, block, (1 << (bits - 1)) - 1

    def size(self, count: int) -> int:
        blocks = -(-count // self.unit)
        return blocks * 4 + (count if self._bits == 8 else -(-count // 2))

    def encode(self, values: torch.Tensor) -> torch.Tensor:
        message, most = torch.empty(self.size(values.numel()), dtype=torch.uint8), self._most
        scales, body = self._parts(message, values.numel())
        for part, own, start in chunks(values, scales, self.unit):
            rows = in_blocks(part, self.unit)
            own.copy_(rows.abs().amax(1) / most)
            numbers = (rows * own.clamp_min(TINY).reciprocal().to(rows.dtype).unsqueeze(1)).round_()
            put(numbers.clamp_(-most, most).view(-1)[: part.numel()], body, start, self._bits)
        return message

    def decode(self, message: torch.Tensor, into: torch.Tensor) -> None:
        scales, body = self._parts(message, into.numel())
        check_scales(scales)
        for part, own, start in chunks(into, scales, self.unit):
            multiply_blocks(take(body, start, part.numel(), self._bits), own, part, self.unit)

    def _parts(self, message: torch.Tensor, count: int) -> tuple[torch.Tensor, torch.Tensor]:
        """The scales of a message, and the numbers."""
        split = 4 * -(-count // self.unit)
        return message[:split].view(torch.float32), message[split:]


TINY = 1e-38
_CHUNK = 1 << 18  # values; what is done with so many stays in the cache


def chunks(
    values: torch.Tensor, scales: torch.Tensor, block: int
) -> Iterator[tuple[torch.Tensor, torch.Tensor, int]]:
    """Parts of ``values`` of whole blocks, the scales of each, and at which value it begins."""
    size = max(_CHUNK // block, 1) * block
    for start in range(0, values.numel(), size):
        part = values[start : start + size]
        yield part, scales[start // block :][: -(-part.numel() // block)], start


def put(numbers: torch.Tensor, body: torch.Tensor, start: int, bits: int) -> None:
    """Write whole numbers to ``body``, which has them from ``start`` on with ``bits`` each: 2, 4 or 8."""
    if bits == 8:
        body[start:][: numbers.numel()].view(torch.int8).copy_(numbers)
    else:
        packed = pack((numbers + (1 << (bits - 1))).to(torch.uint8), bits)
        body[start * bits // 8 :][: packed.numel()] = packed


def take(body: torch.Tensor, start: int, count: int, bits: int) -> torch.Tensor:
    """What ``put`` has written."""
    if bits == 8:
        return body[start:][:count].view(torch.int8)
    packed = body[start * bits // 8 :][: -(-count * bits // 8)]
    return unpack(packed, bits, count).view(torch.int8) - (1 << (bits - 1))


def in_blocks(values: torch.Tensor, block: int) -> torch.Tensor:
    """``values`` as one row for each block; the last one is filled up with zeros."""
    missing = -values.numel() % block
    return (torch.cat([values, values.new_zeros(missing)]) if missing else values).view(-1, block)


def multiply_blocks(numbers: torch.Tensor, scales: torch.Tensor, into: torch.Tensor, block: int) -> None:
    """Replace ``into`` by ``numbers``, each times the scale of its block."""
    whole = into.numel() // block * block
    if whole:
        into[:whole].view(-1, block).copy_(numbers[:whole].view(-1, block))
        into[:whole].view(-1, block).mul_(scales[: whole // block].unsqueeze(1))
    if whole < into.numel():
        into[whole:] = numbers[whole:]
        into[whole:] *= scales[-1]


def check_scales(scales: torch.Tensor) -> None:
    """Raise unless these are scales, as far as that can be seen; NaN is one of values that are not finite."""
    if bool((scales < 0).any()):
        raise WireError("a block of values has a scale below zero")


def pack(numbers: torch.Tensor, bits: int) -> torch.Tensor:
    """Bytes that are numbers from 0 to 2 ** bits - 1, several to a byte; ``bits`` is 1, 2 or 4.

    The bytes that go into one are multiplied as one number, so that each lands at its place in the highest byte.
    """
    rows = in_blocks(numbers.view(torch.uint8), 8).view(-1)
    if bits == 4:
        pairs = rows.view(torch.int16)
        packed = pairs | pairs >> 4
    elif bits == 2:
        packed = rows.view(torch.int32) * (1 << 24 | 1 << 18 | 1 << 12 | 1 << 6) >> 24
    else:
        packed = rows.view(torch.int64) * 0x0102040810204080 >> 56
    return packed.to(torch.uint8)[: -(-numbers.numel() * bits // 8)]


def unpack(packed: torch.Tensor, bits: int, count: int) -> torch.Tensor:
    """``count`` numbers that were packed."""
    each, mask = 8 // bits, (1 << bits) - 1
    rows = packed.new_empty(packed.numel(), each)
    for place in range(each):
        torch.bitwise_and(packed >> (place * bits), mask, out=rows[:, place])
    return rows.view(-1)[:count]
