"""Averages that travel beside the computation, and are fetched when the next ones are ready."""

from __future__ import annotations

import functools
import time
from collections.abc import Callable

import torch

from hocket.comm import gpu
from hocket.comm.communicator import Averager, Communicator
from hocket.comm.layout import Layout
from hocket.transport.beside import Task
from hocket.transport.gate import Description


class DelayedAverager(Averager):
    """Two averagers take turns, so that results can be read, and slots written, while others are under way."""

    def __init__(self, communicator: Communicator, layout: Layout) -> None:
        self._communicator = communicator
        self._pair = [gpu.make_averager(communicator, layout) for _ in range(2)]
        self._stream = torch.cuda.Stream(layout.device) if layout.device.type == "cuda" else None
        self._task: Task | None = None
        self.scale = self._pair[0].scale
        self.slots, self.results = self._pair[0].slots, self._pair[1].results
        self.all_slots = [slots for averager in self._pair for slots in averager.all_slots]
        self.all_results = [averager.results for averager in self._pair]

    @property
    def is_under_way(self) -> bool:
        """Whether something was started that nobody has fetched."""
        return self._task is not None

    def start(self, number: int, payload: int, what: Description) -> None:
        """Begin to average ``slots``; all ranks at the same place. They are others afterwards."""
        assert self._task is None
        averager = self._pair[0]
        averager.idle = self.idle
        work = functools.partial(averager.average, number, payload, what)
        self._task = self._communicator.beside.start(functools.partial(self._run, work, self._mark()))
        self._pair.reverse()
        self.slots = self._pair[0].slots

    def finish(self) -> list[int]:
        """Wait for what was started, whose averages are in ``results`` then; the payloads of all ranks."""
        assert self._task is not None
        begin = time.perf_counter()
        payloads, hidden = self._task.result()
        traffic = self._communicator.traffic
        if traffic is not None and hidden:  # its times were taken
            traffic.exposed += min(time.perf_counter() - begin, hidden)
        self._task = None
        self.results = self._pair[1].results
        return payloads  # type: ignore[no-any-return]

    def average(self, number: int, payload: int, what: Description) -> list[int]:
        self.start(number, payload, what)
        return self.finish()

    def close(self) -> None:
        for averager in self._pair:
            averager.close()

    def _mark(self) -> torch.cuda.Event | None:
        """Where the script's stream is now: the slots are written there."""
        if self._stream is None:
            return None
        event = torch.cuda.Event()
        event.record(torch.cuda.current_stream(self._stream.device))
        return event

    def _run(self, work: Callable[[], list[int]], written: torch.cuda.Event | None) -> tuple[list[int], float]:
        """In the other thread; the payloads, and seconds for which it looked as if the script had waited."""
        traffic = self._communicator.traffic
        exposed = traffic.exposed if traffic is not None else 0.0
        if self._stream is None or written is None:
            payloads = work()
        else:
            with torch.cuda.stream(self._stream):
                self._stream.wait_event(written)
                payloads = work()
                self._stream.synchronize()
        if traffic is None:
            return payloads, 0.0
        hidden, traffic.exposed = traffic.exposed - exposed, exposed
        return payloads, hidden
