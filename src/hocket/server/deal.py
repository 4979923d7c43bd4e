"""A worker's end of a shared queue: it takes one batch after the other, as it gets ready."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from hocket.server.client import Client
from hocket.server.terms import Kind


class Deal:
    """Of one loader; all workers have theirs in the same order.

    Attributes:
        before_wait: Called before this worker waits for batches that others hold: it must not keep them waiting.

    Args:
        client: To the servers.
    """

    def __init__(self, client: Client) -> None:
        self._client = client
        self.before_wait: Callable[[], None] = lambda: None
        self.number, client.queues = client.queues, client.queues + 1
        self._finished: list[int] = []
        self._end: int | None = None

    def take(self, epoch: int, total: int | None, *, wait: bool = True) -> int | None:
        """The next batch of an epoch for this worker, or None when all are done.

        While others hold batches that may come back it waits, and nobody waits for it.

        Args:
            epoch: Of the loader.
            total: How many batches it has, if that is known.
            wait: False if this worker has batches itself that it has not begun: others may wait for those. It then
                gets None, and has to ask again when they are done.
        """
        found = self._ask(epoch, total, wait=False)
        if found == "held" and wait:
            self.before_wait()
            turn = self._client.turn.epoch
            self._client.tell(Kind.LEAVE, {"epoch": turn})
            found = self._ask(epoch, total, wait=True)
            if isinstance(found, int):
                self._client.tell(Kind.ENTER, {"epoch": turn})
        return found if isinstance(found, int) else None

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
