"""What the coordinator does for workers and servers: it knows who is there, holds meetings and deals out batches."""

from __future__ import annotations

import struct
import threading
import time
from collections import Counter
from collections.abc import Callable, Sequence
from enum import IntEnum
from typing import Any, Protocol

from hocket.coordinator.board import Board
from hocket.coordinator.changes import Changes
from hocket.coordinator.dealer import Dealer
from hocket.coordinator.ledger import Ledger
from hocket.coordinator.liveness import Liveness
from hocket.coordinator.meetings import Meetings
from hocket.coordinator.shared_areas import SharedAreas
from hocket.errors import HocketError
from hocket.transport.replies import Answer, Body
from hocket.transport.requests import BOARD, SERVER, WATCH
from hocket.transport.waiting import Condition, Note, Wait

Batch = Sequence[int]
"""Queue, epoch and number of a batch."""

KEEPER = 0  # the server that is told with each push for which batches the push is

_PART = struct.Struct("!IQ")  # rank and number of bytes of each part of a meeting's result


class Ask(IntEnum):
    """What workers and servers ask the coordinator for."""

    GATHER = 64
    SETTLE = 65
    TAKE = 66
    GIVE_BACK = 67
    QUEUE = 68
    RESTORE = 69
    MEMBERSHIP = 70
    SHARE = 71
    SUM = 72
    BOARD = 73
    WATCH = 74
    KEEP = 75
    KEPT = 76
    JOIN = 77
    ADMIT = 78
    LEAVE = 79
    HISTORY = 80


class Tell(IntEnum):
    """What the coordinator tells servers, and asks them."""

    LOSE = 96
    WELCOME = 97
    APPLIED = 98
    ADMIT = 99


class ServerTold(Protocol):
    """A parameter server, as the coordinator sees it.

    A server may answer only when another server has been told, so each method returns at once, and what it returns
    is called to get the answer.
    """

    def lose(self, rank: int, why: str, held: Sequence[Batch]) -> Callable[[], dict[str, Any]]:
        """Tell the server of a loss; the answer has the ``round`` that ends without it, and the ``kept`` batches."""
        ...

    def welcome(self, rank: int) -> Callable[[], Any]:
        """Tell the server that a worker is there after all."""
        ...

    def admit(self, rank: int) -> Callable[[], Any]:
        """Tell the server that a new worker takes part, which may have the number of one that is lost."""
        ...

    def applied(self, held: Sequence[Batch]) -> Sequence[Batch]:
        """Which batches of ``held`` are in the server's parameters."""
        ...


