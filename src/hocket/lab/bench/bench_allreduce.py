"""All-reduce by Hocket and by PyTorch's Gloo, in one run, for ``hocket bench allreduce``."""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.distributed as dist

from hocket.comm.bucket_layout import Bucket
from hocket.comm.shared import SharedCommunicator
from hocket.job import collectives
from hocket.job.worker import current
from hocket.lab.bench.bench_worker import alternate, milliseconds, ratio

SIZES = {"4 KiB": 1 << 12, "1 MiB": 1 << 20, "64 MiB": 1 << 26}


def allreduce(rounds: str) -> list[dict[str, object]]:
    """A row for each size."""
    dist.init_process_group("gloo")
    rows: list[dict[str, object]] = []
    for name, nbytes in SIZES.items():
        times = alternate(_ways(nbytes // 4), int(rounds), 0.25 if nbytes < 1 << 22 else 0.6)
        rows.append(
            {
                "size": name,
                **{f"{way}_us": milliseconds(values) * 1e3 for way, values in times.items()},
                "ordinary_ratio": ratio(times, "gloo", "ordinary"),
                "shared_ratio": ratio(times, "gloo", "shared"),
            }
        )
    dist.destroy_process_group()
    return rows


def _ways(count: int) -> dict[str, Callable[[], object]]:
    communicator = current().communicator
    if not isinstance(communicator, SharedCommunicator):
        raise SystemExit("hocket bench allreduce compares shared memory, which needs x86-64 Linux")
    ordinary, other = torch.randn(count), torch.randn(count)
    buffer = communicator.buffer([Bucket(torch.float32, count)], "benchmark", result=True)
    buffer.mine[0].normal_()
    return {
        "gloo": lambda: dist.all_reduce(other),
        "ordinary": lambda: collectives.allreduce(ordinary, "mean", out=ordinary),
        "shared": lambda: buffer.average(1, 0, "benchmark"),
    }
