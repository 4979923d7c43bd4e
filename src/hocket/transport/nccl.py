"""The transport between GPUs: PyTorch's NCCL process group, whose collectives have a stream of their own."""

from __future__ import annotations

import weakref
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from hocket.errors import JobError, WorkerLost
from hocket.transport.store import Store


class NcclGroup:
    """All ranks of a job, each with a GPU of its own.

    Attributes:
        users: The exchanges that use the group; if there are several, they must send in the same order on all ranks.
    """

    def __init__(self, store: Store, rank: int, size: int, timeout: float, device: torch.device) -> None:
        if not dist.is_nccl_available():
            raise JobError("this PyTorch has no NCCL: install a CUDA build, or use --transport gloo, which is slower")
        options = dist.ProcessGroupNCCL.Options(is_high_priority_stream=True)
        options._timeout = timedelta(seconds=timeout)
        self._store = store
        self._group: Any = dist.ProcessGroupNCCL(store, rank, size, options)
        self._group.eager_connect_single_device(device)
        self.users: weakref.WeakSet[object] = weakref.WeakSet()

    def start_sum(self, tensor: torch.Tensor) -> Any:
        """Replace ``tensor`` by the sum over all ranks, after what the current stream has to do now."""
        if self._group is None:
            raise WorkerLost("the GPUs are no longer connected: another rank was lost; see its output for the reason")
        return self._group.allreduce([tensor], dist.AllreduceOptions())

    def wait(self, work: Any) -> None:
        """Have the current stream wait until ``work`` is done; the calling thread does not wait."""
        work.wait()

    def close(self) -> None:
        """Give back what the group has taken; all ranks are done."""
        group, self._group = self._group, None
        if group is not None:
            group.shutdown()

    def abort(self) -> None:
        """End what is under way: a rank that it waits for is gone."""
        group, self._group = self._group, None
        if group is not None:
            group.abort()
