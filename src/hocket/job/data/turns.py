"""A loader's part in a job with servers: which batch the next push is for, and when nobody is to wait for one."""

from __future__ import annotations

from collections.abc import Iterable

from hocket.job.data.sharding import Counts
from hocket.job.runtime import Runtime
from hocket.server.client import Client
from hocket.server.deal import Deal
from hocket.server.terms import Kind

_LOADERS = 1 << 10  # more than a script has


class Turns:
    """Of one loader.

    Attributes:
        deal: Its end of the queue that all workers share; None if each has data of its own.
    """

    def __init__(self, runtime: Runtime, client: Client, *, queued: bool) -> None:
        self._runtime, self._client = runtime, client
        self._loader = runtime.loaders
        self.deal = Deal(client) if queued else None
        if self.deal is not None:
            self.deal.before_wait = self._settle
        self._given: list[int] = []  # batches that the loop has had, and that the queue knows as held

    def begin_pass(self, epoch: int) -> None:
        """A training loop begins; bounds on staleness hold within it."""
        self._client.turn.epoch = epoch * _LOADERS + self._loader

    def begin_step(self, counts: Counts) -> None:
        """What is pushed next is for this batch."""
        turn = self._client.turn
        turn.weight = float(counts.here)
        if self.deal is not None:
            turn.batches.append((self.deal.number, counts.taken - 1))
            self._given.append(counts.taken - 1)

    def end_step(self) -> None:
        """The batches so far are done, whether something was pushed for them or not, unless gradients are kept."""
        if any(strategy.holds for strategy in self._runtime.strategies):
            return
        if self.deal is not None:
            self.deal.finish(self._given)
            self._given = []
        self._client.turn.batches = []

    def leave(self, unused: Iterable[Counts], *, was_left: bool) -> None:
        """A training loop is over, or was left: nobody is to wait for its next push.

        Args:
            unused: Batches that were taken and never given out.
            was_left: Whether its last batch may still be at work.
        """
        if not was_left:
            self._settle()
        if self.deal is not None:
            self.deal.give_back([counts.taken - 1 for counts in unused])
        self._client.tell(Kind.LEAVE, {"epoch": self._client.turn.epoch})
        if not was_left:
            for strategy in self._runtime.strategies:
                strategy.refresh()  # the last updates may have been those of others

    def _settle(self) -> None:
        """All batches that the loop has had are done: push what is still to be pushed for them."""
        for strategy in self._runtime.strategies:
            strategy.flush()
        self.end_step()
