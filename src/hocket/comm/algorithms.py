"""How the ranks' values become one value: kernels over the slots of a shared buffer."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch

_CHUNK = 1 << 16  # elements; several passes over one chunk stay in the cache

_PAIRWISE: dict[str, Callable[..., torch.Tensor]] = {
    "sum": torch.add,
    "max": torch.maximum,
    "min": torch.minimum,
    "product": torch.mul,
}
OPERATIONS = ("mean", *_PAIRWISE)


def reduce_into(out: torch.Tensor, parts: Sequence[torch.Tensor], operation: str) -> None:
    """Write the mean, sum, maximum, minimum or product of ``parts`` to ``out``, which is none of them.

    The order of the additions depends only on the number of parts, so every rank gets the same bits. Types of
    less than 32 bits are summed in float32.
    """
    if len(parts) == 1:
        out.copy_(parts[0])
    elif len(parts) == 2:
        _pair(out, parts[0], parts[1], operation, 1 / 2)
    elif out.numel() > _CHUNK:
        for start in range(0, out.numel(), _CHUNK):
            chunk = slice(start, start + _CHUNK)
            reduce_into(out[chunk], [part[chunk] for part in parts], operation)
    elif operation in ("mean", "sum") and out.dtype in (torch.bfloat16, torch.float16):
        total = parts[0].float()
        for part in parts[1:]:
            total += part
        out.copy_(total.div_(len(parts)) if operation == "mean" else total)
    else:
        _pair(out, parts[0], parts[1], operation, 1 / 2)
        for count, part in enumerate(parts[2:], start=3):
            _pair(out, out, part, operation, 1 / count)


def _pair(out: torch.Tensor, left: torch.Tensor, right: torch.Tensor, operation: str, weight: float) -> None:
    """Combine two parts; a running mean by ``lerp`` needs no pass of its own for the division."""
    if operation == "mean":
        torch.lerp(left, right, weight, out=out)
    else:
        _PAIRWISE[operation](left, right, out=out)
