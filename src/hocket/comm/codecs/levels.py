"""``qsgd``, ``ternary`` and ``onebit``: few levels, right on the average or with what is left owed."""

from __future__ import annotations

import torch

from hocket.comm.codecs.codec import Gathered
from hocket.comm.codecs.narrow import TINY, check_scales, chunks, in_blocks, multiply_blocks, pack, put, take, unpack
from hocket.messages import WireError

_BLOCK = 1024  # values that have their scales in common


class Stochastic(Gathered):
    """Each value goes up or down to one of its two neighbouring levels, by chance, so that it is right on the average.

    With three levels this is TernGrad (Wen et al. 2017), else QSGD (Alistarh et al. 2017), with the largest value of a
    block as its norm.

    Args:
        bits: 2, 4 or 8 for each value.
        seed: Where the random numbers of this member begin.
    """

    is_unbiased = True

    def __init__(self, bits: int, seed: int) -> None:
        super().__init__()
        self._bits, self._most, self._seed = bits, (1 << (bits - 1)) - 1, seed
        self._random = torch.Generator()

    def encode(self, values: torch.Tensor) -> torch.Tensor:
        self._random.manual_seed((self._seed << 32) + self.rounds)  # a round that is made again has the same ones
        message, most = torch.empty(self._size(values.numel()), dtype=torch.uint8), self._most
        scales, body = self._parts(message, values.numel())
        for part, own, start in chunks(values, scales, _BLOCK):
            rows = in_blocks(part, _BLOCK)
            own.copy_(rows.abs().amax(1) / most)
            levels = rows * own.clamp_min(TINY).reciprocal().to(rows.dtype).unsqueeze(1)
            numbers = levels.add_(self._draw(levels)).floor_().clamp_(-most, most)
            put(numbers.view(-1)[: part.numel()], body, start, self._bits)
        return message

    def add(self, message: torch.Tensor, to: torch.Tensor, factor: float = 1.0) -> None:
        if message.numel() != self._size(to.numel()):
            raise WireError(f"{message.numel()} bytes are no {to.numel()} values of {self._bits} bits")
        scales, body = self._parts(message, to.numel())
        check_scales(scales)
        for part, own, start in chunks(to, scales, _BLOCK):
            values = torch.empty_like(part)
            multiply_blocks(take(body, start, part.numel(), self._bits), own, values, _BLOCK)
            part.add_(values, alpha=factor)

    def _draw(self, like: torch.Tensor) -> torch.Tensor:
        """Random numbers from 0 to 1: multiples of 2 ** -16, four from each that is drawn."""
        drawn = torch.empty(-(-like.numel() // 4), dtype=torch.int64).random_(-(1 << 63), None, generator=self._random)
        numbers = drawn.view(torch.int16)[: like.numel()].view(like.shape).to(like.dtype)
        return numbers.add_(32768.5).mul_(2.0**-16)

    def _size(self, count: int) -> int:
        return 4 * -(-count // _BLOCK) + -(-count * self._bits // 8)

    def _parts(self, message: torch.Tensor, count: int) -> tuple[torch.Tensor, torch.Tensor]:
        """The scales of a message, and the numbers."""
        split = 4 * -(-count // _BLOCK)
        return message[:split].view(torch.float32), message[split:]


class Signs(Gathered):
    """The sign of each value, and the two means of a block's values: those below zero, and the others (Seide et al.
    2014)."""

    def encode(self, values: torch.Tensor) -> torch.Tensor:
        count = values.numel()
        blocks = -(-count // _BLOCK)
        message = torch.empty(8 * blocks + -(-count // 8), dtype=torch.uint8)
        means, signs = message[: 8 * blocks].view(torch.float32).view(-1, 2), message[8 * blocks :]
        for part, own, start in chunks(values, means, _BLOCK):
            rows = in_blocks(part, _BLOCK)
            is_low = rows < 0
            counts = torch.full((len(rows),), _BLOCK)
            counts[-1] = part.numel() - _BLOCK * (len(rows) - 1)
            low_count = is_low.view(torch.uint8).sum(1, dtype=torch.int32)
            low_sum = rows.clamp_max(0.0).sum(1)
            own[:, 1] = low_sum / low_count.clamp_min(1)
            own[:, 0] = (rows.sum(1) - low_sum) / (counts - low_count).clamp_min(1)
            packed = pack(is_low.view(-1)[: part.numel()], 1)
            signs[start // 8 :][: packed.numel()] = packed
        return message

    def add(self, message: torch.Tensor, to: torch.Tensor, factor: float = 1.0) -> None:
        count, blocks = to.numel(), -(-to.numel() // _BLOCK)
        if message.numel() != 8 * blocks + -(-count // 8):
            raise WireError(f"{message.numel()} bytes are no {count} signs")
        means, signs = message[: 8 * blocks].view(torch.float32).view(-1, 2), message[8 * blocks :]
        for part, own, start in chunks(to, means, _BLOCK):
            low = unpack(signs[start // 8 :][: -(-part.numel() // 8)], 1, part.numel())
            values, high = torch.empty_like(part), torch.empty_like(part)
            multiply_blocks(low, own[:, 1] - own[:, 0], values, _BLOCK)
            multiply_blocks(torch.ones_like(low), own[:, 0], high, _BLOCK)
            part.add_(values.add_(high), alpha=factor)
