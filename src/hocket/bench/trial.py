"""Small all-reduces whose result is known, each timed; started by ``hocket doctor`` on every worker."""

from __future__ import annotations

import json
import statistics
import time

import torch

from hocket.job.collectives import allreduce, barrier
from hocket.job.runtime import init, rank, size

MARK = "hocket-trial"  # before the result, in a line of the output
SIZES = {"4 KiB": (1 << 12, 30), "4 MiB": (1 << 22, 5)}  # bytes, and how often


def main() -> None:
    """Rank 0 prints the median time of each size."""
    init()
    found = {}
    for name, (nbytes, times) in SIZES.items():
        base = torch.arange(nbytes // 4, dtype=torch.float32) % 97
        expected = size() * base + size() * (size() - 1) / 2
        taken = []
        for _ in range(times):
            barrier()
            begun = time.perf_counter()
            total = allreduce(base + rank(), "sum")
            taken.append(time.perf_counter() - begun)
            if not torch.equal(total, expected):
                first = int((total != expected).nonzero()[0])
                raise SystemExit(f"the sum of {name} is wrong: {total[first]} instead of {expected[first]} at {first}")
        found[name] = statistics.median(taken)
    if rank() == 0:
        print(MARK, json.dumps({"size": size(), "seconds": found}))


if __name__ == "__main__":
    main()
