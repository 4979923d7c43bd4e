"""All-reduce by Hocket and by PyTorch's Gloo, in one run, for ``hocket bench allreduce``."""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.distributed as dist

from hocket.comm.bucket_layout import Bucket
from hocket.comm.changing_group import RegroupingCommunicator
from hocket.comm.communicator import Communicator
from hocket.comm.shared import SharedCommunicator
from hocket.job import collectives
from hocket.job.worker import current
from hocket.lab.bench.bench_worker import alternate, milliseconds, ratio
from hocket.transport.network_group import NetworkGroup

SIZES = {"4 KiB": 1 << 12, "1 MiB": 1 << 20, "64 MiB": 1 << 26}


def allreduce(rounds: str) -> list[dict[str, object]]:
    """A row for each size."""
    dist.init_process_group("gloo")
    rows: list[dict[str, object]] = []
    for name, nbytes in SIZES.items():
        times = alternate(_ways(nbytes // 4), int(rounds), 0.25 if nbytes < 1 << 22 else 0.6)
        row: dict[str, object] = {"size": name}
        row |= {f"{way}_us": milliseconds(values) * 1e3 for way, values in times.items()}
        rows.append(row | {f"{way}_ratio": ratio(times, "gloo", way) for way in times if way != "gloo"})
    dist.destroy_process_group()
    return rows


def _ways(count: int) -> dict[str, Callable[[], object]]:
    communicator = current().communicator
    if isinstance(communicator, RegroupingCommunicator):
        communicator = communicator.group
    ordinary, other = torch.zeros(count), torch.zeros(count)
    ways: dict[str, Callable[[], object]] = {
        "gloo": lambda: dist.all_reduce(other),
        "ordinary": lambda: collectives.allreduce(ordinary, "mean", out=ordinary),
    }
    if communicator.traffic is not None:
        group = _between_hosts(communicator)
        return ways | {"exchange": lambda: group.wait(group.start_sum(ordinary), "a benchmark")}
    if not isinstance(communicator, SharedCommunicator):
        raise SystemExit("hocket bench allreduce compares shared memory, which needs x86-64 Linux, or --hosts")
    buffer = communicator.buffer([Bucket(torch.float32, count)], "benchmark", result=True)
    buffer.mine[0].normal_()
    return ways | {"shared": lambda: buffer.average(1, 0, "benchmark")}


def _between_hosts(communicator: Communicator) -> NetworkGroup:
    """What carries the sums of an exchange, where each host has one worker."""
    lane = communicator.open_lane()
    if lane is None or not lane.groups or len(lane.topology.local) > 1:
        raise SystemExit("hocket bench allreduce --hosts measures one worker on each host: leave out -n")
    return lane.groups[0]
