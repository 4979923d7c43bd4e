"""A table at work: pushes are judged, collected and applied, and their workers are held back as its terms say."""

from __future__ import annotations

import time
import traceback
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from hocket import spans
from hocket.errors import DeadlineExceeded, HocketError, JobError
from hocket.server.pace import Pace
from hocket.server.shard import Contribution, Gradient, Shard
from hocket.server.terms import Push, PushOutcome
from hocket.transport.gate import disagreement
from hocket.transport.waiting import Condition, Note, Wait


@dataclass
class PushTally:
    """What one worker has done at a table."""

    pushes: int = 0
    staleness: Counter[int] = field(default_factory=Counter)
    waited: float = 0.0
    late: int = 0
    first: float = 0.0
    last: float = 0.0


@dataclass
class _Group:
    """Gradients that are collected for one update."""

    contributions: list[Contribution] = field(default_factory=list)
    is_done: bool = False
    faults: dict[int, int] = field(default_factory=dict)  # why they are not applied, by rank
    error: HocketError | None = None  # for all workers of the group


class Table:
    """One server's part of a table.

    Args:
        shard: The parameters of the table on this server, and their optimizer.
        condition: Guards everything here; waiting workers sleep in it.
        timeout: Seconds that a worker may wait for others.
        clock: Tells the time.
        total: Adds up a number over all servers that hold a part of this table, for the update with a given number;
            blocks until all have told theirs.
    """

    def __init__(
        self,
        shard: Shard,
        condition: Condition,
        timeout: float,
        clock: Callable[[], float] = time.monotonic,
        total: Callable[[int, float], float] = lambda _, number: number,
    ) -> None:
        definition = shard.definition
        self.shard, self.terms = shard, definition.terms
        self.pace = Pace(definition.workers, definition.terms)
        self.tallies = {rank: PushTally() for rank in range(definition.workers)}
        self.busy = 0.0
        self._condition, self._timeout, self._clock, self._total = condition, timeout, clock, total
        self._group = _Group()
        self.is_even = True
        self._has_missed = False  # whether a worker was lost, was not waited for, or is new
        """Whether all workers have taken part in every update, so that all are at the same step."""
        self._rounds = self._epoch = 0
        self._groups: dict[int, list[dict[str, Any]] | None] = {}  # the learning rates that each worker told last

    @property
    def version(self) -> int:
        """How many updates there have been."""
        return self.pace.version

    def push(
        self,
        rank: int,
        push: Push,
        gradient: Gradient,
        note: Note,
        pull: Callable[[], None] | None,
        applied: Callable[[], None] = lambda: None,
        accepted: Callable[[], None] = lambda: None,
    ) -> PushOutcome:
        """Take a gradient, wait until the worker may go on, and have it get the parameters.

        Args:
            rank: The rank of the worker.
            push: What the worker says of its gradient.
            gradient: The gradient, which is read until this call returns.
            note: Is told when the wait takes long.
            pull: Copies the parameters, if they are wanted; called while nobody changes them.
            applied: Called when the gradient is in the parameters, or never will be because of a fault; before anybody
                sees the parameters.
            accepted: Called when the push is taken; its gradient will be applied unless there is a fault.

        Returns:
            Whether the push came in time for the bound, and the faults for which its update was left out.

        Raises:
            DeadlineExceeded: another worker is alive but was not here in time.
            JobError: the optimizer failed; the update does not count.
        """
        with self._condition:
            tally, now = self.tallies[rank], self._clock()
            self._groups[rank] = push.groups or self._groups.get(rank)
            staleness = self.pace.arrive(rank, push.epoch)
            faults: dict[int, int] = {}
            tally.first, tally.last = tally.first or now, now
            if staleness is None:
                tally.late += 1
                self._condition.notify_all()
            else:
                accepted()
                tally.pushes += 1
                tally.staleness[staleness] += 1
                given = Contribution(
                    rank, gradient, push.weight, push.present, staleness, push.fault, push.done, applied
                )
                if self.terms.is_collected:
                    faults = self._collect(rank, push, given, note)
                else:
                    try:
                        self._apply([given])
                    finally:
                        self._condition.notify_all()  # another worker may be the slowest now
                    self._wait(rank, lambda: self.pace.missing(rank), note, patience=self.terms.patience)
            if pull is not None:
                self.pace.pull(rank)
                self._work(pull)
        return PushOutcome(staleness is not None, faults)

    def pull(self, rank: int, copy: Callable[[], None]) -> None:
        """Have a worker get the parameters as they are; ``copy`` is called while nobody changes them."""
        with self._condition:
            self.pace.pull(rank)
            self._work(copy)

    def change(self, work: Callable[[], None]) -> None:
        """Call ``work`` while nobody else sees the parameters or their optimizer."""
        with self._condition:
            work()

    def lose(self, rank: int) -> None:
        """A worker has died, or said goodbye."""
        with self._condition:
            self._has_missed = True
            self.pace.lose(rank)
            self._complete()
            self._condition.notify_all()

    def welcome(self, rank: int) -> None:
        """A worker that was taken for dead is there after all."""
        with self._condition:
            self.pace.welcome(rank)

    def admit(self, rank: int) -> None:
        """A new worker takes part, perhaps with the number of one that is lost: others wait for its pushes."""
        with self._condition:
            self.pace.admit(rank)
            self.tallies.setdefault(rank, PushTally())
            self._groups.pop(rank, None)
            self._has_missed = True
            self.is_even = False  # it has not taken part in the updates so far

    def is_lost(self, rank: int) -> bool:
        """Whether nothing more is taken from a worker."""
        with self._condition:
            return rank not in self.pace.live

    def leave(self, rank: int, epoch: int) -> None:
        """A worker has no more batches of an epoch, so that nobody is to wait for it."""
        with self._condition:
            self.pace.leave(rank, epoch)
            self._complete()
            self._condition.notify_all()

    def enter(self, rank: int, epoch: int) -> None:
        """A worker has got a batch of an epoch after all."""
        with self._condition:
            self.pace.enter(rank, epoch)

    def await_version(self, version: int, note: Note) -> None:
        """Wait until ``version`` updates are made, or rank 0, which is to make them, has ended or has no more data."""
        with self._condition:
            self._wait(None, lambda: self.pace.at_work(0) if self.version < version else [], note, patience=None)

    def _collect(self, rank: int, push: Push, given: Contribution, note: Note) -> dict[int, int]:
        """Wait until a gradient is in an update; the faults for which that was left out."""
        self.shard.set_groups(self._groups[rank])
        group = self._group
        group.contributions.append(given)
        self._epoch = push.epoch
        self._complete()
        try:
            self._wait(rank, lambda: [] if group.is_done else self._outstanding(), note, patience=self.terms.patience)
        except DeadlineExceeded:
            group.contributions = [each for each in group.contributions if each is not given]
            raise
        if group.error is not None:
            raise type(group.error)(str(group.error))
        return group.faults

    @property
    def _size(self) -> int:
        """How many gradients make an update, where they are collected."""
        return max(1, max(self.pace.workers, len(self.pace.live)) // max(1, self.terms.groups))

    def _outstanding(self) -> list[int]:
        waiting = {each.rank for each in self._group.contributions}
        return self.pace.outstanding(self._epoch, waiting)

    def _complete(self) -> None:
        """Apply the collected gradients, if they are enough, or if no more can come before a waiting worker goes on.

        If they cannot be applied, the workers that gave them get the error, and not the caller.
        """
        group = self._group
        if not group.contributions:
            return
        if len(group.contributions) < self._size and self._outstanding():
            return
        self._group = _Group()
        group.is_done = True
        group.faults = {each.rank: each.fault for each in group.contributions if each.fault}
        self.is_even &= len({each.rank for each in group.contributions}) == self.pace.workers
        try:
            self._check_in_step(group.contributions)
            self._apply(sorted(group.contributions, key=lambda each: each.rank))  # so that rounding is always the same
        except HocketError as error:
            group.error = error
        self._condition.notify_all()

    def _check_in_step(self, contributions: Sequence[Contribution]) -> None:
        """Raise if a worker has left out a step or a batch of others, so that their gradients do not belong together.

        Once a worker was lost, or not waited for, the others may take uneven numbers of batches.
        """
        if self._has_missed or any(each.done is None for each in contributions):
            return
        said: dict[str, list[int]] = {}
        for each in contributions:
            passes, batches = each.done or (0, 0)
            since = f"{passes} backward pass{'es' if passes != 1 else ''} since the last step"
            on = f", on {batches} batch{'es' if batches != 1 else ''}"
            said.setdefault(f"optimizer.step() after {since}{on}", []).append(each.rank)
        if len(said) > 1:
            raise disagreement(said)

    def _apply(self, contributions: Sequence[Contribution]) -> None:
        self._rounds += 1
        begin, began = self._clock(), time.perf_counter()
        try:
            self.shard.set_groups(self._groups[contributions[-1].rank])
            has_fault = any(each.fault for each in contributions)
            self._update([each for each in contributions if each.weight > 0 and not has_fault])
            for each in contributions:
                each.applied()
        except HocketError:
            raise
        except Exception as error:
            traceback.print_exc()
            name = type(self.shard.optimizer).__name__
            raise JobError(f"{name} failed on a server, see its output: {type(error).__name__}: {error}") from error
        finally:
            self.busy += self._clock() - begin
            whose = "several ranks" if len(contributions) > 1 else f"rank {contributions[0].rank}"
            spans.add(spans.SERVE, f"update for {whose}", began, time.perf_counter(), track="updates")

    def _update(self, counted: Sequence[Contribution]) -> None:
        clip = self.terms.clip if self.terms.is_collected else None
        if not counted:
            if clip is not None:
                self._total(self._rounds, 0.0)  # the other servers ask for this server's part
            return
        gradient, present = self.shard.combine(counted)
        if clip is not None:
            norm = self._total(self._rounds, self.shard.square(gradient)) ** 0.5
            if norm + 1e-6 > clip:
                gradient = self.shard.scale(gradient, clip / (norm + 1e-6))
        mean = sum(each.staleness for each in counted) / len(counted)
        with self.shard.rate_divided(max(1.0, mean) if self.terms.aware else 1.0):
            self.shard.apply(gradient, present)
        self.pace.version += 1

    def _wait(self, rank: int | None, missing: Callable[[], list[int]], note: Note, *, patience: float | None) -> None:
        """Sleep while a worker is missing; one that is still missing after ``patience`` is excused."""
        wait = Wait(self._condition, self._timeout, self._clock, note, "push a gradient")
        began, late = time.perf_counter(), list[int]()
        while ranks := missing():
            late = ranks
            if patience is not None and wait.seconds >= patience:
                self._has_missed = True
                for each in ranks:
                    self.pace.excuse(each)
                self._complete()
                self._condition.notify_all()
            else:
                wait.sleep(ranks, patience)
        if rank is not None:
            self.tallies[rank].waited += wait.seconds
            if late:
                name = f"rank {rank} waits for rank {late[0]}" + (" and others" if len(late) > 1 else "")
                spans.add(spans.WAIT, name, began, time.perf_counter(), track=f"for rank {rank}")

    def _work(self, copy: Callable[[], None]) -> None:
        begin = self._clock()
        copy()
        self.busy += self._clock() - begin
