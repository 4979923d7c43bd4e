"""What members of a group know of each other: who has ended, and how long one has waited."""

from __future__ import annotations

import socket
import time
from collections.abc import Callable, Collection, Sequence

from hocket.errors import DeadlineExceeded, WorkerLost
from hocket.transport.gate import FINISHED, Gate
from hocket.transport.network_group import START
from hocket.transport.waiting import Description, Patience, give_notice, ranks, say

_KNOWN = 2.0  # seconds in which it is known who has ended when a connection has
_NAP = 0.02
_ASK = 0.5  # seconds between two questions who is alive
_SENT = 2.0  # seconds in which all has come that a member has sent before it ended


class HostWatch:
    """The watch of one member over the others; see ``Watcher``. It has no thread.

    Args:
        gate: Where all workers of the host meet.
        members: The rank at the gate of each member.
    """

    def __init__(self, gate: Gate, members: Sequence[int]) -> None:
        self.on_loss: Callable[[], None] = lambda: None
        self._gate, self._others = gate, [each for each in members if each != gate.rank]

    def enter(self, lane: str) -> None:
        """Nothing to do: members that do different things are told so when they compare."""

    def wait(self, done: Callable[[float], bool], what: Description) -> None:
        patience = Patience(self._gate.timeout)
        while not done(0.1):
            self.look(what, patience)

    def look(self, what: Description, patience: Patience) -> None:
        """See ``Outlook``. One that has ended well may have sent all that others need."""
        if gone := [each for each in self._gone() if not self._gate.has_finished(each)]:
            raise self._loss(gone, what)
        me, names = self._gate.numbers[self._gate.rank], [self._gate.numbers[each] for each in self._others]
        if patience.is_notice_due():
            give_notice([me], names, patience.seconds, what, self._gate.timeout)
        if patience.is_over:
            raise DeadlineExceeded(
                f"rank {me} waited {self._gate.timeout:g} s in {say(what)} for {ranks(names)}: see what they do; if "
                "that is honest work, raise --timeout"
            )

    def look_for_all(self) -> None:
        """Raise if a member has ended, well or not: it will not come."""
        if gone := self._gone():
            raise self._loss(gone, START)

    def rest(self) -> None:
        """Nothing to do: nobody was told of the wait."""

    def explain(self, error: Exception, what: Description) -> Exception:
        deadline = time.monotonic() + _KNOWN
        while not (gone := self._gone()):
            if time.monotonic() > deadline:
                me = self._gate.numbers[self._gate.rank]
                return WorkerLost(f"rank {me} waits in {say(what)}, and the connection to another broke ({error})")
            time.sleep(_NAP)
        return self._loss(gone, what)

    def leave(self, failed: bool) -> None:
        """Nothing to do: the gate tells the others."""

    def _gone(self) -> list[int]:
        """Members that have ended, well or not, or that have noticed a loss, and come no more."""
        return [each for each in self._others if self._gate.has_left(each) or self._gate.has_parted(each)]

    def _loss(self, gone: Sequence[int], what: Description) -> WorkerLost:
        gate, died = self._gate, [each for each in gone if not self._gate.has_finished(each)]
        names = [gate.numbers[each] for each in died or gone]
        how = f"on {socket.gethostname()} ended before arriving there" if died else FINISHED
        if died and all(map(gate.has_parted, died)):
            how = "noticed a loss before arriving there"
        loss = WorkerLost(f"rank {gate.numbers[gate.rank]} waits in {say(what)}, but {ranks(names)} {how}")
        loss.died = bool(died) and all(gate.has_died(each) or gate.has_parted(each) for each in died)
        return loss


class LiveWatch:
    """The watch of one member over the others, where somebody else knows who is alive; see ``Watcher``.

    Args:
        own: The rank of this member.
        members: The rank of each member.
        live: Says which ranks have neither died nor finished; called by the thread that waits.
        timeout: Seconds to wait for a member that is alive.
    """

    def __init__(self, own: int, members: Sequence[int], live: Callable[[], Collection[int]], timeout: float) -> None:
        self.on_loss: Callable[[], None] = lambda: None
        self._own, self._others = own, [each for each in members if each != own]
        self._live, self._timeout = live, timeout
        self._asked, self._missed = time.monotonic(), 0.0

    def enter(self, lane: str) -> None:
        """Nothing to do: members that do different things are told so when they compare."""

    def wait(self, done: Callable[[float], bool], what: Description) -> None:
        patience = Patience(self._timeout)
        while not done(0.1):
            self.look(what, patience)

    def look(self, what: Description, patience: Patience) -> None:
        """See ``Outlook``. A member that has ended may have sent all that others need."""
        now = time.monotonic()
        if now > self._asked + _ASK:
            self._asked, gone = now, self._gone()
            self._missed = (self._missed or now) if gone else 0.0
            if gone and now > self._missed + _SENT:
                raise self._loss(gone, what)
        if patience.is_notice_due():
            give_notice([self._own], self._others, patience.seconds, what, self._timeout)
        if patience.is_over:
            raise DeadlineExceeded(
                f"rank {self._own} waited {self._timeout:g} s in {say(what)} for {ranks(self._others)}: see what they "
                "do; if that is honest work, raise --timeout"
            )

    def rest(self) -> None:
        """Nothing to do: nobody was told of the wait."""

    def explain(self, error: Exception, what: Description) -> Exception:
        deadline = time.monotonic() + _KNOWN
        while not (gone := self._gone()):
            if time.monotonic() > deadline:
                return WorkerLost(f"rank {self._own} waits in {say(what)}, and a connection broke ({error})")
            time.sleep(_NAP)
        return self._loss(gone, what)

    def leave(self, failed: bool) -> None:
        """Nothing to do: the coordinator hears of it."""

    def _gone(self) -> list[int]:
        live = self._live()
        return [each for each in self._others if each not in live]

    def _loss(self, gone: Sequence[int], what: Description) -> WorkerLost:
        return WorkerLost(
            f"rank {self._own} waits in {say(what)}, but {ranks(gone)} ended: under this strategy groups do not go on "
            "without a lost worker; hocket.allreduce, allgather, broadcast and barrier of all workers do"
        )
