"""Small all-reduces whose result is known, each timed; started by ``hocket doctor`` on every worker."""

from __future__ import annotations

import json
import statistics
import sys
import time

import torch

from hocket.job.collectives import allreduce, barrier
from hocket.job.runtime import init, rank, size

MARK = "hocket-trial"  # before the result, in a line of the output
_TIMES = 20
_ENOUGH = 0.5  # seconds for one size, except that each is done twice


def main() -> None:
    """Each argument is a size in bytes; rank 0 prints the median time of each."""
    init()
    found = {argument: _measure(int(argument)) for argument in sys.argv[1:]}
    if rank() == 0:
        print(MARK, json.dumps({"size": size(), "seconds": found}))


def _measure(nbytes: int) -> float:
    base = torch.arange(nbytes // 4, dtype=torch.float32) % 97
    expected = size() * base + size() * (size() - 1) / 2
    taken: list[float] = []
    more = True
    while len(taken) < 2 or (more and len(taken) < _TIMES):
        barrier()
        begun = time.perf_counter()
        total = allreduce(base + rank(), "sum")
        taken.append(time.perf_counter() - begun)
        if not torch.equal(total, expected):
            first = int((total != expected).nonzero()[0])
            raise SystemExit(f"the sum of {nbytes:,} bytes is {total[first]} instead of {expected[first]} at {first}")
        more = float(allreduce(torch.tensor(sum(taken)), "max")) < _ENOUGH  # all have to agree
    return statistics.median(taken[1:])  # the first one makes buffers


if __name__ == "__main__":
    main()
