"""Groups over TCP whose members are threads of one process."""

import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from typing import Any

from hocket.comm.tcp_group import TcpGroup
from hocket.errors import DeadlineExceeded, WorkerLost
from hocket.transport.door import is_loopback
from hocket.transport.member_links import Links
from hocket.transport.waiting import Description, Patience, say

SECRET = b"t" * 32
ADDRESS = "127.0.0.1"


class Guard:
    """Watches over the members of a group: knows nobody who is lost unless a test says so."""

    def __init__(self, timeout: float = 20.0) -> None:
        self._timeout = timeout
        self.lost = ""
        self.on_loss: Callable[[], None] = lambda: None

    def enter(self, lane: str) -> None:
        pass

    def wait(self, done: Callable[[float], bool], what: Description) -> None:
        patience = Patience(self._timeout)
        while not done(0.05):
            self.look(what, patience)

    def look(self, what: Description, patience: Patience) -> None:
        if self.lost:
            raise WorkerLost(f"{self.lost}, in {say(what)}")
        if patience.is_over:
            raise DeadlineExceeded(say(what))

    def rest(self) -> None:
        pass

    def explain(self, error: Exception, what: Description) -> Exception:
        return WorkerLost(f"{error}, in {say(what)}")

    def leave(self, failed: bool) -> None:
        pass


class Meeting:
    """Members tell each other where they are."""

    def __init__(self, size: int) -> None:
        self._barrier = threading.Barrier(size)
        self._said: dict[int, dict[str, Any]] = {}

    def of(self, rank: int) -> Callable[[dict[str, Any], Any], list[dict[str, Any]]]:
        def meet(said: dict[str, Any], _: Any) -> list[dict[str, Any]]:
            self._said[rank] = said
            self._barrier.wait(20)
            return [self._said[other] for other in sorted(self._said)]

        return meet


@contextmanager
def groups(size: int, *, encrypted: bool = False, guard: Guard | None = None) -> Iterator[list[TcpGroup]]:
    """The members of a group, by rank; all are closed afterwards."""
    watch, meeting = guard or Guard(), Meeting(size)

    def make(rank: int) -> TcpGroup:
        links = Links("test", rank, size, SECRET, ADDRESS, lambda address: encrypted or not is_loopback(address))
        return TcpGroup.connect(links, watch, meeting.of(rank))

    with ThreadPoolExecutor(size) as threads:
        made = list(threads.map(make, range(size)))
    try:
        yield made
    finally:
        for group in made:
            group.close()


def together(members: list[TcpGroup], call: Callable[[TcpGroup], Any]) -> list[Any]:
    """``call`` for each member, in a thread of its own; what each returns, or raises."""

    def attempt(group: TcpGroup) -> Any:
        try:
            return call(group)
        except Exception as error:  # any kind
            return error

    with ThreadPoolExecutor(len(members)) as threads:
        return list(threads.map(attempt, members))


def until(condition: Callable[[], bool], seconds: float = 10.0) -> None:
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.002)
