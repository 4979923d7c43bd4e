"""Codecs as a user writes them: ``topk(0.01)``. How gradients and differences travel between hosts in fewer bytes."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar


@dataclass(frozen=True)
class CodecSpec:
    """A codec as a user writes it: its fields are the options."""

    name: ClassVar[str]
    """The name that a user gives for the codec."""

    def check(self) -> None:
        """Raise a ValueError, with the remedy, if a value makes no sense."""


@dataclass(frozen=True)
class FP16(CodecSpec):
    """16 bits, IEEE half precision."""

    name = "fp16"


@dataclass(frozen=True)
class BF16(CodecSpec):
    """16 bits, with the range of float32."""

    name = "bf16"


@dataclass(frozen=True)
class Int8(CodecSpec):
    """8 bits, and a scale for each block.

    Attributes:
        block: How many values have a scale in common.
    """

    name = "int8"

    block: int = 256

    def check(self) -> None:
        _check_block(self.block)


@dataclass(frozen=True)
class Int4(CodecSpec):
    """4 bits, and a scale for each block.

    Attributes:
        block: How many values have a scale in common.
    """

    name = "int4"

    block: int = 64

    def check(self) -> None:
        _check_block(self.block)


@dataclass(frozen=True)
class QSGD(CodecSpec):
    """A few bits, rounded by chance, so that the values are right on the average.

    Attributes:
        bits: 4 or 8 for each value.
    """

    name = "qsgd"

    bits: int = 4

    def check(self) -> None:
        if self.bits not in (4, 8):
            raise ValueError(f"bits={self.bits} must be 4 or 8; ternary has 2")


@dataclass(frozen=True)
class Ternary(CodecSpec):
    """2 bits: up, down or nothing, by chance, so that the values are right on the average."""

    name = "ternary"


@dataclass(frozen=True)
class OneBit(CodecSpec):
    """The sign of each value, and two means for each block."""

    name = "onebit"


@dataclass(frozen=True)
class TopK(CodecSpec):
    """The largest values, and where they are.

    Attributes:
        density: The share of the values that is sent.
        warmup: Exchanges in which the share falls to ``density``.
    """

    name = "topk"

    density: float = 0.01
    warmup: int = 0

    def check(self) -> None:
        _check_density(self.density)
        if self.warmup < 0:
            raise ValueError(f"warmup={self.warmup} must be a number of exchanges from 0, for example warmup=1000")


@dataclass(frozen=True)
class RandomK(CodecSpec):
    """Values at random places.

    Attributes:
        density: The share of the values that is sent.
    """

    name = "randomk"

    density: float = 0.01

    def check(self) -> None:
        _check_density(self.density)


@dataclass(frozen=True)
class Threshold(CodecSpec):
    """A fixed amount of each value that has reached it.

    Attributes:
        tau: The amount.
    """

    name = "threshold"

    tau: float = 0.001

    def check(self) -> None:
        if not 0 < self.tau < float("inf"):
            raise ValueError(f"tau={self.tau} must be a positive number, for example tau=0.001")


CODECS: dict[str, type[CodecSpec]] = {
    kind.name: kind for kind in (FP16, BF16, Int8, Int4, QSGD, Ternary, OneBit, TopK, RandomK, Threshold)
}


def _check_density(density: float) -> None:
    if not 0 < density <= 1:
        raise ValueError(f"density={density} must be more than 0 and at most 1, for example density=0.01")


def _check_block(block: int) -> None:
    if block < 2 or block % 2:
        raise ValueError(f"block={block} must be an even number from 2, for example block=256")
