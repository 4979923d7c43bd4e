"""The transport between GPUs: PyTorch's NCCL process group, whose collectives have a stream of their own."""

from __future__ import annotations

import statistics
import time
import weakref
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from typing import Any, NamedTuple

import torch
import torch.distributed as dist

from hocket import config
from hocket.errors import DeadlineExceeded, JobError, WorkerLost
from hocket.transport.store import Store

_LOOKS = 5  # sums of each size that are timed, after one that is not
_NAP = 5e-5  # seconds between two looks at whether sums are there, where workers may be lost
_LOOK = 0.05  # seconds between two looks at whether all workers live
_GRACE = 10.0  # seconds from an error of NCCL until it must be known who was lost
_SMALL, _BIG = 1 << 10, 1 << 22  # elements of what is timed


class Cost(NamedTuple):
    """What a sum over all GPUs takes: ``start`` seconds, and ``per_byte`` more for each byte."""

    start: float
    per_byte: float


class NcclGroup:
    """All ranks of a job, each with a GPU of its own.

    Args:
        store: Where the ranks find each other; used by no other group.
        rank: This worker's rank.
        size: How many ranks there are.
        timeout: Seconds to wait for the others.
        device: This worker's GPU.
        look: Raises if a worker is lost without whom the others go on. NCCL itself would wait for it for ever.

    Attributes:
        look: See above; None if the job ends with a lost worker.
        users: The exchanges that use the group; if there are several, they must send in the same order on all ranks.
    """

    def __init__(
        self,
        store: Store,
        rank: int,
        size: int,
        timeout: float,
        device: torch.device,
        look: Callable[[], None] | None = None,
    ) -> None:
        if not dist.is_nccl_available():
            raise JobError("this PyTorch has no NCCL: install a CUDA build, or use --transport gloo, which is slower")
        options = dist.ProcessGroupNCCL.Options(is_high_priority_stream=True)
        options._timeout = timedelta(seconds=timeout)
        if look is not None:
            # A failure is the caller's matter then; else the process would end when the group is aborted.
            config.tell_library("TORCH_NCCL_ASYNC_ERROR_HANDLING", "0")
        self._store, self._device, self._timeout, self.look = store, device, timeout, look
        self._group: Any = dist.ProcessGroupNCCL(store, rank, size, options)
        self.users: weakref.WeakSet[object] = weakref.WeakSet()
        if look is None:
            self._group.eager_connect_single_device(device)
            return
        self._stream = torch.cuda.Stream(device)  # waits for sums, and for nothing else
        with ThreadPoolExecutor(1, "hocket-nccl") as thread:
            connected = thread.submit(self._group.eager_connect_single_device, device)
            try:
                self._await(connected.done, look)
            except WorkerLost:
                self.abort()
                raise
            connected.result()

    def start_sum(self, tensor: torch.Tensor) -> Any:
        """Replace ``tensor`` by the sum over all ranks, after what the current stream has to do now."""
        if self._group is None:
            raise WorkerLost("the GPUs are no longer connected: another rank was lost; see its output for the reason")
        try:
            return self._group.allreduce([tensor], dist.AllreduceOptions())
        except dist.DistBackendError as error:
            if self.look is None:
                raise WorkerLost(f"NCCL has lost another rank ({_last(error)}): see its output") from None
            return _Refused(_last(error))  # who waits for the sum finds out who was lost

    def measure(self) -> Cost:
        """Find out what a sum takes now; collective, and takes as long as about ten sums of 16 MB."""
        small, big = (self._time(torch.zeros(count, device=self._device)) for count in (_SMALL, _BIG))
        return Cost(small, max(big - small, 0.0) / (4 * _BIG))

    def _time(self, tensor: torch.Tensor) -> float:
        times = []
        for _ in range(_LOOKS + 1):
            torch.cuda.synchronize(self._device)
            begin = time.perf_counter()
            self.wait(self.start_sum(tensor))
            torch.cuda.synchronize(self._device)
            times.append(time.perf_counter() - begin)
        return statistics.median(times[1:])

    def wait(self, work: Any) -> None:
        """Have the current stream wait until ``work`` is done; the calling thread does not wait."""
        work.wait()

    def await_all(self, works: Sequence[Any]) -> None:
        """Wait until the sums of ``works`` are there, on this rank; raises if a worker is lost meanwhile."""
        assert self.look is not None
        begin = time.monotonic()
        refused = next((work for work in works if isinstance(work, _Refused)), None)
        if refused is None:
            with torch.cuda.stream(self._stream):
                for work in works:
                    work.wait()
                there = self._stream.record_event()
            self._await(there.query, self.look)  # a work that has failed would say that it is completed
            return

        def look() -> None:
            assert self.look is not None
            self.look()
            if time.monotonic() - begin > _GRACE:
                raise JobError(f"NCCL has failed, and all workers live: {refused.why}; NCCL_DEBUG=INFO says more")

        self._await(lambda: False, look)

    def _await(self, is_done: Callable[[], bool], look: Callable[[], None]) -> None:
        begin = last = time.monotonic()
        while not is_done():
            time.sleep(_NAP)
            now = time.monotonic()
            if now - last >= _LOOK:
                last = now
                look()
            if now - begin > self._timeout:
                raise DeadlineExceeded(f"the GPUs of all ranks did not exchange within {self._timeout:g} s (--timeout)")

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


class _Refused(NamedTuple):
    """A sum that NCCL has refused to begin."""

    why: str


def _last(error: object) -> str:
    """The line of NCCL's error that says what has happened."""
    return str(error).strip().splitlines()[-1].strip()
