"""The transport between hosts, and where there is no shared memory: groups of PyTorch's own, over Gloo."""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from hocket.errors import HocketError, UsageError
from hocket.transport.network_group import START, Watcher, Way, introduce
from hocket.transport.store import Store
from hocket.transport.waiting import Description

_REDUCE = {
    "sum": dist.ReduceOp.SUM,
    "max": dist.ReduceOp.MAX,
    "min": dist.ReduceOp.MIN,
    "product": dist.ReduceOp.PRODUCT,
}
_LATER = 60.0  # seconds after the watch's own deadline at which Gloo would give up


class ProcessGroup:
    """Some ranks of the job, over Gloo; beside any group that the script itself makes. See ``NetworkGroup``.

    Args:
        store: The store of this group alone, through which its members find each other.
        rank: The rank of this member in the group.
        size: How many members the group has.
        address: The address at which the others reach this host.
        timeout: Seconds to wait for the other members.
        watch: Tells which member is missing.
    """

    def __init__(self, store: Store, rank: int, size: int, address: str, timeout: float, watch: Watcher) -> None:
        self.rank, self.size, self._watch, self._store = rank, size, watch, store
        self._under_way: list[Any] = []
        options: Any = dist.ProcessGroupGloo._Options()  # type: ignore[attr-defined]
        options._timeout = timedelta(seconds=_LATER)
        options._devices = [dist.ProcessGroupGloo.create_device(hostname=address, lazy_init=False)]
        try:
            introduce(store, rank, size, {}, lambda done: watch.wait(done, START))
            self._group: Any = dist.ProcessGroupGloo(store, rank, size, options)  # this wait cannot be interrupted
            self._group._set_default_timeout(timedelta(seconds=timeout + _LATER))
        except HocketError:
            raise
        except RuntimeError as error:
            raise watch.explain(error, START) from error

    def start_sum(
        self, tensor: torch.Tensor, note: Callable[[], None] | None = None, way: Way | None = None
    ) -> Any:
        if way is not None:
            raise UsageError(f"--codec {way.name} and --transport gloo do not go together: leave out one of them")
        if note is not None:
            note()
        return self._start(lambda: self._group.allreduce([tensor], dist.AllreduceOptions()))

    def allreduce(self, tensor: torch.Tensor, operation: str, what: Description) -> None:
        options = dist.AllreduceOptions()
        options.reduceOp = _REDUCE[operation]  # type: ignore[assignment]
        self.wait(self._start(lambda: self._group.allreduce([tensor], options)), what)

    def allgather(self, tensor: torch.Tensor, what: Description) -> list[torch.Tensor]:
        parts = [torch.empty_like(tensor) for _ in range(self.size)]
        self.wait(self._start(lambda: self._group.allgather([parts], [tensor])), what)
        return parts

    def gather(self, tensor: torch.Tensor, root: int, what: Description) -> list[torch.Tensor]:
        parts = [torch.empty_like(tensor) for _ in range(self.size)] if self.rank == root else []
        options = dist.GatherOptions()
        options.rootRank = root
        self.wait(self._start(lambda: self._group.gather([parts] if parts else [], [tensor], options)), what)
        return parts

    def broadcast(self, tensor: torch.Tensor, root: int, what: Description) -> None:
        options = dist.BroadcastOptions()
        options.rootRank = root
        self.wait(self._start(lambda: self._group.broadcast([tensor], options)), what)

    def wait(self, work: Any, what: Description) -> None:
        def done(seconds: float) -> bool:
            try:
                work.wait(timedelta(seconds=seconds))
            except RuntimeError as error:
                if "Operation timed out" in str(error):  # this wait's, not one of Gloo's own
                    return False
                raise self._watch.explain(error, what) from error
            return True

        self._watch.wait(done, what)
        self._under_way.remove(work)

    def close(self) -> None:
        """Give back the ports.

        If something is still under way in the group, its ports stay until the process ends: Gloo would wait for it.
        """
        if self._group is not None and not all(work.is_completed() for work in self._under_way):
            ctypes.pythonapi.Py_IncRef(ctypes.py_object(self._group))
        self._group = None

    def _start(self, call: Any) -> Any:
        try:
            self._under_way.append(call())
            return self._under_way[-1]
        except RuntimeError as error:
            raise self._watch.explain(error, "the start of a collective") from error
