"""Averages that travel beside the computation, and are fetched when the next ones are ready."""

from __future__ import annotations

from hocket.comm import gpu
from hocket.comm.communicator import Averager, Communicator
from hocket.comm.layout import Layout
from hocket.transport.gate import Description


class DelayedAverager(Averager):
    """Two averagers take turns, so that results can be read, and slots written, while others are under way.

    Args:
        communicator: Of all ranks.
        layout: How gradients lie in the buffers.
        turns: 1 if an average is always read before the slots are written again.
    """

    def __init__(self, communicator: Communicator, layout: Layout, *, turns: int = 2) -> None:
        self._pair = [gpu.make_split_averager(communicator, layout) for _ in range(turns)]
        self.is_under_way = False
        """Whether something was started that nobody has fetched."""
        self.scale = self._pair[0].scale
        self.slots, self.results = self._pair[0].slots, self._pair[-1].results
        self.all_slots = [slots for averager in self._pair for slots in averager.all_slots]
        self.all_results = [averager.results for averager in self._pair]

    def begin(self, number: int, payload: int, what: Description) -> None:
        """Begin to average ``slots``; all ranks at the same place. They are others afterwards, of two."""
        assert not self.is_under_way
        self._pair[0].idle = self.idle
        self._pair[0].begin(number, payload, what)
        self.is_under_way = True
        self._pair.reverse()
        self.slots = self._pair[0].slots

    def progress(self) -> None:
        if self.is_under_way:
            self._pair[-1].progress()

    def finish(self) -> list[int]:
        """Wait for what was begun, whose averages are in ``results`` then; the payloads of all ranks."""
        assert self.is_under_way
        self.is_under_way = False
        payloads = self._pair[-1].finish()
        self.results = self._pair[-1].results
        return payloads

    def average(self, number: int, payload: int, what: Description) -> list[int]:
        self.begin(number, payload, what)
        return self.finish()

    def close(self) -> None:
        for averager in self._pair:
            averager.close()
