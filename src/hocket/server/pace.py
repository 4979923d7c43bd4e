"""Who may go on and who is late: the bounded staleness of Ho et al. 2013, from bulk-synchronous to unbounded.

No time, no locks and no tensors are here: a table asks, and waits accordingly.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from hocket.server.terms import Terms


@dataclass
class _Worker:
    epoch: int = 0  # the epoch that the worker is in
    clock: int = 0  # pushes in this epoch
    left: int = -1  # the last epoch of which the worker has no more batches
    is_live: bool = True
    was_lost: bool = False  # lost, and its batch dealt again: its next push is refused
    is_excused: bool = False  # waited for in vain: nobody waits for it until it comes back
    pulled: int = 0  # version of the parameters that the worker has


@dataclass
class Pace:
    """The clocks of all workers of a table."""

    workers: int
    terms: Terms
    version: int = 0
    _all: dict[int, _Worker] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self._all = {rank: _Worker() for rank in range(self.workers)}

    def arrive(self, rank: int, epoch: int) -> int | None:
        """A push has come; returns its staleness in versions, or None if the push is refused.

        A push is refused if others have gone on beyond the bound, or if its worker was taken for dead, and its batch
        dealt again.
        """
        worker = self._all[rank]
        if epoch > worker.epoch:
            worker.epoch, worker.clock = epoch, 0
        staleness = self.version - worker.pulled
        was_lost, was_excused = worker.was_lost, worker.is_excused
        worker.was_lost, worker.is_excused = False, False
        if not worker.is_live:
            return None  # nothing counts before the worker is welcome again
        worker.left = min(worker.left, epoch - 1)
        if was_lost or (was_excused and self._is_beyond(rank, staleness)):
            self._catch_up(rank, epoch)
            return None
        worker.clock += 1
        return staleness

    def _is_beyond(self, rank: int, staleness: int) -> bool:
        bound = self.terms.staleness
        if bound is None:
            return False
        if self.terms.groups == 1:
            return staleness > bound
        worker = self._all[rank]
        fastest = max(self._clock(each, worker.epoch) for each in self._all)  # may have left the epoch since
        return fastest - worker.clock > bound + 1  # one more is pushed before its worker waits

    def pull(self, rank: int) -> None:
        """A worker has got the parameters as they are, perhaps a new one that takes no part yet."""
        if rank in self._all:
            self._all[rank].pulled = self.version

    def missing(self, rank: int) -> list[int]:
        """The ranks that worker ``rank`` has to wait for; none if it may go on."""
        worker, bound = self._all[rank], self.terms.staleness
        if bound is None:
            return []
        active = self._active(worker.epoch)
        return [each for each in active if worker.clock - self._clock(each, worker.epoch) > bound and each != rank]

    def outstanding(self, epoch: int, waiting: set[int]) -> list[int]:
        """The ranks from which a gradient can still come before any of ``waiting`` goes on."""
        return [rank for rank in self._active(epoch) if rank not in waiting]

    def lose(self, rank: int) -> None:
        """A worker has died or left the job: nobody waits for it, and what still comes from it is refused."""
        self._all[rank].is_live, self._all[rank].was_lost = False, True

    def welcome(self, rank: int) -> None:
        """A worker that was taken for dead is there after all, and starts where the slowest is."""
        self._all[rank].is_live = True
        self._catch_up(rank, self._all[rank].epoch)

    def admit(self, rank: int) -> None:
        """A new worker takes part, where the slowest is; what the one before it with its number did is forgotten."""
        epoch = max((worker.epoch for worker in self._all.values() if worker.is_live), default=0)
        self._all[rank] = _Worker(epoch, pulled=self.version)
        self._catch_up(rank, epoch)

    def excuse(self, rank: int) -> None:
        """A worker was waited for long enough."""
        self._all[rank].is_excused = True

    def leave(self, rank: int, epoch: int) -> None:
        """A worker has no more batches of an epoch."""
        self._all[rank].left = max(self._all[rank].left, epoch)

    def enter(self, rank: int, epoch: int) -> None:
        """A worker has batches of an epoch after all, and starts where the slowest is."""
        worker = self._all[rank]
        worker.left = min(worker.left, epoch - 1)
        if worker.epoch == epoch:
            self._catch_up(rank, epoch)

    def at_work(self, rank: int) -> list[int]:
        """The worker ``rank``, if it may still push in the epoch that it is in."""
        return [rank] if rank in self._active(self._all[rank].epoch) else []

    @property
    def live(self) -> list[int]:
        return [rank for rank, worker in self._all.items() if worker.is_live]

    def _catch_up(self, rank: int, epoch: int) -> None:
        """Set a worker's clock to the slowest of the others, so that nobody waits for what the worker has missed."""
        worker = self._all[rank]
        others = [self._clock(each, epoch) for each in self._active(epoch) if each != rank]
        worker.clock = max(worker.clock, min(others, default=worker.clock))

    def _active(self, epoch: int) -> list[int]:
        """The workers that may still push in ``epoch``, as far as is known."""
        return [
            rank
            for rank, worker in self._all.items()
            if worker.is_live and not worker.is_excused and worker.left < epoch
        ]

    def _clock(self, rank: int, epoch: int) -> int:
        """How far a worker is in ``epoch``; one that is still in an earlier one has not begun."""
        worker = self._all[rank]
        return worker.clock if worker.epoch == epoch else 0 if worker.epoch < epoch else 1 << 60
