"""What a newcomer must know of a pass that goes on, to take batches from the queue that all share."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from hocket.job.counts import Tally
from hocket.job.loader.dealt_batches import DealtBatches
from hocket.job.loader.passes import Pass


class NewcomerPlace:
    """What one loader can tell newcomers.

    Args:
        dealt: How the loader's batches are dealt, if they are.
        trains: Whether the loader is for training; None if each loop says so.
        now: The pass that goes on, if one does.
        tally: How far this worker is.

    Attributes:
        is_fixed: Whether this worker trains on data that no other one could have in its place.
    """

    def __init__(
        self, dealt: DealtBatches | None, trains: bool | None, now: Callable[[], Pass | None], tally: Tally
    ) -> None:
        self._dealt, self._now, self._tally = dealt, now, tally
        self.is_fixed = (dealt is None or dealt.queue is None) and trains is not False

    @property
    def can_give(self) -> bool:
        """Whether a newcomer can take part now: in a pass in which this worker has trained, so that it is no glance."""
        now = self._now()
        return now is not None and bool(now.batches) and self._tally.progress() > now.passes

    @property
    def queue(self) -> tuple[int, int] | None:
        """The number and the epoch of the queue of the pass that goes on, if one does."""
        now, number = self._now(), None if self._dealt is None else self._dealt.queue
        return None if now is None or number is None else (number, now.plan.epoch)

    def of(self, state: dict[str, Any]) -> dict[str, Any]:
        """The state of the loader, for a newcomer: it takes from the queue what there is then."""
        now = self._now()
        if now is None or self._dealt is None:
            return state
        return {**state, "rest": [list(span) for span in now.plan.rest.spans], "dealt": self._dealt.place()}

    def go_on(self, state: dict[str, Any]) -> bool:
        """Take batches of the pass that goes on, if ``state`` is that of a newcomer; whether it is."""
        if self._dealt is None or "dealt" not in state:
            return False
        self._dealt.go_on(state["dealt"])
        return True
