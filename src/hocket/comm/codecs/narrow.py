"""``fp16``, ``bf16``, ``int8`` and ``int4``: every value, in fewer bits."""

from __future__ import annotations

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
        return values.clamp(-self._most, self._most).to(self._dtype).view(torch.uint8)

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
        rows = in_blocks(values, self.unit)
        scales = (rows.abs().amax(1) / self._most).float()
        numbers = torch.div(rows, scales.clamp_min(_TINY).unsqueeze(1).to(rows)).round_()
        numbers = numbers.clamp_(-self._most, self._most).to(torch.int8).view(-1)[: values.numel()]
        body = numbers.view(torch.uint8) if self._bits == 8 else pack(numbers + 8, 4)
        return torch.cat([scales.view(torch.uint8), body])

    def decode(self, message: torch.Tensor, into: torch.Tensor) -> None:
        count, blocks = into.numel(), -(-into.numel() // self.unit)
        scales, body = message[: 4 * blocks].view(torch.float32), message[4 * blocks :]
        check_scales(scales)
        numbers = body.view(torch.int8) if self._bits == 8 else unpack(body, 4, count).to(torch.int8) - 8
        multiply_blocks(numbers, scales, into, self.unit)


_TINY = 1e-38


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
    """Whole numbers from 0 to 2 ** bits - 1, several to a byte; ``bits`` is 1, 2 or 4."""
    each = 8 // bits
    rows = in_blocks(numbers.view(torch.uint8), each)
    packed = rows[:, 0].clone()
    for place in range(1, each):
        packed |= rows[:, place] << (place * bits)
    return packed


def unpack(packed: torch.Tensor, bits: int, count: int) -> torch.Tensor:
    """``count`` numbers that were packed."""
    each, mask = 8 // bits, (1 << bits) - 1
    rows = packed.new_empty(packed.numel(), each)
    for place in range(each):
        torch.bitwise_and(packed >> (place * bits), mask, out=rows[:, place])
    return rows.view(-1)[:count]
