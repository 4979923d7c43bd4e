"""What scripts import from ``horovod.common`` and ``horovod.common.util``."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from typing import Any

from hocket.horovod.exceptions import HorovodInternalError, HostsUpdatedInterrupt

__all__ = [
    "HorovodInternalError", "HostsUpdatedInterrupt", "extension_available", "gpu_available", "num_rank_is_power_2",
    "split_list",
]  # fmt: skip


def extension_available(ext_base_name: str, *_: Any, **__: Any) -> bool:
    """Whether there is Horovod for a framework; for ``torch`` alone."""
    return ext_base_name == "torch"


def gpu_available(ext_base_name: str, *_: Any, **__: Any) -> bool:
    """Whether there is a GPU."""
    import torch

    return ext_base_name == "torch" and torch.cuda.is_available()


def num_rank_is_power_2(num_rank: int) -> bool:
    """Whether a number of ranks is a power of two."""
    return num_rank > 0 and num_rank & (num_rank - 1) == 0


def split_list(items: Sequence[Any], parts: int) -> list[Sequence[Any]]:
    """The items in so many parts, of about as many each."""
    each, more = divmod(len(items), parts)
    starts = [number * each + min(number, more) for number in range(parts + 1)]
    return [items[start:end] for start, end in pairwise(starts)]
