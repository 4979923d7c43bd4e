"""A worker's end of the watch: the worker hears over its quiet connection who is lost, and says so to whoever waits.

Gloo notices that a connection was closed, but neither whose fault it was nor that a host has fallen silent, and it
cannot say who is missing.
"""

from __future__ import annotations

import contextlib
import dataclasses
import time
from collections.abc import Callable, Sequence

from hocket.config import Config
from hocket.coordinator.hosting import HostedCoordinator
from hocket.coordinator.liveness import ENDED, UNANSWERED, News
from hocket.coordinator.quiet_connection import QuietConnection
from hocket.errors import DeadlineExceeded, MismatchError, WorkerLost
from hocket.transport.gate import FINISHED
from hocket.transport.waiting import Description, Patience, Standing, give_notice, ranks, say

_TELL = 0.4  # seconds of waiting until the others are told
_GATHER = 0.2  # seconds in which those who end together are noticed
_GOODBYE = 2.0


class Watch(QuietConnection):
    """The watch of one rank; its thread ends with ``leave``. To make it is collective: it waits for all ranks.

    Args:
        config: The configuration of this worker: where the coordinator is, and how long to wait for others.
        secret: The secret of the job.
        hosts: The name of every rank's host.
        is_of_rank_0: Whether the coordinator is a thread of rank 0, and no process of its own.
        hosted: The coordinator, if it is in this process; it ends with the watch.

    Attributes:
        on_loss: Called, in the watch's thread, when a rank is lost.
    """

    def __init__(
        self,
        config: Config,
        secret: bytes,
        hosts: Sequence[str],
        *,
        is_of_rank_0: bool = False,
        hosted: HostedCoordinator | None = None,
    ) -> None:
        self._hosts, self._timeout = hosts, config.timeout
        self._is_of_rank_0, self._hosted = is_of_rank_0, hosted
        self.on_loss: Callable[[], None] = lambda: None
        self._counts: dict[str, int] = {}
        self._lane = ""
        super().__init__(config, secret, hosts[config.rank], f"rank 0 on {hosts[0]}", goes_on=False)
        self.follow({rank: (host, config.address if host == hosts[0] else "") for rank, host in enumerate(hosts)})

    def enter(self, lane: str) -> None:
        """Begin the next collective of ``lane``, of which every rank has the same number in the same order."""
        self._counts[lane] = self._counts.get(lane, 0) + 1
        self._lane = lane

    def wait(self, done: Callable[[float], bool], what: Description, members: Sequence[int] = ()) -> None:
        """See ``Overview``."""
        patience = Patience(self._timeout)
        try:
            while not done(0.1):
                self.look(what, patience, members)
        finally:
            self.rest()

    def look(self, what: Description, patience: Patience, members: Sequence[int] = ()) -> None:
        """See ``Overview``: what this rank waits in is told to the others."""
        if patience.seconds > _TELL and self._standing is None:
            self.tell(Standing(self._lane, dict(self._counts), say(what)))
        self.check(what)
        if patience.is_notice_due():
            self._give_notice(patience.seconds, what, members)
        if patience.is_over:
            self._give_up(what, members)

    def rest(self) -> None:
        """See ``Outlook``: this rank waits no longer."""
        if self._standing is not None:
            self.tell(None)

    def check(self, what: Description) -> None:
        """Raise if a rank was lost or has failed, or if ranks wait for each other in different places."""
        self.compare()
        if self._is_broken:
            time.sleep(_GATHER)
            raise WorkerLost(f"{self._waiting(what)}, but {self._cause()}")

    def look_for(self, members: Sequence[int]) -> None:
        """Raise if one of some ranks has ended, well or not: it will not come. Any thread may call it."""
        if any(rank in members for rank, _ in self._news.gone):
            raise WorkerLost(f"{ranks(sorted(members))} are to begin a group, but {self._cause()}")

    def explain(self, error: Exception, what: Description) -> Exception:
        """What the failure of a collective means."""
        deadline = time.monotonic() + 2.0
        while time.monotonic() < deadline:
            try:
                self.check(what)
            except (MismatchError, WorkerLost) as known:
                return known
            if self._news.finished:
                return WorkerLost(f"{self._waiting(what)}, but {self._cause()}")
            time.sleep(0.02)
        if isinstance(error, WorkerLost):
            return error
        return WorkerLost(f"{self._waiting(what)}, and the connection to another rank broke ({error})")

    def leave(self, failed: bool) -> None:
        """Say how this rank ended; the watch is over."""
        super().leave(failed)
        hosted, self._hosted = self._hosted, None
        if hosted is not None:
            hosted.service.liveness.let_know(_GOODBYE)
            hosted.close()

    def _beside(self, rank: int) -> list[int]:
        """The ranks of the same host."""
        return [each for each, name in enumerate(self._hosts) if name == self._hosts[rank]]

    def _not_waiting(self, members: Sequence[int] = ()) -> list[int]:
        waits = self.waits()
        return [rank for rank in members or range(len(self._hosts)) if rank not in waits]

    def _waiting(self, what: Description) -> str:
        here = sorted({self._rank, *(rank for rank, text in self.waits().items() if text == say(what))})
        return f"{ranks(here)} wait{'' if len(here) > 1 else 's'} in {say(what)}"

    def _cause(self) -> str:
        """Who keeps the others from going on, and how; not those who failed because of that."""
        news = self._news
        if news.lost:
            groups: dict[tuple[str, str], list[int]] = {}
            for rank, how in news.lost.items():
                groups.setdefault((self._hosts[rank], how), []).append(rank)
            return "; ".join(f"{ranks(sorted(who))} on {host} {how}" for (host, how), who in groups.items())
        if news.finished:
            return f"{ranks(news.finished)} {FINISHED}"
        return f"{ranks(news.failed[:1])} on {self._hosts[news.failed[0]]} ended before arriving there"

    @property
    def _is_broken(self) -> bool:
        return bool(self._news.lost or self._news.failed)

    def _give_notice(self, seconds: float, what: Description, members: Sequence[int]) -> None:
        missing = self._not_waiting(members)
        here = [r for r in members or range(len(self._hosts)) if r not in missing]
        if missing and here and here[0] == self._rank:
            give_notice(here, missing, seconds, what, self._timeout)

    def _give_up(self, what: Description, members: Sequence[int]) -> None:
        # If all members wait, one of them does so for its host, and a rank that is no member has not come there.
        missing = self._not_waiting(members) or self._not_waiting()
        self.print_stacks()
        places = "; ".join(f"{ranks([r])} in {text}" for r, text in sorted(self.waits().items()) if text != say(what))
        raise DeadlineExceeded(
            f"{self._waiting(what)}, for {self._timeout:g} s"
            + (f", for {ranks(missing)} on {', '.join(sorted({self._hosts[r] for r in missing}))}" if missing else "")
            + (f"; {places}" if places else "")
            + ": the stacks above say what each rank does; if that is honest work, raise --timeout"
        )

    # The methods below run in the thread of the connection.

    def _learn(self, news: News) -> None:
        was_broken = self._is_broken
        super()._learn(news)
        if self._is_broken and not was_broken:
            with contextlib.suppress(Exception):  # the others are told already
                self.on_loss()

    def _lose_coordinator(self) -> None:
        if self._silence.is_long:
            self._lose(self._beside(0), UNANSWERED)
        else:
            self._lose([0], ENDED if self._is_of_rank_0 else "or the coordinator beside it ended")

    def _lose(self, members: Sequence[int], how: str) -> None:
        """The coordinator is gone, and ``members`` with it, unless they or this rank had left before."""
        known = dict(self._news.gone)
        more = [(rank, how) for rank in members if rank not in known and not self._left]
        self._learn(dataclasses.replace(self._news, gone=[*self._news.gone, *more]))
