"""All-reduce by Hocket and by PyTorch's Gloo, in one run; started by ``hocket bench allreduce`` on every worker."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from pathlib import Path

import torch
import torch.distributed as dist

from hocket.bench.timing import alternate, median, ratio
from hocket.comm.layout import Bucket
from hocket.comm.shared import SharedCommunicator
from hocket.job.collectives import allreduce
from hocket.job.runtime import current, init, rank

SIZES = {"4 KiB": 1 << 12, "1 MiB": 1 << 20, "64 MiB": 1 << 26}


def main() -> None:
    """Measure all sizes and write the rows to the file that is the first argument."""
    init()
    dist.init_process_group("gloo")
    rounds = int(sys.argv[2])
    rows = []
    for name, nbytes in SIZES.items():
        times = alternate(_ways(nbytes // 4), rounds, 0.25 if nbytes < 1 << 22 else 0.6)
        rows.append(
            {
                "size": name,
                **{f"{way}_us": median(values) * 1e6 for way, values in times.items()},
                "ordinary_ratio": ratio(times, "gloo", "ordinary"),
                "shared_ratio": ratio(times, "gloo", "shared"),
            }
        )
    if rank() == 0:
        Path(sys.argv[1]).write_text(json.dumps(rows))
    dist.destroy_process_group()


def _ways(count: int) -> dict[str, Callable[[], object]]:
    communicator = current().communicator
    if not isinstance(communicator, SharedCommunicator):
        raise SystemExit("hocket bench allreduce compares shared memory, which needs x86-64 Linux")
    ordinary, other = torch.randn(count), torch.randn(count)
    buffer = communicator.buffer([Bucket(torch.float32, count)], "benchmark", result=True)
    buffer.mine[0].normal_()
    return {
        "gloo": lambda: dist.all_reduce(other),
        "ordinary": lambda: allreduce(ordinary, "mean", out=ordinary),
        "shared": lambda: buffer.average(1, 0, "benchmark"),
    }


if __name__ == "__main__":
    main()
