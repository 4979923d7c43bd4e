"""A worker's end of a shared queue: it takes one batch after the other, as it gets ready, or several at a time."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import Any

from hocket.server.client import Client
from hocket.server.terms import Kind

_LEASE = 0.03  # seconds that the batches of one lease are to take
_MOST = 256


class Deal:
    """Of one loader; all workers have theirs in the same order.

    Args:
        client: To the servers.
        clock: Tells the time.

    Attributes:
        leases: Whether several batches are taken at once, if they are done in a moment. What a worker has done of
            them, the queue hears with the next question.
        in_step: Whether all workers take as many batches, each its own, as long as none is lost.
        before_state: Called before the queue is asked for its state: may say what is done.
    """

    def __init__(self, client: Client, clock: Callable[[], float] = time.monotonic) -> None:
        self._client, self._clock = client, clock
        self.number, client.queues = client.queues, client.queues + 1
        self.leases = self.in_step = False
        self.before_state: Callable[[], None] = lambda: None
        self._finished: list[int] = []
        self._end: int | None = None
        self._last: tuple[int, int | None] = 0, None
        self._taken: list[int] = []  # already, of the epoch that was asked for last
        self._paces: dict[int, tuple[int, float]] = {}  # for each number, what was known when it was dealt
        self._asked, self._got = 0.0, 0  # when, and how many it were
        self._overdue = 0.0  # when those are to be done

    def take(self, epoch: int, total: int | None) -> int | None:
        """The next batch of an epoch for this worker, or None when there is none to be had now.

        Args:
            epoch: Of the loader.
            total: How many batches it has, if that is known.
        """
        if epoch != self._last[0]:
            self._taken, self._got, self._paces = [], 0, {}
        self._last = epoch, total
        if self._taken and self._clock() > self._overdue:
            self._spare()
        if not self._taken:
            found, more = self._ask(epoch, total, wait=False)
            if not isinstance(found, int):
                return None
            self._taken = sorted([found, *more])
        return self._taken.pop(0)

    def wait(self) -> bool:
        """Whether there is one after all; blocks while others hold batches that may come back, and nobody waits for it.

        Whoever calls it has done all that it took.
        """
        turn = self._client.turn.epoch
        self._client.tell(Kind.LEAVE, {"epoch": turn, "tables": self._client.paced})
        found, _ = self._ask(*self._last, wait=True)
        if not isinstance(found, int):
            return False
        self._taken = [found]
        self._client.tell(Kind.ENTER, {"epoch": turn, "tables": self._client.paced})
        return True

    def pace(self, number: int) -> tuple[int, float] | None:
        """Batches that this worker has had with this one, and all on the average; None where that is not counted."""
        return self._paces.pop(number, None)

    def finish(self, numbers: Sequence[int]) -> None:
        """Batches are done; told with the next question."""
        self._finished += numbers

    def end(self, total: int) -> None:
        """There are only so many batches; told with the next question."""
        self._end = total

    def give_back(self, numbers: Sequence[int], *, leaves: bool = True) -> None:
        """Batches that this worker took and will not use are for others.

        Args:
            numbers: Of them; those that it has not even asked for come with them.
            leaves: Whether the loop is over, or was left, so that others get all that would have been this worker's.
        """
        head = {
            "queue": self.number,
            "numbers": [*numbers, *self._taken],
            "done": self._finished,
            **({"left": self._last[0]} if leaves else {}),
        }
        self._finished, self._taken = [], []
        self._client.first.request(Kind.BACK, head)

    def state(self) -> dict[str, Any]:
        """Which batches are not done, for a checkpoint."""
        self.before_state()
        head = {"queue": self.number, "done": self._finished}
        self._finished = []
        state: dict[str, Any] = self._client.first.request(Kind.QUEUE, head)[0]["state"]
        return state

    def restore(self, state: dict[str, Any]) -> None:
        """Go on from there; one worker does so, before any takes a batch."""
        self._client.first.request(Kind.RESTORE, {"queue": self.number, "state": state})

    def _ask(self, epoch: int, total: int | None, *, wait: bool) -> tuple[int | str, list[int]]:
        head = {
            "queue": self.number,
            "epoch": epoch,
            "total": total,
            "done": self._finished,
            "end": self._end,
            "wait": wait,
            "more": self._wanted() - 1,
            "in_step": self.in_step,
        }
        self._finished, self._end = [], None
        answer = self._client.first.request(Kind.NEXT, head)[0]
        more: list[int] = answer.get("more", [])
        if isinstance(answer["batch"], int) and answer["pace"] is not None:
            own, everyone = answer["pace"]
            self._paces[answer["batch"]] = own, everyone
        self._asked, self._got = self._clock(), 1 + len(more)
        self._overdue = self._asked + 2 * _LEASE
        return answer["batch"], more

    def _spare(self) -> None:
        """Batches take longer than those before them: what is left of the lease is for others, if they have none."""
        head = {"queue": self.number, "numbers": self._taken, "done": self._finished, "spare": True}
        self._finished = []
        if self._client.first.request(Kind.BACK, head)[0]["taken"]:
            self._got, self._taken = self._got - len(self._taken), []
        self._overdue = self._clock() + _LEASE

    def _wanted(self) -> int:
        """As many batches as take a moment, going by those before them; not many more than last time."""
        if not self.leases or not self._got:
            return 1
        each = (self._clock() - self._asked) / self._got
        return max(1, min(int(_LEASE / max(each, 1e-6)), 2 * self._got, _MOST))
