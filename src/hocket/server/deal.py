"""A worker's end of a shared queue: it takes one batch after the other, as it gets ready."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from hocket.server.client import Client
from hocket.server.terms import Kind


class Deal:
    """Of one loader; all workers have theirs in the same order.

    Args:
        client: To the servers.
    """

    def __init__(self, client: Client) -> None:
        self._client = client
        self.number, client.queues = client.queues, client.queues + 1
        self._finished: list[int] = []
        self._end: int | None = None
        self._last: tuple[int, int | None] = 0, None
        self._kept: int | None = None  # taken already

    def take(self, epoch: int, total: int | None) -> int | None:
        """The next batch of an epoch for this worker, or None when there is none to be had now.

        Args:
            epoch: Of the loader.
            total: How many batches it has, if that is known.
        """
        self._last = epoch, total
        found: int | str | None = self._kept
        self._kept = None
        if found is None:
            found = self._ask(epoch, total, wait=False)
        return found if isinstance(found, int) else None

    def wait(self) -> bool:
        """Whether there is one after all; blocks while others hold batches that may come back, and nobody waits for it.

        Whoever calls it has done all that it took.
        """
        turn = self._client.turn.epoch
        self._client.tell(Kind.LEAVE, {"epoch": turn, "tables": self._client.paced})
        found = self._ask(*self._last, wait=True)
        if not isinstance(found, int):
            return False
        self._kept = found
        self._client.tell(Kind.ENTER, {"epoch": turn, "tables": self._client.paced})
        return True

    def finish(self, numbers: Sequence[int]) -> None:
        """Batches are done; told with the next question."""
        self._finished += numbers

    def end(self, total: int) -> None:
        """There are only so many batches; told with the next question."""
        self._end = total

    def give_back(self, numbers: Sequence[int]) -> None:
        """Batches that this worker took and will not use are for others."""
        head = {"queue": self.number, "numbers": list(numbers), "done": self._finished}
        self._finished = []
        self._client.first.request(Kind.BACK, head)

    def state(self) -> dict[str, Any]:
        """Which batches are not done, for a checkpoint."""
        state: dict[str, Any] = self._client.first.request(Kind.QUEUE, {"queue": self.number})[0]["state"]
        return state

    def restore(self, state: dict[str, Any]) -> None:
        """Go on from there; one worker does so, before any takes a batch."""
        self._client.first.request(Kind.RESTORE, {"queue": self.number, "state": state})

    def _ask(self, epoch: int, total: int | None, *, wait: bool) -> int | str:
        head = {
            "queue": self.number,
            "epoch": epoch,
            "total": total,
            "done": self._finished,
            "end": self._end,
            "wait": wait,
        }
        self._finished, self._end = [], None
        found: int | str = self._client.first.request(Kind.NEXT, head)[0]["batch"]
        return found
