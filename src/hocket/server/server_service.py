"""What one server does for the workers: it keeps tables of parameters, and knows whose batches are in them."""

from __future__ import annotations

import threading
import time
from collections import Counter
from collections.abc import Callable, Iterable, Sequence

from hocket.errors import MismatchError
from hocket.events import ServerReport
from hocket.server.dense import DenseShard
from hocket.server.desk import Desk
from hocket.server.rows import RowShard
from hocket.server.table import Table
from hocket.server.terms import Definition
from hocket.transport.area import Area
from hocket.transport.waiting import Condition


class AppliedBatches:
    """Which batches a server has: accepted when a push was taken, applied when its gradient is in the parameters.

    A batch whose gradient is left out for a fault is applied, too: nothing is to come of it any more.

    A worker itself tells the dealer that a batch is done, but may die before that.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._epochs: dict[int, int] = {}  # the newest epoch of each queue; older ones are over
        self._accepted: dict[int, set[int]] = {}
        self._applied: dict[int, set[int]] = {}

    def accept(self, batches: Iterable[Sequence[int]]) -> None:
        """A push for these batches was taken."""
        self._note(batches, self._accepted)

    def apply(self, batches: Iterable[Sequence[int]]) -> None:
        """The gradient of these batches is in the parameters."""
        self._note(batches, self._applied)

    def accepted(self, batches: Iterable[Sequence[int]]) -> list[list[int]]:
        """Which of ``batches`` were accepted."""
        return self._pick(batches, self._accepted)

    def applied(self, batches: Iterable[Sequence[int]]) -> list[list[int]]:
        """Which of ``batches`` have their gradients in the parameters."""
        return self._pick(batches, self._applied)

    def _note(self, batches: Iterable[Sequence[int]], kept: dict[int, set[int]]) -> None:
        with self._lock:
            for queue, epoch, number in batches:
                if epoch > self._epochs.get(queue, -1):
                    self._epochs[queue], self._accepted[queue], self._applied[queue] = epoch, set(), set()
                if epoch == self._epochs[queue]:
                    kept[queue].add(number)

    def _pick(self, batches: Iterable[Sequence[int]], kept: dict[int, set[int]]) -> list[list[int]]:
        with self._lock:
            return [
                [queue, epoch, number]
                for queue, epoch, number in batches
                if epoch == self._epochs.get(queue) and number in kept[queue]
            ]


class Service:
    """The work of one server.

    Args:
        number: The number of this server.
        workers: How many workers the job has.
        timeout: Seconds that a worker may wait for others.
        host: The name of the server's host, for the record.
        total: Adds up a number over all servers, for a table and an update; see ``Table``.
        make_condition: Makes the locks; a simulation has its own.
        clock: Tells the time.
    """

    def __init__(
        self,
        number: int,
        workers: int,
        timeout: float,
        host: str = "",
        total: Callable[[int, int, float], float] = lambda _, __, value: value,
        make_condition: Callable[[], Condition] = threading.Condition,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.number, self.workers, self.host = number, workers, host
        self.tables: dict[int, Table] = {}
        self.refused: Counter[str] = Counter()
        self.received = self.sent = 0
        self.total = total
        self._timeout, self._make_condition, self._clock = timeout, make_condition, clock
        self._desks: dict[tuple[int, int], Desk] = {}
        self._lock = threading.Lock()
        self._began = clock()
        self._lost: dict[int, str] = {}
        self.batches = AppliedBatches()

    def define(self, rank: int, definition: Definition, area: Area | None) -> None:
        """A worker describes a table, in the same way as all others, and takes its place at it."""
        if definition.workers != self.workers:
            raise ValueError(f"a table for {definition.workers} workers, and there are {self.workers}")
        with self._lock:
            table = self.tables.get(definition.number)
            if table is None:
                table = self._make(definition)
                self.tables[definition.number] = table
            elif table.shard.definition != definition:
                raise MismatchError(
                    f"rank {rank} describes other parameters, another optimizer or another strategy than the workers "
                    "before it: build the same model and optimizer on every rank"
                )
            if definition.rows is None:
                self._desks[definition.number, rank] = Desk(definition, area)

    def desk(self, table: int, rank: int) -> Desk:
        """A worker's place at a table."""
        return self._desks[table, rank]

    def lose(self, rank: int, why: str) -> int | None:
        """A worker is lost, or has finished if ``why`` is empty, as the coordinator says: nobody waits for it here.

        Returns:
            The round that ends without the worker, where workers go in rounds.
        """
        self._lost[rank] = why
        rounds = [table.version for table in self.tables.values() if table.terms.staleness == 0]
        for table in list(self.tables.values()):
            table.lose(rank)
        return max(rounds) + 1 if rounds else None

    def welcome(self, rank: int) -> None:
        """A worker that was taken for dead is there after all."""
        self._lost.pop(rank, None)
        for table in list(self.tables.values()):
            table.welcome(rank)

    def admit(self, rank: int) -> None:
        """A new worker takes part; one with its number may have been lost."""
        self._lost.pop(rank, None)
        for table in list(self.tables.values()):
            table.admit(rank)

    def refuse(self, why: str) -> None:
        """Count a connection or message that was refused, by a reason in a few words that are always the same."""
        with self._lock:
            self.refused[why] += 1

    def report(self) -> ServerReport:
        """What this server has done so far."""
        tables = [table for _, table in sorted(self.tables.items())]
        workers = {}
        if tables:
            for rank, tally in tables[0].tallies.items():
                workers[str(rank)] = {
                    "pushes": tally.pushes,
                    "staleness": {str(age): count for age, count in sorted(dict(tally.staleness).items())},
                    "seconds": tally.last - tally.first,
                    "waited": tally.waited,
                    "late": tally.late,
                    "lost": bool(self._lost.get(rank)),
                }
        return ServerReport(
            server=self.number,
            host=self.host,
            seconds=self._clock() - self._began,
            busy=sum(table.busy for table in tables),
            updates=sum(table.version for table in tables),
            received=self.received,
            sent=self.sent,
            refused=dict(self.refused),
            workers=workers,
        )

    def _make(self, definition: Definition) -> Table:
        shard = DenseShard(definition) if definition.rows is None else RowShard(definition)
        table = Table(
            shard,
            self._make_condition(),
            self._timeout,
            self._clock,
            lambda update, value: self.total(definition.number, update, value),
        )
        for rank in self._lost:
            table.lose(rank)
        return table
