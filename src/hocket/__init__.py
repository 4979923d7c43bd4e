"""Hocket trains one PyTorch script together on many processes.

hocket.init()
model, optimizer, loader = hocket.distribute(model, optimizer, loader)
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from hocket import hooks as hooks
    from hocket import ray as ray
    from hocket.errors import HocketError as HocketError
    from hocket.job.accumulate_share_weight import accumulate as accumulate
    from hocket.job.accumulate_share_weight import share as share
    from hocket.job.accumulate_share_weight import weight as weight
    from hocket.job.batchnorm import SyncBatchNorm as SyncBatchNorm
    from hocket.job.batchnorm import sync_batchnorm as sync_batchnorm
    from hocket.job.checkpoint.save_load_resume import load as load
    from hocket.job.checkpoint.save_load_resume import resume as resume
    from hocket.job.checkpoint.save_load_resume import save as save
    from hocket.job.collectives import allgather as allgather
    from hocket.job.collectives import allgather_rows as allgather_rows
    from hocket.job.collectives import allreduce as allreduce
    from hocket.job.collectives import alltoall as alltoall
    from hocket.job.collectives import barrier as barrier
    from hocket.job.collectives import broadcast as broadcast
    from hocket.job.collectives import gather as gather
    from hocket.job.collectives import reduce as reduce
    from hocket.job.collectives import reduce_scatter as reduce_scatter
    from hocket.job.collectives import scatter as scatter
    from hocket.job.distribute import distribute as distribute
    from hocket.job.group_calls import group as group
    from hocket.job.key_value import KeyValue as KeyValue
    from hocket.job.learning_rate import scale_lr as scale_lr
    from hocket.job.metrics import maximum as maximum
    from hocket.job.metrics import mean as mean
    from hocket.job.metrics import minimum as minimum
    from hocket.job.metrics import report as report
    from hocket.job.metrics import total as total
    from hocket.job.send_receive import receive as receive
    from hocket.job.send_receive import send as send
    from hocket.job.worker import init as init
    from hocket.job.worker import local_rank as local_rank
    from hocket.job.worker import on_change as on_change
    from hocket.job.worker import rank as rank
    from hocket.job.worker import settle as settle
    from hocket.job.worker import size as size
    from hocket.launch.function import launch as launch
    from hocket.specs import BSP as BSP
    from hocket.specs import DMB as DMB
    from hocket.specs import EASGD as EASGD
    from hocket.specs import PS as PS
    from hocket.specs import SSP as SSP
    from hocket.specs import Asynchronous as Asynchronous
    from hocket.specs import Central as Central
    from hocket.specs import Delayed as Delayed
    from hocket.specs import DiLoCo as DiLoCo
    from hocket.specs import Downpour as Downpour
    from hocket.specs import FullBatch as FullBatch
    from hocket.specs import Gossip as Gossip
    from hocket.specs import Hogwild as Hogwild
    from hocket.specs import LocalSGD as LocalSGD
    from hocket.specs import Mirrored as Mirrored
    from hocket.specs import Softsync as Softsync
    from hocket.specs import Switch as Switch

__version__ = "0.1.0"

# Loaded when first used: the command line must not wait for torch.
_HOMES = {
    "PS": "hocket.specs",
    "DMB": "hocket.specs",
    "Delayed": "hocket.specs",
    "EASGD": "hocket.specs",
    "DiLoCo": "hocket.specs",
    "FullBatch": "hocket.specs",
    "Gossip": "hocket.specs",
    "Hogwild": "hocket.specs",
    "LocalSGD": "hocket.specs",
    "BSP": "hocket.specs",
    "SSP": "hocket.specs",
    "Asynchronous": "hocket.specs",
    "Softsync": "hocket.specs",
    "Downpour": "hocket.specs",
    "Central": "hocket.specs",
    "HocketError": "hocket.errors",
    "KeyValue": "hocket.job.key_value",
    "Mirrored": "hocket.specs",
    "Switch": "hocket.specs",
    "SyncBatchNorm": "hocket.job.batchnorm",
    "accumulate": "hocket.job.accumulate_share_weight",
    "allgather": "hocket.job.collectives",
    "allgather_rows": "hocket.job.collectives",
    "allreduce": "hocket.job.collectives",
    "alltoall": "hocket.job.collectives",
    "barrier": "hocket.job.collectives",
    "broadcast": "hocket.job.collectives",
    "distribute": "hocket.job.distribute",
    "gather": "hocket.job.collectives",
    "group": "hocket.job.group_calls",
    "hooks": "hocket.hooks",
    "init": "hocket.job.worker",
    "launch": "hocket.launch",
    "load": "hocket.job.checkpoint.save_load_resume",
    "local_rank": "hocket.job.worker",
    "maximum": "hocket.job.metrics",
    "mean": "hocket.job.metrics",
    "minimum": "hocket.job.metrics",
    "on_change": "hocket.job.worker",
    "rank": "hocket.job.worker",
    "ray": "hocket.ray",
    "receive": "hocket.job.send_receive",
    "reduce": "hocket.job.collectives",
    "reduce_scatter": "hocket.job.collectives",
    "report": "hocket.job.metrics",
    "resume": "hocket.job.checkpoint.save_load_resume",
    "save": "hocket.job.checkpoint.save_load_resume",
    "scale_lr": "hocket.job.learning_rate",
    "scatter": "hocket.job.collectives",
    "send": "hocket.job.send_receive",
    "settle": "hocket.job.worker",
    "share": "hocket.job.accumulate_share_weight",
    "size": "hocket.job.worker",
    "sync_batchnorm": "hocket.job.batchnorm",
    "total": "hocket.job.metrics",
    "weight": "hocket.job.accumulate_share_weight",
}
__all__ = sorted(_HOMES)  # noqa: PLE0605


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module 'hocket' has no attribute {name!r}")
    home = import_module(_HOMES[name])
    value = home if _HOMES[name] == f"hocket.{name}" else getattr(home, name)  # modules are public as they are
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return __all__