class CoordinatorService:
    """The coordinator of one job.

    Args:
        workers: How many workers the job has.
        servers: How many parameter servers the job has.
        timeout: Seconds that a worker may wait for others.
        reach: Makes the connection to a server from what that server has said of itself.
        make_condition: Makes the locks; a simulation has its own.
        clock: Tells the time.
    """

    who = "the coordinator"

    def __init__(
        self,
        workers: int,
        servers: int,
        timeout: float,
        reach: Callable[[int, dict[str, Any]], ServerTold],
        make_condition: Callable[[], Condition] = threading.Condition,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.ledger = Ledger(workers)
        self.liveness = Liveness(self.ledger, timeout, self._tell_user)
        self.meetings = Meetings(make_condition(), lambda: self.ledger.live, timeout, clock)
        self.sums = Meetings(make_condition(), lambda: range(servers), timeout, clock)
        self.servers: dict[int, ServerTold] = {}
        self.refused: Counter[str] = Counter()
        self.say: Callable[[str], None] = lambda _: None
        self._workers, self._expected, self._timeout, self._reach = workers, servers, timeout, reach
        self._make_condition, self._clock = make_condition, clock
        self._roster: dict[int, dict[str, Any]] = {}  # where each server is reached
        self._coming = make_condition()
        self.board = Board(make_condition(), clock)
        self.changes = Changes(make_condition(), lambda: self.ledger.live, timeout, clock)
        self._lock = threading.Lock()
        self._dealers: dict[int, Dealer] = {}
        self._areas = SharedAreas()
        self._answers: dict[int, Callable[[int, dict[str, Any], Body, Note], Answer]] = {
            Ask.GATHER: self._gather,
            Ask.SETTLE: self._settle,
            Ask.TAKE: self._take,
            Ask.GIVE_BACK: self._give_back,
            Ask.QUEUE: self._queue,
            Ask.RESTORE: self._restore,
            Ask.MEMBERSHIP: lambda *_: Answer({"ranks": self.ledger.live, **self.changes.wanted()}),
            Ask.HISTORY: lambda *_: Answer({"history": self.ledger.history}),
            Ask.KEEP: self._keep,
            Ask.KEPT: lambda rank, head, body, note: _tell(*self.changes.kept(rank, note)),
            Ask.JOIN: lambda rank, head, body, note: _tell(*self.changes.join(rank, note)),
            Ask.ADMIT: self._admit,
            Ask.LEAVE: self._leave,
            Ask.SHARE: self._share,
            Ask.SUM: self._sum,
            Ask.BOARD: self._use_board,
            Ask.WATCH: lambda peer, head, *_: Answer(self.liveness.answer(peer - WATCH, head)),
        }

    def answer(self, peer: int, kind: int, head: dict[str, Any], body: Body, note: Note) -> Answer:
        if (peer >= SERVER) != (kind == Ask.SUM) or (WATCH <= peer < BOARD) != (kind == Ask.WATCH):
            raise ValueError(f"kind {kind} from {'a server' if peer >= SERVER else f'rank {peer}'}")
        return self._answers[kind](peer, head, body, note)

    def welcome(self, peer: int, said: dict[str, Any]) -> dict[str, Any]:
        """A server or a worker has come; a worker is told where all servers are, and waits until they are there."""
        if peer >= SERVER:
            self._welcome_server(peer - SERVER, said)
            return {}
        rank, is_watched = peer % WATCH, WATCH <= peer < BOARD
        if is_watched and (self.ledger.knows(rank) or said.get("newcomer")):
            self.liveness.welcome(rank, str(said["host"]), goes_on=bool(said["goes_on"]))
            return {}
        if said.get("newcomer"):
            return {"servers": self._await_servers()}  # no member yet
        if not self.ledger.knows(rank):
            raise ValueError(f"rank {rank} in a job of {self._workers} workers")
        if peer >= BOARD:
            return {}
        roster = self._await_servers()
        if self.ledger.welcome(peer, said):
            self._tell_servers(lambda server: server.welcome(peer))
        return {"servers": roster}

    def lose(self, peer: int, why: str) -> None:
        """A worker has died or, if ``why`` is empty, finished: nobody waits for it, and its batches are dealt again."""
        if peer >= SERVER:
            self.sums.fail(f"server {peer - SERVER} has ended: see its output")
            return
        if WATCH <= peer < BOARD:
            self.liveness.lose(peer - WATCH)
        self.changes.lose(peer)
        if peer >= WATCH or not self.ledger.lose(peer, why):
            return
        dealers = dict(self._dealers)
        held = [batch for queue, dealer in dealers.items() for batch in _name(queue, dealer, peer)]
        told = self._tell_servers(lambda server: server.lose(peer, why, held), matters=bool(why))
        kept = told[KEEPER]["kept"] if KEEPER in told else []
        if self._areas.learned is not None:
            kept = [*kept, *self._areas.learned.among(peer, held)]
        self.meetings.lose(peer)
        dealt = 0
        for queue, dealer in dealers.items():
            dealt += len(dealer.lose(peer, _of(kept, queue, dealer), has_died=bool(why)))
        if why and (dealers or self.servers):
            batches = f"; {dealt} of its batches {'is' if dealt == 1 else 'are'} dealt to others" if dealt else ""
            rounds = [each["round"] for each in told.values() if each["round"] is not None]
            ends = f"; round {max(rounds)} ends without it" if rounds else ""
            self.say(f"hocket: rank {peer} {why}{ends}{batches}")

    def refuse(self, why: str) -> None:
        with self._lock:
            self.refused[why] += 1

    def close(self) -> None:
        """The job is over: give up what would outlive the coordinator in a process that goes on."""
        for dealer in self._dealers.values():
            dealer.tell_missed()
        self._areas.close()

    def _tell_user(self, line: str) -> None:
        self.say(line)  # looked up on each call: ``say`` may be replaced later

    def _welcome_server(self, number: int, said: dict[str, Any]) -> None:
        if not 0 <= number < self._expected:
            raise ValueError(f"server {number} of {self._expected}")
        server = self._reach(number, said)
        with self._coming:
            self.servers[number], self._roster[number] = server, said
            self._coming.notify_all()

    def _await_servers(self) -> list[dict[str, Any]]:
        with self._coming:
            wait = Wait(self._coming, self._timeout, self._clock, lambda *_: None, "come", "server")
            while missing := [number for number in range(self._expected) if number not in self._roster]:
                wait.sleep(missing)
            return [said for _, said in sorted(self._roster.items())]

    def _tell_servers(self, tell: Callable[[ServerTold], Callable[[], Any]], *, matters: bool = True) -> dict[int, Any]:
        """What each server answers, by its number; if a server is gone, the launcher notices and ends the job.

        Args:
            tell: Tells a server.
            matters: Whether to print that a server could not be told; at the end of a job, servers end, too.
        """
        told = {}
        for number, answer in {number: tell(server) for number, server in sorted(self.servers.items())}.items():
            try:
                told[number] = answer()
            except HocketError as error:
                if matters:
                    self.say(f"hocket: a server was not told of a change among the workers: {error}")
        return told

    def _gather(self, rank: int, head: dict[str, Any], body: Body, note: Note) -> Answer:
        found = self.meetings.gather(rank, int(head["number"]), str(head["what"]), body.read(), note)
        return Answer({}, [memoryview(b"".join(_PART.pack(each, len(data)) + data for each, data in found.items()))])

    def _settle(self, rank: int, head: dict[str, Any], _: Body, note: Note) -> Answer:
        works, over = self.meetings.settle(rank, note, has_trained=bool(head["has_trained"]), stays=bool(head["stays"]))
        return Answer({"works": works, "over": over})

    def _sum(self, peer: int, head: dict[str, Any], _: Body, note: Note) -> Answer:
        """The sum of what all servers tell for an update of a table."""
        number, what = (int(head["table"]) << 48) + int(head["update"]), f"table {int(head['table'])}"
        found = self.sums.gather(peer - SERVER, number, what, float(head["value"]).hex().encode(), note)
        return Answer({"total": sum(float.fromhex(part.decode()) for part in found.values())})

    def _keep(self, _: int, head: dict[str, Any], body: Body, __: Note) -> Answer:
        self.changes.keep(body.read(), str(head["failure"]))
        return Answer({})

    def _admit(self, _: int, head: dict[str, Any], body: Body, __: Note) -> Answer:
        """Let newcomers in: workers wait for them from now on. A newcomer needs a batch of each queue that is open."""
        numbers, given = [int(number) for number in head["numbers"]], body.read()
        queues = [(self._dealer({"queue": queue}), int(epoch)) for queue, epoch in head["queues"]]
        for number in numbers:
            if not all(dealer.admit(number, epoch) for dealer, epoch in queues):
                for dealer, _ in queues:
                    dealer.lose(number, has_died=False)
                return Answer({"admitted": False})
            self.meetings.admit(number)
            self.ledger.admit(number)
            self._tell_servers(lambda server, number=number: server.admit(number))  # type: ignore[misc]
        here = self.changes.admit(numbers, dict(head["told"]), given)
        for number in numbers:
            if number not in here:
                self.lose(number, "was lost")
        now = self.ledger.membership()
        return Answer({"admitted": True, "generation": now.generation, "workers": len(now.members)})

    def _leave(self, rank: int, _: dict[str, Any], __: Body, ___: Note) -> Answer:
        return Answer({"all": self.changes.leave(rank) >= set(self.ledger.live)})

    def _dealer(self, head: dict[str, Any]) -> Dealer:
        number = int(head["queue"])
        with self._lock:
            if number not in self._dealers:
                settings = self._timeout, self._clock, self._tell_user
                self._dealers[number] = Dealer(self._make_condition(), lambda: self.ledger.live, *settings)
            return self._dealers[number]

    def _take(self, rank: int, head: dict[str, Any], _: Body, note: Note) -> Answer:
        dealer, epoch = self._hear(rank, head), int(head["epoch"])
        if head["end"] is not None:
            dealer.end(epoch, int(head["end"]))
        total = None if head["total"] is None else int(head["total"])
        ranks = self._workers if head["in_step"] else 0
        if not head["wait"]:
            found = dealer.take(rank, epoch, total, ranks=ranks)
            more: list[int] = []
            if isinstance(found, int) and head["more"]:
                more = dealer.take_more(rank, epoch, int(head["more"]), len(self.ledger.live))
            return Answer({"batch": found, "more": more, "fatal": dealer.fatal, **_pace(dealer, rank, epoch, found)})
        idle = self.meetings.idle
        idle.add(rank)
        try:
            found = dealer.take(rank, epoch, total, note, ranks)
            return Answer({"batch": found, "fatal": dealer.fatal, **_pace(dealer, rank, epoch, found)})
        finally:
            idle.discard(rank)

    def _hear(self, rank: int, head: dict[str, Any]) -> Dealer:
        """What a worker says of its batches with each question: which are done, and which the servers refused."""
        dealer = self._dealer(head)
        dealer.give_back(rank, tuple(int(number) for number in head["refused"]))
        dealer.finish(rank, tuple(int(number) for number in head["done"]))
        return dealer

    def _give_back(self, rank: int, head: dict[str, Any], _: Body, __: Note) -> Answer:
        dealer = self._hear(rank, head)
        taken = not head["spare"] or dealer.is_dealt_out
        if taken:
            dealer.give_back(rank, tuple(int(number) for number in head["numbers"]))
        if head["left"] is not None:
            dealer.leave(rank, int(head["left"]))
        return Answer({"taken": taken})

    def _queue(self, rank: int, head: dict[str, Any], _: Body, __: Note) -> Answer:
        dealer, queue = self._hear(rank, head), int(head["queue"])
        applied = self.servers[KEEPER].applied(_name(queue, dealer)) if self.servers else []
        return Answer({"state": dealer.state(_of(applied, queue, dealer))})

    def _restore(self, _: int, head: dict[str, Any], __: Body, ___: Note) -> Answer:
        self._dealer(head).restore(head["state"])
        return Answer({})

    def _use_board(self, _: int, head: dict[str, Any], body: Body, note: Note) -> Answer:
        board, operation, value = self.board, head["operation"], body.read()
        if operation == "set":
            board.set(str(head["key"]), value)
            return Answer({})
        if operation == "get":
            found = board.get(str(head["key"]), float(head["seconds"]), note)
            return Answer({"found": found is not None}, [] if not found else [memoryview(found)])
        if operation == "wait":
            keys = [str(key) for key in head["keys"]]
            return Answer({"found": board.wait(keys, float(head["seconds"]), note)})
        if operation == "add":
            return Answer({"total": board.add(str(head["key"]), int(head["amount"]))})
        if operation == "compare_set":
            after = board.compare_set(str(head["key"]), str(head["expected"]).encode(), value)
            return Answer({}, [memoryview(after)] if after else [])
        if operation == "delete":
            return Answer({"found": board.delete(str(head["key"]))})
        if operation == "count":
            return Answer({"count": len(board)})
        raise ValueError(f"the board has no operation {operation!r}")

    def _share(self, _: int, head: dict[str, Any], __: Body, ___: Note) -> Answer:
        where = int(head["generation"]), int(head["number"])
        return Answer({"shared": True}, area=self._areas.get(where, int(head["nbytes"]), str(head["purpose"])))


def _tell(told: dict[str, Any], given: bytes) -> Answer:
    return Answer(told, [memoryview(given)] if given else [])


def _pace(dealer: Dealer, rank: int, epoch: int, found: int | str) -> dict[str, Any]:
    """How far workers that are in step are, with a batch, and how many batches there were, when all are done."""
    return {"pace": dealer.pace(rank), "total": dealer.total(epoch) if found == "over" else None}


def _name(queue: int, dealer: Dealer, rank: int | None = None) -> list[list[int]]:
    """The batches of a queue that one worker holds; of all workers, if ``rank`` is None."""
    return [[queue, dealer.epoch, number] for number in dealer.held(rank)]


def _of(batches: Sequence[Batch], queue: int, dealer: Dealer) -> list[int]:
    """The numbers of the batches that belong to one queue and its epoch."""
    return [number for of_queue, epoch, number in batches if of_queue == queue and epoch == dealer.epoch]


def split(data: bytes) -> dict[int, bytes]:
    """What a meeting has brought together, by rank."""
    found, at = {}, 0
    while at < len(data):
        rank, length = _PART.unpack_from(data, at)
        at += _PART.size + length
        found[rank] = data[at - length : at]
    return found
