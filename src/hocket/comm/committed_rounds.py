"""Rounds of an exchange between hosts that are over for all workers, or for none of them."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Sequence
from typing import Protocol, TypeVar

import torch

from hocket.comm.exchange import Algorithm, Ticket
from hocket.errors import DeadlineExceeded, JobError

T = TypeVar("T")


class Finishes(Protocol):
    """What knows when all workers have the result of a collective; see ``GenerationCommunicator``."""

    def finish(self, lane: str, call: Callable[[], T]) -> T: ...


class Committed(Algorithm):
    """An algorithm whose rounds are over for all workers or for none, and which raises in ``finish`` only."""

    def __init__(self, inner: Algorithm, lane: str, group: Finishes) -> None:
        self._inner, self._lane, self._group = inner, lane, group
        self.slots, self.results, self.overlaps = inner.slots, inner.results, inner.overlaps
        self._error: Exception | None = None

    @property
    def idle(self) -> frozenset[int]:
        return self._inner.idle

    @idle.setter
    def idle(self, buckets: frozenset[int]) -> None:
        self._inner.idle = buckets

    def claim(self) -> None:
        self._try(self._inner.claim)

    def ready(self, bucket: int) -> None:
        self._try(lambda: self._inner.ready(bucket))

    def begin(self, ticket: Ticket) -> None:
        self._try(lambda: self._inner.begin(ticket))

    def progress(self) -> None:
        self._try(self._inner.progress)

    def finish(self) -> list[int]:
        return self._group.finish(self._lane, self._finish)

    def end_round(self) -> bool:
        return self._inner.end_round()

    def owed(self) -> list[torch.Tensor] | None:
        return self._inner.owed()

    def owe(self, values: Sequence[torch.Tensor], rounds: int) -> None:
        self._inner.owe(values, rounds)

    def close(self) -> None:
        with contextlib.suppress(JobError, OSError):
            self._inner.close()

    def _finish(self) -> list[int]:
        if self._error is not None:
            raise self._error
        return self._inner.finish()

    def _try(self, call: Callable[[], None]) -> None:
        """Workers may notice a loss at different places before ``finish``."""
        if self._error is not None:
            return
        try:
            call()
        except DeadlineExceeded:
            raise
        except (JobError, OSError) as error:
            self._error = error
