"""Means of tensors on GPUs: by NCCL between GPUs, or through the CPU where workers share a GPU."""

from __future__ import annotations

import time
import zlib
from collections.abc import Callable, Sequence
from typing import Any

import torch

from hocket import spans
from hocket.comm.bucket_layout import Layout
from hocket.comm.exchange import Algorithm, Ticket
from hocket.transport.nccl import NcclGroup
from hocket.transport.waiting import Description

_ALL_THERE = zlib.crc32(b"all sums are there")

Meet = Callable[[int, int, Description], list[int]]


class Nccl(Algorithm):
    """Each bucket is added up in place, on NCCL's own stream, while the backward pass goes on.

    Where workers may be lost, the slots stay as they are, so that the sum can be made again without a lost worker, and
    the ranks meet once more when each has all sums: so the sums count on all of them, or on none.

    Args:
        group: The GPUs of all ranks.
        size: How many ranks there are.
        meet: Compares the ranks' tickets over the CPU, so that nobody waits for a GPU.
        layout: Where each tensor lies.
        background: Whether ``begin`` sends everything off; else only buckets that were ready are sent before ranks
            have found that they do the same.
    """

    def __init__(self, group: NcclGroup, size: int, meet: Meet, layout: Layout, *, background: bool) -> None:
        self._group, self._meet, self._background = group, meet, background
        self._scale = 1 / size
        self.overlaps = len(layout.buckets) > 1
        self.slots = layout.allocate()
        self.results = self.slots if group.look is None else layout.allocate()
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
            idle = bucket in self.idle  # an idle bucket never becomes complete, and holds up nobody
            if not (idle or self._complete[bucket]):
                break
            self._sent_at.append(time.perf_counter())
            self._works.append(None if idle else self._start(bucket))

    def _start(self, bucket: int) -> Any:
        slot, result = self.slots[bucket], self.results[bucket]
        return self._group.start_sum(torch.mul(slot, self._scale, out=result))

    def close(self) -> None:
        self._group.users.discard(self)

    def begin(self, ticket: Ticket) -> None:
        self._ticket = ticket
        if self._background:
            self._send_all()

    def finish(self) -> list[int]:
        payloads = self._meet(*self._ticket)
        self._send_all()
        if self._group.look is not None:
            number, _, what = self._ticket
            self._group.await_all([work for work in self._works if work is not None])
            self._meet(number ^ _ALL_THERE, 0, what)
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

    def _send_all(self) -> None:
        self._complete = bytearray(b"\1" * len(self.slots))
        self._send()


class Staged(Algorithm):
    """Copies every bucket to pinned memory of the CPU, on a stream of its own, and has ``inner`` average it there."""

    def __init__(self, inner: Algorithm, layout: Layout) -> None:
        self._inner = inner
        self.overlaps = inner.overlaps
        self.slots = layout.allocate()
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
            self._inner.claim()
            self._inner.slots[bucket].copy_(self._pinned[bucket])
            self._inner.ready(bucket)
        self._inner.progress()

    def begin(self, ticket: Ticket) -> None:
        self._bring()
        self._inner.begin(ticket)

    def end_round(self) -> bool:
        return self._inner.end_round()

    def owed(self) -> list[torch.Tensor] | None:
        return self._inner.owed()

    def owe(self, values: Sequence[torch.Tensor], rounds: int) -> None:
        self._inner.owe([value.cpu() for value in values], rounds)

    def finish(self) -> list[int]:
        payloads = self._inner.finish()
        for result, pinned, averaged in zip(self.results, self._pinned, self._inner.results, strict=True):
            pinned.copy_(averaged)
            result.copy_(pinned, non_blocking=True)
        self._copied = bytearray(len(self.slots))
        return payloads

    def _bring(self) -> None:
        """Wait until all buckets are on the CPU."""
        self._inner.idle = self.idle
        for bucket, copied in enumerate(self._copied):
            if not copied:
                self.ready(bucket)
        self._stream.synchronize()
        self.progress()

    def close(self) -> None:
        self._inner.close()
