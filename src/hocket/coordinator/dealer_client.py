"""A worker's end of the dealer: it takes one batch after the other, as it gets ready, or several at a time."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from hocket.coordinator.coordinator_client import Coordinator
from hocket.coordinator.coordinator_service import Ask

_LEASE = 0.03  # seconds that the batches of one lease are to take
_MOST = 256


class Deal:
    """The batches of one loader; all workers make their deals in the same order.

    Args:
        coordinator: The connection to the coordinator, which deals out the batches.

    Attributes:
        leases: Whether several batches are taken at once, if they are short. The queue hears with the next question
            which of them are done.
        in_step: Whether all workers take equally many batches, each its own, as long as no worker is lost.
        mean: Batches that a worker has had on the average in the pass that is over; None before its end.
        on_fatal: Called with the numbers of batches on which two workers have died in a row; to raise an error.
        before_state: Called before the queue is asked for its state; may tell which batches are done.
    """

    def __init__(self, coordinator: Coordinator) -> None:
        self._coordinator, self._clock = coordinator, coordinator.clock
        self.number = len(coordinator.deals)
        coordinator.deals.append(self)
        self.leases = self.in_step = False
        self.on_fatal: Callable[[list[int]], None] = lambda _: None
        self.before_state: Callable[[], None] = lambda: None
        self._finished: list[int] = []
        self._refused: list[int] = []
        self._end: int | None = None
        self._last: tuple[int, int | None] = 0, None
        self._taken: list[int] = []  # batches at hand, of the epoch that was asked for last
        self._paces: dict[int, tuple[int, float]] = {}  # the pace of each batch, as known when it was dealt
        self.mean: float | None = None
        self._asked, self._got = 0.0, 0  # when batches were last asked for, and how many came
        self._overdue = 0.0  # when the batches of the lease should be done

    def take(self, epoch: int, total: int | None) -> int | None:
        """The next batch of an epoch for this worker, or None when there is none to be had now.

        Args:
            epoch: The number of the loader's pass.
            total: How many batches the epoch has, if that is known.
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
        """Whether there is a batch after all; blocks while others hold batches that may come back.

        A worker calls this when it has done all batches that it took.
        """
        found, _ = self._ask(*self._last, wait=True)
        self._taken = [found] if isinstance(found, int) else []
        return bool(self._taken)

    def pace(self, number: int) -> tuple[int, float] | None:
        """Batches of this worker so far, and the average over all workers; None where that is not counted."""
        return self._paces.pop(number, None)

    @property
    def epoch(self) -> int:
        """The epoch that this worker has asked for last."""
        return self._last[0]

    def refuse(self, numbers: Sequence[int]) -> None:
        """Tell, with the next question, that batches do not count: they came too late to the servers."""
        self._refused += numbers

    def finish(self, numbers: Sequence[int]) -> None:
        """Tell, with the next question, that batches are done."""
        self._finished += numbers

    def end(self, total: int) -> None:
        """Tell the coordinator, with the next question, that the epoch has only ``total`` batches."""
        self._end = total

    def give_back(self, numbers: Sequence[int], *, leaves: bool = True) -> None:
        """Give batches that this worker took and will not use to others.

        Args:
            numbers: The numbers of these batches; batches dealt to this worker in advance go back with them.
            leaves: Whether the loop is over, or was left, so that others get all that would have been this worker's.
        """
        head = {"numbers": [*numbers, *self._taken], "left": self._last[0] if leaves else None, "spare": False}
        self._taken = []
        self._request(Ask.GIVE_BACK, head)

    def state(self) -> dict[str, Any]:
        """Which batches are not done, for a checkpoint."""
        self.before_state()
        state: dict[str, Any] = self._request(Ask.QUEUE, {})["state"]
        return state

    def restore(self, state: dict[str, Any]) -> None:
        """Go on from what ``state`` gave; one worker does so, before any worker takes a batch."""
        self._request(Ask.RESTORE, {"state": state})

    def _ask(self, epoch: int, total: int | None, *, wait: bool) -> tuple[int | str, list[int]]:
        head = {
            "epoch": epoch,
            "total": total,
            "end": self._end,
            "wait": wait,
            "more": self._wanted() - 1,
            "in_step": self.in_step,
        }
        self._end = None
        answer = self._request(Ask.TAKE, head)
        if fatal := answer["fatal"]:
            self.on_fatal(fatal)
        more: list[int] = answer.get("more", [])
        if isinstance(answer["batch"], int) and answer["pace"] is not None:
            own, everyone = answer["pace"]
            self._paces[answer["batch"]] = own, everyone
        self.mean = None if answer["total"] is None else answer["total"] / self._coordinator.workers
        self._asked, self._got = self._clock(), 1 + len(more)
        self._overdue = self._asked + 2 * _LEASE
        return answer["batch"], more

    def _spare(self) -> None:
        """Batches take longer than expected: give the rest of the lease to others, if they have none."""
        if self._request(Ask.GIVE_BACK, {"numbers": self._taken, "left": None, "spare": True})["taken"]:
            self._got, self._taken = self._got - len(self._taken), []
        self._overdue = self._clock() + _LEASE

    def _request(self, kind: Ask, head: dict[str, Any]) -> dict[str, Any]:
        """Ask the coordinator, and tell it which batches are done and which were refused."""
        told = {"queue": self.number, "done": self._finished, "refused": self._refused}
        self._finished, self._refused = [], []
        return self._coordinator.link.request(kind, {**told, **head})[0]

    def _wanted(self) -> int:
        """As many batches as take a moment, going by those before them; not many more than last time."""
        if not self.leases or not self._got:
            return 1
        each = (self._clock() - self._asked) / self._got
        return max(1, min(int(_LEASE / max(each, 1e-6)), 2 * self._got, _MOST))
