"""Averages of what lies on GPUs: by NCCL between GPUs, or through the CPU where workers share one."""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Any

import torch

from hocket import spans
from hocket.comm.communicator import Averager, Communicator
from hocket.comm.layout import Layout, Limits, bucket_limits
from hocket.transport.gate import Description


def make_averager(communicator: Communicator, layout: Layout, *, private: bool = True) -> Averager:
    """The averager for tensors laid out as ``layout``, wherever they are."""
    if layout.device.type == "cpu":
        return communicator.averager(layout, private=private)
    if communicator.nccl is not None:
        return NcclAverager(communicator, layout)
    return StagedAverager(communicator.averager(layout.on_cpu()), layout)


def make_split_averager(communicator: Communicator, layout: Layout) -> Averager:
    """The same, with halves between which data travels while this rank does other things."""
    if layout.device.type == "cpu":
        return communicator.split_averager(layout)
    if communicator.nccl is not None:
        return NcclAverager(communicator, layout)
    return StagedAverager(communicator.split_averager(layout.on_cpu()), layout)


def limits(communicator: Communicator, tensors: Sequence[torch.Tensor]) -> Limits | None:
    """How large buckets should be to average ``tensors``."""
    total = sum(tensor.nbytes for tensor in tensors)
    if tensors and tensors[0].is_cuda and communicator.size > 1:
        return bucket_limits(total)
    return communicator.limits(total)


class NcclAverager(Averager):
    """Each bucket is added up in place, on NCCL's own stream, while the backward pass goes on.

    What ranks compare and tell each other goes over the CPU's communicator, so that nobody waits for a GPU.
    """

    def __init__(self, communicator: Communicator, layout: Layout) -> None:
        assert communicator.nccl is not None
        self._communicator, self._group = communicator, communicator.nccl
        self.overlaps = len(layout.buckets) > 1
        self.scale = 1 / communicator.size
        self.slots = self.results = layout.allocate()
        self.all_slots = [self.slots]
        self._complete = bytearray(len(self.slots))
        self._works: list[Any] = []
        self._sent_at: list[float] = []
        self._names = layout.bucket_names
        self._group.users.add(self)

    def ready(self, bucket: int) -> None:
        self._complete[bucket] = 1
        if len(self._group.users) == 1:  # which of several models is ready first may differ between ranks
            self._send()

    def _send(self) -> None:
        while (bucket := len(self._works)) < len(self.slots):
            idle = bucket in self.idle  # it never becomes complete, and holds up nobody
            if not (idle or self._complete[bucket]):
                break
            self._sent_at.append(time.perf_counter())
            self._works.append(None if idle else self._group.start_sum(self.slots[bucket]))

    def close(self) -> None:
        self._group.users.discard(self)

    def average(self, number: int, payload: int, what: Description) -> list[int]:
        payloads = self._communicator.meet(number, payload, what)
        self._send_all()
        return self._await(payloads)

    def begin(self, number: int, payload: int, what: Description) -> None:
        super().begin(number, payload, what)
        self._send_all()

    def finish(self) -> list[int]:
        return self._await(self._communicator.meet(*self._begun))

    def _send_all(self) -> None:
        self._complete = bytearray(b"\1" * len(self.slots))
        self._send()

    def _await(self, payloads: list[int]) -> list[int]:
        for bucket, work in enumerate(self._works):
            if work is not None:
                self._group.wait(work)
                spans.add(
                    spans.EXCHANGE, f"{self._names[bucket]} under way", self._sent_at[bucket], time.perf_counter(),
                    track=f"bucket {bucket + 1}",
                )  # fmt: skip
        self._works.clear()
        self._sent_at.clear()
        self._complete = bytearray(len(self.slots))
        return payloads


class StagedAverager(Averager):
    """Copies every bucket to pinned memory of the CPU, on a stream of its own, and has ``inner`` average it there."""

    def __init__(self, inner: Averager, layout: Layout) -> None:
        self._inner = inner
        self.overlaps, self.scale = inner.overlaps, inner.scale
        self.slots = layout.allocate()
        self.all_slots = [self.slots]
        self.results = layout.allocate()
        self._pinned = [torch.empty(b.count, dtype=b.dtype, pin_memory=True) for b in layout.buckets]
        self._stream = torch.cuda.Stream(layout.device)
        self._copied = bytearray(len(self.slots))
        self._pending: list[tuple[int, torch.cuda.Event]] = []

    def ready(self, bucket: int) -> None:
        self._copied[bucket] = 1
        self._stream.wait_stream(torch.cuda.current_stream(self._stream.device))
        with torch.cuda.stream(self._stream):
            self._pinned[bucket].copy_(self.slots[bucket], non_blocking=True)
            event = torch.cuda.Event()
            event.record(self._stream)
        self._pending.append((bucket, event))
        self.progress()

    def progress(self) -> None:
        while self._pending and self._pending[0][1].query():
            bucket, _ = self._pending.pop(0)
            self._inner.slots[bucket].copy_(self._pinned[bucket])
            self._inner.ready(bucket)
        self._inner.progress()

    def average(self, number: int, payload: int, what: Description) -> list[int]:
        self._bring()
        return self._take(self._inner.average(number, payload, what))

    def begin(self, number: int, payload: int, what: Description) -> None:
        self._bring()
        self._inner.begin(number, payload, what)

    def finish(self) -> list[int]:
        return self._take(self._inner.finish())

    def _bring(self) -> None:
        """Have everything on the CPU."""
        self._inner.idle = self.idle
        for bucket, copied in enumerate(self._copied):
            if not copied:
                self.ready(bucket)
        self._stream.synchronize()
        self.progress()

    def _take(self, payloads: list[int]) -> list[int]:
        for result, pinned, averaged in zip(self.results, self._pinned, self._inner.results, strict=True):
            pinned.copy_(averaged)
            result.copy_(pinned, non_blocking=True)
        self._copied = bytearray(len(self.slots))
        return payloads

    def close(self) -> None:
        self._inner.close()
