"""``qsgd``, ``ternary`` and ``onebit``: few levels, right on the average or with what is left owed."""

from __future__ import annotations

import torch

from hocket.comm.codecs.codec import Gathered
from hocket.comm.codecs.narrow import check_scales, in_blocks, multiply_blocks, pack, unpack
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
        rows = in_blocks(values, _BLOCK)
        scales = (rows.abs().amax(1) / self._most).float()
        levels = torch.div(rows, scales.clamp_min(1e-38).unsqueeze(1).to(rows))
        levels += torch.rand(levels.shape, generator=self._random, dtype=levels.dtype)
        numbers = levels.floor_().clamp_(-self._most, self._most).to(torch.int8).view(-1)[: values.numel()]
        body = numbers.view(torch.uint8) if self._bits == 8 else pack(numbers + self._most, self._bits)
        return torch.cat([scales.view(torch.uint8), body])

    def add(self, message: torch.Tensor, to: torch.Tensor, factor: float = 1.0) -> None:
        count, blocks = to.numel(), -(-to.numel() // _BLOCK)
        if message.numel() != 4 * blocks + -(-count * self._bits // 8):
            raise WireError(f"{message.numel()} bytes are no {count} values of {self._bits} bits")
        scales, body = message[: 4 * blocks].view(torch.float32), message[4 * blocks :]
        check_scales(scales)
        is_whole = self._bits == 8
        numbers = body.view(torch.int8) if is_whole else unpack(body, self._bits, count).to(torch.int8) - self._most
        values = torch.empty_like(to)
        multiply_blocks(numbers, scales, values, _BLOCK)
        to.add_(values, alpha=factor)


class Signs(Gathered):
    """The sign of each value, and the two means of a block's values: those below zero, and the others (Seide et al.
    2014)."""

    def encode(self, values: torch.Tensor) -> torch.Tensor:
        rows = in_blocks(values, _BLOCK)
        is_low = rows < 0
        counts = torch.full((len(rows),), float(_BLOCK))
        counts[-1] = values.numel() - _BLOCK * (len(rows) - 1)
        low_count = is_low.sum(1)
        low_sum = torch.where(is_low, rows, 0.0).sum(1)
        low = low_sum / low_count.clamp_min(1)
        high = (rows.sum(1) - low_sum) / (counts - low_count).clamp_min(1)
        means = torch.stack([high, low], 1).float().view(-1)
        return torch.cat([means.view(torch.uint8), pack(is_low.view(-1)[: values.numel()], 1)])

    def add(self, message: torch.Tensor, to: torch.Tensor, factor: float = 1.0) -> None:
        count, blocks = to.numel(), -(-to.numel() // _BLOCK)
        if message.numel() != 8 * blocks + -(-count // 8):
            raise WireError(f"{message.numel()} bytes are no {count} signs")
        means, signs = message[: 8 * blocks].view(torch.float32).view(-1, 2), message[8 * blocks :]
        low, values = unpack(signs, 1, count), torch.empty_like(to)
        multiply_blocks(low, means[:, 1] - means[:, 0], values, _BLOCK)
        ones = torch.ones((), dtype=torch.uint8).expand(count)
        base = torch.empty_like(to)
        multiply_blocks(ones, means[:, 0], base, _BLOCK)
        to.add_(values.add_(base), alpha=factor)
