"""Wrappers that exchange gradients by themselves, and what to do instead of putting a distributed model into one."""

from __future__ import annotations

import sys

from torch import nn
from torch.nn.parallel import DistributedDataParallel

from hocket.errors import UsageError


def is_wrapper(module: nn.Module) -> bool:
    """Whether this is DistributedDataParallel, FullyShardedDataParallel, or has been through ``fully_shard``."""
    fsdp = sys.modules.get("torch.distributed.fsdp")  # which nobody can use who has not imported it
    names = ("FullyShardedDataParallel", "FSDPModule")
    kinds = tuple(kind for name in names if isinstance(kind := getattr(fsdp, name, None), type))
    return isinstance(module, (DistributedDataParallel, *kinds))


def refuse_inside(model: nn.Module) -> None:
    """Raise if ``model`` is such a wrapper, or has one in it."""
    for module in model.modules():
        if is_wrapper(module):
            refuse(module)


def refuse(wrapper: nn.Module) -> None:
    """Raise."""
    kind = type(wrapper).__name__
    raise UsageError(
        f"Hocket and a wrapper ({kind}) would both exchange the gradients of this model, whatever the strategy: leave "
        "the wrapper out; for accelerate, the Trainer of Hugging Face or Lightning, which wrap models of several "
        "processes by themselves, add --hide-torch-env to hocket run, and they see one"
    )
