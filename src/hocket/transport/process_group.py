"""The transport of machines without futex and ordered stores: PyTorch's Gloo process group."""

from __future__ import annotations

import time
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import PrefixStore, Store, TCPStore

from hocket.errors import DeadlineExceeded, WorkerLost

__all__ = ["ProcessGroup", "Store", "open_store"]

_REDUCE = {
    "sum": dist.ReduceOp.SUM,
    "max": dist.ReduceOp.MAX,
    "min": dist.ReduceOp.MIN,
    "product": dist.ReduceOp.PRODUCT,
}


def open_store(address: str, port: int, *, host: bool, timeout: float) -> Store:
    """Connect to the store of this job, or be its host.

    A script that calls ``init_process_group`` by itself finds the same store: it may be opened twice in a process.
    """
    return TCPStore(address, port, None, host, timedelta(seconds=timeout), wait_for_workers=False, multi_tenant=True)


class ProcessGroup:
    """A group of workers over Gloo; beside any group that the script itself makes."""

    def __init__(self, store: Store, rank: int, size: int, timeout: float) -> None:
        self.rank, self.size = rank, size
        self.waited = 0.0
        self._timeout = timeout
        options = timedelta(seconds=timeout)
        self._group: Any = self._guard(lambda: dist.ProcessGroupGloo(PrefixStore("hocket", store), rank, size, options))

    def allreduce(self, tensor: torch.Tensor, operation: str) -> None:
        options = dist.AllreduceOptions()
        options.reduceOp = _REDUCE[operation]  # type: ignore[assignment]
        self._run(lambda: self._group.allreduce([tensor], options))

    def allgather(self, tensor: torch.Tensor) -> list[torch.Tensor]:
        parts = [torch.empty_like(tensor) for _ in range(self.size)]
        self._run(lambda: self._group.allgather([parts], [tensor]))
        return parts

    def broadcast(self, tensor: torch.Tensor, root: int) -> None:
        options = dist.BroadcastOptions()
        options.rootRank = root
        self._run(lambda: self._group.broadcast([tensor], options))

    def close(self) -> None:
        """Give back the ports."""
        self._group = None

    def _run(self, start: Callable[[], Any]) -> None:
        before = time.monotonic()
        self._guard(lambda: start().wait())
        self.waited += time.monotonic() - before

    def _guard(self, call: Callable[[], Any]) -> Any:
        try:
            return call()
        except RuntimeError as error:
            if "imed out" in str(error):
                raise DeadlineExceeded(
                    f"rank {self.rank} waited {self._timeout:g} s for another rank; if that one does honest work, "
                    f"raise --timeout (Gloo says: {error})"
                ) from error
            raise WorkerLost(f"rank {self.rank} lost the connection to another rank (Gloo says: {error})") from error
