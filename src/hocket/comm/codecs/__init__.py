"""How gradients travel between hosts in fewer bytes: one small class for each codec, and the choice between them."""

from __future__ import annotations

from collections.abc import Callable

import torch

from hocket.comm.codecs.codec import Codec
from hocket.comm.codecs.levels import Signs, Stochastic
from hocket.comm.codecs.narrow import Cast, Integers
from hocket.comm.codecs.sparse_values import LargestValues, PassedThreshold, RandomPlaces
from hocket.specs import codecs as specs
from hocket.specs.codecs import CodecSpec


def make(spec: CodecSpec, member: int, bucket: int) -> Codec:
    """The codec for one bucket of one member."""
    return _MAKES[type(spec)](spec, member, bucket)


_MAKES: dict[type[CodecSpec], Callable[..., Codec]] = {
    specs.FP16: lambda *_: Cast(torch.float16),
    specs.BF16: lambda *_: Cast(torch.bfloat16),
    specs.Int8: lambda spec, *_: Integers(8, spec.block),
    specs.Int4: lambda spec, *_: Integers(4, spec.block),
    specs.QSGD: lambda spec, member, bucket: Stochastic(spec.bits, member << 12 | bucket),
    specs.Ternary: lambda spec, member, bucket: Stochastic(2, member << 12 | bucket),
    specs.OneBit: lambda *_: Signs(),
    specs.TopK: lambda spec, *_: LargestValues(spec.density, spec.warmup),
    specs.RandomK: lambda spec, member, bucket: RandomPlaces(spec.density, bucket),
    specs.Threshold: lambda spec, *_: PassedThreshold(spec.tau),
}
