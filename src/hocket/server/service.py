"""What one server does for the workers: its tables, and on server 0 the roster, the meetings and the shared queues."""

from __future__ import annotations

import threading
import time
from collections import Counter
from collections.abc import Callable

from hocket.errors import MismatchError
from hocket.events import Served
from hocket.server.batches import Batches
from hocket.server.dense import DenseShard
from hocket.server.desk import Desk
from hocket.server.meetings import Meetings
from hocket.server.roster import Roster
from hocket.server.rows import RowShard
from hocket.server.table import Table
from hocket.server.terms import Definition
from hocket.server.waiting import Condition
from hocket.transport.area import Area


class Service:
    """One server.

    Args:
        number: Of this server.
        servers: How many there are; ``workers`` likewise.
        timeout: Seconds that a worker may wait for others.
        host: Where this is, for the record.
        total: Adds up a number over all servers, for a table and an update; see ``Table``.
        make_condition: Of the locks here; a simulation has its own. ``clock`` likewise.
    """

    def __init__(
        self,
        number: int,
        servers: int,
        workers: int,
        timeout: float,
        host: str = "",
        total: Callable[[int, int, float], float] = lambda _, __, value: value,
        make_condition: Callable[[], Condition] = threading.Condition,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.number, self.servers, self.workers, self.host = number, servers, workers, host
        self.tables: dict[int, Table] = {}
        self.refused: Counter[str] = Counter()
        self.received = self.sent = 0
        self.total = total
        self.say: Callable[[str], None] = lambda _: None
        self._timeout, self._make_condition, self._clock = timeout, make_condition, clock
        self._desks: dict[tuple[int, int], Desk] = {}
        self._lock = threading.Lock()
        self._began = clock()
        self._lost: dict[int, str] = {}
        self.roster = Roster(make_condition(), servers, timeout)
        self.meetings = Meetings(make_condition(), workers, timeout, clock)
        self.norms = Meetings(make_condition(), servers, timeout, clock)
        self._queues: dict[int, Batches] = {}
        self._areas: dict[int, Area] = {}

    def define(self, rank: int, definition: Definition, area: Area | None) -> None:
        """A worker describes a table, the same as the others do, and takes its place at it."""
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

    def queue(self, number: int) -> Batches:
        """The shared queue of a loader."""
        with self._lock:
            if number not in self._queues:
                self._queues[number] = Batches(self._make_condition(), self._timeout, self._clock)
            return self._queues[number]

    def share(self, number: int, nbytes: int) -> Area:
        """Memory that all workers of this host have in common: the first who asks has it made.

        Args:
            number: Of the area, the same for all workers.
            nbytes: How large it is to be, likewise.
        """
        with self._lock:
            if number not in self._areas:
                self._areas[number] = Area.create(nbytes, "parameters")
            area = self._areas[number]
            if area.nbytes != Area.size(nbytes):
                raise MismatchError(
                    f"{nbytes:,} bytes of shared memory, and another worker has asked for {area.nbytes:,}: build the "
                    "same model on every rank"
                )
            return area

    def close(self) -> None:
        """Give up what would outlive this server in a process that goes on."""
        for area in self._areas.values():
            area.close_descriptor()

    def add(self, number: int, table: int, update: int, value: float) -> float:
        """On server 0: the sum of what all servers tell for an update of a table; blocks until all have.

        Args:
            number: Of the server that tells.
            table: For which it does.
            update: Likewise.
            value: Its part.
        """
        given = value.hex().encode()
        found = self.norms.gather(number, (table << 48) + update, f"table {table}", given, lambda *_: None)
        return sum(float.fromhex(part.decode()) for part in found.values())

    def lose(self, rank: int, why: str) -> None:
        """A worker has died (or, if ``why`` is empty, has ended): nobody waits for it, and its batches are dealt again.

        Args:
            rank: Of the worker.
            why: For the others to read.
        """
        if rank in self._lost:
            return
        self._lost[rank] = why
        rounds = [table.version for table in self.tables.values() if table.terms.staleness == 0]
        for table in list(self.tables.values()):
            table.lose(rank)
        self.meetings.lose(rank)
        dealt = sum(len(queue.lose(rank)) for queue in list(self._queues.values()))
        if why and self.number == 0:
            batches = f"; {dealt} of its batches {'is' if dealt == 1 else 'are'} dealt to others" if dealt else ""
            ends = f"; round {max(rounds) + 1} ends without it" if rounds else ""
            self.say(f"hocket: rank {rank} {why}{ends}{batches}")

    @property
    def live(self) -> list[int]:
        """The workers that have neither died nor ended."""
        return [rank for rank in range(self.workers) if rank not in self._lost]

    def welcome(self, rank: int) -> None:
        """A worker that was taken for dead is there after all."""
        self._lost.pop(rank, None)

    def refuse(self, why: str) -> None:
        """Count a connection or message that was refused, by a reason in a few words that are always the same."""
        with self._lock:
            self.refused[why] += 1

    def report(self) -> Served:
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
        return Served(
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
        return Table(
            shard,
            self._make_condition(),
            self._timeout,
            self._clock,
            lambda update, value: self.total(definition.number, update, value),
        )
