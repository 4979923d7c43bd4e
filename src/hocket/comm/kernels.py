"""How the ranks' values become one value: kernels over the slots of a shared buffer."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

import torch

_CHUNK = 1 << 16  # elements per thread; several passes over one chunk stay in the cache

NARROW = (torch.bfloat16, torch.float16)  # summed in float32

PAIRWISE: dict[str, Callable[..., torch.Tensor]] = {
    "sum": torch.add,
    "max": torch.maximum,
    "min": torch.minimum,
    "product": torch.mul,
}
"""What makes one value of two, by the name of the operation."""

OPERATIONS = ("mean", *PAIRWISE)


def reduce_into(out: torch.Tensor, parts: Sequence[torch.Tensor], operation: str) -> None:
    """Write the mean, sum, maximum, minimum or product of ``parts`` to ``out``, which is none of them, or the first.

    Where there are two of them, ``out`` may be the second.

    The order of the additions depends only on the number of parts, so every rank gets the same bits. Types of
    less than 32 bits are summed in float32.
    """
    if len(parts) > 2 and out.numel() > _chunk():
        for target, *pieces in _chunks(out, parts):
            reduce_into(target, pieces, operation)
    elif out.dtype in NARROW and operation in ("mean", "sum"):
        total = parts[0].float()
        for part in parts[1:]:
            total += part
        out.copy_(total.div_(len(parts)) if operation == "mean" else total)
    else:
        pairwise = PAIRWISE["sum" if operation == "mean" else operation]
        pairwise(parts[0], parts[1], out=out)
        for part in parts[2:]:
            pairwise(out, part, out=out)
        if operation == "mean":
            out.div_(len(parts))


def average_into(out: torch.Tensor, parts: Sequence[torch.Tensor]) -> None:
    """Write the mean of ``parts`` to ``out``, as a running mean by ``lerp``, whose division costs no extra pass.

    The mean of two infinities is a NaN, which is as bad in a gradient.
    """
    if len(parts) > 2 and out.dtype in NARROW:
        reduce_into(out, parts, "mean")
    elif len(parts) > 2 and out.numel() > _chunk():
        for target, *pieces in _chunks(out, parts):
            average_into(target, pieces)
    else:
        torch.lerp(parts[0], parts[1], 1 / 2, out=out)
        for count, part in enumerate(parts[2:], start=3):
            torch.lerp(out, part, 1 / count, out=out)


def is_finite(flat: torch.Tensor) -> bool:
    """Whether all values are finite; most often one pass tells, that adds them up."""
    total = flat.sum(dtype=torch.float32 if flat.dtype in NARROW else flat.dtype)
    return bool(total.isfinite()) or bool(flat.isfinite().all())


def scaled_sum_into(out: torch.Tensor, parts: Sequence[torch.Tensor], scale: float) -> None:
    """Write the sum of ``parts``, multiplied by ``scale``, to ``out``, which is none of them."""
    for target, *pieces in _chunks(out, parts):
        if out.dtype in NARROW:
            total = pieces[0].float()
            for piece in pieces[1:]:
                total += piece
            target.copy_(total.mul_(scale))
        else:
            torch.add(pieces[0], pieces[1], out=target)
            for piece in pieces[2:]:
                target.add_(piece)
            target.mul_(scale)


def _chunk() -> int:
    return _CHUNK * torch.get_num_threads()


def _chunks(out: torch.Tensor, parts: Sequence[torch.Tensor]) -> Iterator[tuple[torch.Tensor, ...]]:
    return zip(*(tensor.split(_chunk()) for tensor in (out, *parts)), strict=True)
