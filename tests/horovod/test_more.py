"""Stalls, batch norm, timelines and functions: what stands beside the collectives."""

import io
import json
import os
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from pool import Pool
from torch import nn

import hocket.horovod.torch as hvd
from hocket.horovod.runner import run
from hocket.job.worker import current


def stalls(seconds: float) -> str:
    os.environ["HOROVOD_STALL_CHECK_TIME_SECONDS"] = str(seconds)
    before, sys.stderr = sys.stderr, io.StringIO()
    try:
        hvd.init()
        handle = hvd.allreduce_async(torch.ones(1), name="slow", op=hvd.Sum) if hvd.rank() == 0 else 0
        told = torch.zeros(1)
        while not told:
            told = hvd.broadcast(torch.tensor([float("slow" in sys.stderr.getvalue())]), 0)
        handle = handle or hvd.allreduce_async(torch.ones(1), name="slow", op=hvd.Sum)
        assert hvd.synchronize(handle).item() == hvd.size()
        hvd.shutdown()
        return str(sys.stderr.getvalue())
    finally:
        sys.stderr = before
        del os.environ["HOROVOD_STALL_CHECK_TIME_SECONDS"]


def test_a_stall_names_the_tensor_and_the_ranks(pool: Pool) -> None:
    said, *others = pool.run(3, stalls, 0.2)
    assert "'slow', allreduce of float32[1] (sum, 1.0, 1.0): submitted by rank 0, not by ranks 1, 2" in said
    assert others == ["", ""]


def gives_up() -> str:
    os.environ["HOROVOD_STALL_SHUTDOWN_TIME_SECONDS"] = "0.2"
    try:
        hvd.init()
        said = ""
        if hvd.rank() == 1:
            with pytest.raises(hvd.HorovodInternalError) as caught:
                hvd.allreduce(torch.ones(1), name="never")
            said = str(caught.value)
        current().communicator.barrier()  # what rank 0 submits before would be given up, too
        assert hvd.allreduce(torch.ones(1), op=hvd.Sum).item() == hvd.size()  # the job goes on
        hvd.shutdown()
        return said
    finally:
        del os.environ["HOROVOD_STALL_SHUTDOWN_TIME_SECONDS"]


def test_an_operation_is_not_waited_for_for_ever(pool: Pool) -> None:
    assert "given up: 'never'" in pool.run(2, gives_up)[1]


def normalise() -> None:
    hvd.init()
    rank, size = hvd.rank(), hvd.size()
    whole = torch.randn(4 * size, 3, 5, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    one = nn.BatchNorm1d(3).double()
    many = hvd.SyncBatchNorm(3).double()
    x, part = whole.clone().requires_grad_(), whole[4 * rank : 4 * rank + 4].clone().requires_grad_()
    (one(x) ** 3).sum().backward()
    (many(part) ** 3).sum().backward()
    assert torch.allclose(many.running_mean, one.running_mean) and torch.allclose(many.running_var, one.running_var)
    assert torch.allclose(part.grad, x.grad[4 * rank : 4 * rank + 4], atol=1e-9)
    hvd.shutdown()


def test_batch_norm_over_all_ranks(pool: Pool) -> None:
    pool.run(2, normalise)


def draw(path: str) -> None:
    hvd.init()
    hvd.start_timeline(path, mark_cycles=True)
    hvd.allreduce(torch.ones(1), name="drawn")
    hvd.stop_timeline()
    hvd.allreduce(torch.ones(1), name="not drawn")
    hvd.shutdown()


def test_timeline(pool: Pool, tmp_path: Path) -> None:
    pool.run(2, draw, str(tmp_path / "t.json"))
    events: list[dict[str, Any]] = json.loads((tmp_path / "t.json").read_text())
    names = {event["args"]["name"] for event in events if event["ph"] == "M"}
    assert names == {"drawn"} and {"ALLREDUCE", "CYCLE_START"} <= {event["name"] for event in events}


def square(x: int, *, add: int = 0) -> int:
    hvd.init()
    return x * x + add + hvd.rank()


def test_a_function_on_several_workers() -> None:
    assert run(square, (3,), {"add": 1}, np=2) == [10, 11]
