"""Hocket trains one PyTorch script together on many processes.

hocket.init()
model, optimizer, loader = hocket.distribute(model, optimizer, loader)
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from hocket.errors import HocketError as HocketError
    from hocket.job.accumulation import accumulate as accumulate
    from hocket.job.batchnorm import SyncBatchNorm as SyncBatchNorm
    from hocket.job.batchnorm import sync_batchnorm as sync_batchnorm
    from hocket.job.checkpoint.resuming import load as load
    from hocket.job.checkpoint.resuming import resume as resume
    from hocket.job.checkpoint.resuming import save as save
    from hocket.job.collectives import allgather as allgather
    from hocket.job.collectives import allreduce as allreduce
    from hocket.job.collectives import barrier as barrier
    from hocket.job.collectives import broadcast as broadcast
    from hocket.job.distribute import distribute as distribute
    from hocket.job.key_value import KeyValue as KeyValue
    from hocket.job.learning_rate import scale_lr as scale_lr
    from hocket.job.metrics import maximum as maximum
    from hocket.job.metrics import mean as mean
    from hocket.job.metrics import minimum as minimum
    from hocket.job.metrics import report as report
    from hocket.job.metrics import total as total
    from hocket.job.metrics import weight as weight
    from hocket.job.runtime import init as init
    from hocket.job.runtime import local_rank as local_rank
    from hocket.job.runtime import rank as rank
    from hocket.job.runtime import settle as settle
    from hocket.job.runtime import size as size
    from hocket.job.shares import share as share
    from hocket.launch.function import launch as launch
    from hocket.strategies.choices import BSP as BSP
    from hocket.strategies.choices import DMB as DMB
    from hocket.strategies.choices import EASGD as EASGD
    from hocket.strategies.choices import PS as PS
    from hocket.strategies.choices import SSP as SSP
    from hocket.strategies.choices import Asynchronous as Asynchronous
    from hocket.strategies.choices import Central as Central
    from hocket.strategies.choices import Delayed as Delayed
    from hocket.strategies.choices import DiLoCo as DiLoCo
    from hocket.strategies.choices import Downpour as Downpour
    from hocket.strategies.choices import FullBatch as FullBatch
    from hocket.strategies.choices import Gossip as Gossip
    from hocket.strategies.choices import Hogwild as Hogwild
    from hocket.strategies.choices import LocalSGD as LocalSGD
    from hocket.strategies.choices import Mirrored as Mirrored
    from hocket.strategies.choices import Softsync as Softsync
    from hocket.strategies.choices import Switch as Switch

__version__ = "0.1.0"

# Loaded when first used: the command line must not wait for torch.
_HOMES = {
    "PS": "hocket.strategies.choices",
    "DMB": "hocket.strategies.choices",
    "Delayed": "hocket.strategies.choices",
    "EASGD": "hocket.strategies.choices",
    "DiLoCo": "hocket.strategies.choices",
    "FullBatch": "hocket.strategies.choices",
    "Gossip": "hocket.strategies.choices",
    "Hogwild": "hocket.strategies.choices",
    "LocalSGD": "hocket.strategies.choices",
    "BSP": "hocket.strategies.choices",
    "SSP": "hocket.strategies.choices",
    "Asynchronous": "hocket.strategies.choices",
    "Softsync": "hocket.strategies.choices",
    "Downpour": "hocket.strategies.choices",
    "Central": "hocket.strategies.choices",
    "HocketError": "hocket.errors",
    "KeyValue": "hocket.job.key_value",
    "Mirrored": "hocket.strategies.choices",
    "Switch": "hocket.strategies.choices",
    "SyncBatchNorm": "hocket.job.batchnorm",
    "accumulate": "hocket.job.accumulation",
    "allgather": "hocket.job.collectives",
    "allreduce": "hocket.job.collectives",
    "barrier": "hocket.job.collectives",
    "broadcast": "hocket.job.collectives",
    "distribute": "hocket.job.distribute",
    "init": "hocket.job.runtime",
    "launch": "hocket.launch",
    "load": "hocket.job.checkpoint.resuming",
    "local_rank": "hocket.job.runtime",
    "maximum": "hocket.job.metrics",
    "mean": "hocket.job.metrics",
    "minimum": "hocket.job.metrics",
    "rank": "hocket.job.runtime",
    "report": "hocket.job.metrics",
    "resume": "hocket.job.checkpoint.resuming",
    "save": "hocket.job.checkpoint.resuming",
    "scale_lr": "hocket.job.learning_rate",
    "settle": "hocket.job.runtime",
    "share": "hocket.job.shares",
    "size": "hocket.job.runtime",
    "sync_batchnorm": "hocket.job.batchnorm",
    "total": "hocket.job.metrics",
    "weight": "hocket.job.metrics",
}
__all__ = sorted(_HOMES)  # noqa: PLE0605


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module 'hocket' has no attribute {name!r}")
    home = import_module(_HOMES[name])
    value = home if name == "launch" else getattr(home, name)  # that package can be called
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return __all__
