"""The sums of an exchange that travel by a codec: what is kept of them from round to round."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from hocket.comm.algorithms.direct import Direct
from hocket.comm.codecs import make
from hocket.comm.codecs.codec import Codec
from hocket.specs.codecs import CodecSpec
from hocket.specs.notation import write
from hocket.transport.point_to_point import PointToPoint


class EncodedSum:
    """A tensor whose first elements are added up by a codec, and the others as they are; see ``Way``.

    Args:
        name: What the codec is called in reports.
        codec: The codec for this tensor.
        split: How many elements the codec is for.
    """

    def __init__(self, name: str, codec: Codec, split: int) -> None:
        self.name, self.codec, self.split = name, codec, split

    @property
    def nbytes(self) -> int:
        """How many bytes this member has given to the wire so far."""
        return self.codec.nbytes

    def add_up(self, links: PointToPoint, data: torch.Tensor) -> None:
        """Replace ``data`` by the sum over all members."""
        if self.split:
            self.codec.add_up(links, data[: self.split])
        if self.split < data.numel():
            Direct().allreduce(links, data[self.split :], "sum")


class EncodedSums:
    """The tensors that one member of a group adds up with others, one for each bucket.

    Args:
        spec: The codec.
        member: Where this member's random numbers begin.
        tensors: For each bucket the member's part of the data, without what travels behind it.
    """

    def __init__(self, spec: CodecSpec, member: int, parts: Sequence[torch.Tensor]) -> None:
        self._parts = parts
        self.sums = [
            EncodedSum(write(spec), make(spec, member, bucket), part.numel()) for bucket, part in enumerate(parts)
        ]

    def end_round(self, *, counts: bool) -> None:
        """See ``Codec.end_round``."""
        for each in self.sums:
            each.codec.end_round(counts=counts)

    def owed(self) -> list[torch.Tensor]:
        """What this member has not sent so far, for each bucket."""
        return [each.codec.owed(part) for each, part in zip(self.sums, self._parts, strict=True)]

    def owe(self, values: Sequence[torch.Tensor], rounds: int) -> None:
        """Owe these values from now on, after so many rounds."""
        for each, value in zip(self.sums, values, strict=True):
            each.codec.owe(value, rounds)
