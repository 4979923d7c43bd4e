"""One worker, one GPU: which GPU a worker takes, and what connects the GPUs of a job."""

from __future__ import annotations

import functools
import secrets
import socket
from collections.abc import Callable, Sequence

import torch
from torch import nn

from hocket import config as configuration
from hocket.comm.communicator import Communicator, ConnectGpus
from hocket.config import Config
from hocket.errors import UsageError
from hocket.transport.waiting import ranks


def take(local_rank: int) -> None:
    """Have "cuda" mean this worker's own GPU when the script first uses one; not if the script has chosen already."""
    if not torch.cuda.is_initialized():
        torch.cuda._lazy_call(functools.partial(_choose, local_rank))


def _choose(local_rank: int) -> None:
    if torch.cuda.device_count() > 1:
        torch.cuda.set_device(local_rank % torch.cuda.device_count())


def connect(
    config: Config,
    communicator: Communicator,
    parameters: Sequence[nn.Parameter],
    make: Callable[[Config, torch.device], ConnectGpus],
) -> None:
    """Connect the GPUs of all workers before parameters on them train together; collective."""
    devices = {str(parameter.device): parameter.device for parameter in parameters}
    mine = next((str(d) for d in devices.values() if d.type != "cpu"), "")
    if len(devices) > 1:
        raise UsageError(
            f"the model's parameters are on several devices ({', '.join(sorted(devices))}): a worker trains on one; "
            "call model.to(device) before hocket.distribute()"
        )
    if mine and not mine.startswith("cuda"):
        raise UsageError(f"the model is on {mine}: Hocket trains on CPUs and CUDA GPUs; call model.cpu() first")
    if mine and communicator.changes and len(communicator.topology.hosts) > 1:
        raise UsageError(
            "with models on GPUs workers come and go only on one host: leave out the other hosts; or --on-loss, -n "
            "a..b, --spares, --discover and --transport tcp"
        )
    elif mine and communicator.changes and config.on_loss == "auto":
        # Each step would wait for the GPU, and for all others to have its results.
        communicator.stay("with models on GPUs a worker is replaced only if --on-loss replace asks for it")
    if communicator.nccl is not None or communicator.size == 1 or config.servers:
        return
    uuid = str(torch.cuda.get_device_properties(mine).uuid) if mine else ""
    host = config.host_name or socket.gethostname()
    everyone = [tuple(each) for each in communicator.gather_data([host, mine, uuid])]
    if not any(place[1] for place in everyone):
        return
    connects = config.transport in ("auto", "tcp")
    _check(everyone, shared_is_fine=config.share_gpus or not connects)
    if connects:
        if config.share_gpus:
            count_as_a_host()
        communicator.connect_gpus(make(config, devices[mine]))


def count_as_a_host() -> None:
    """Have NCCL take this process for a host of its own, or it refuses a second one on the same GPU."""
    configuration.tell_library("NCCL_HOSTID", secrets.token_hex(8))


def _check(everyone: Sequence[tuple[str, str, str]], *, shared_is_fine: bool) -> None:
    without = [rank for rank, (_, device, _) in enumerate(everyone) if not device]
    if without:
        raise UsageError(
            f"the model is on the CPU on {ranks(without)} and on a GPU elsewhere: put it on the same kind of device "
            "on every rank"
        )
    users: dict[str, list[int]] = {}
    for rank, (_, _, uuid) in enumerate(everyone):
        users.setdefault(uuid, []).append(rank)
    crowded = next((who for who in users.values() if len(who) > 1), None)
    if crowded is not None and not shared_is_fine:
        host, device, _ = everyone[crowded[0]]
        raise UsageError(
            f"{ranks(crowded)} on {host} have the same GPU ({device}), and NCCL needs one for each worker: start one "
            f"worker per GPU (-n {len(users)}), let each use its own (device 'cuda', or cuda:{{hocket.local_rank()}}), "
            "share GPUs over NCCL, for trials and tests, by --share-gpus, or share them through the CPU's memory, "
            "slowly, by --transport shared-memory"
        )
