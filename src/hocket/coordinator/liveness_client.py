"""A worker's end of the watch: the worker tells where it waits, hears who is lost, and says so to whoever waits.

Gloo notices that a connection was closed, but neither whose fault it was nor that a host has fallen silent, and it
cannot say who is missing. So a worker on one of several hosts has a quiet connection to the coordinator beside the
data (see ``liveness``). Over it, the worker tells what it has waited in for a moment, and how it ended.
"""

from __future__ import annotations

import contextlib
import dataclasses
import faulthandler
import secrets
import sys
import threading
import time
from collections.abc import Callable, Sequence
from typing import Any

from hocket.config import Config
from hocket.coordinator.coordinator_client import reach_coordinator
from hocket.coordinator.coordinator_service import Ask
from hocket.coordinator.hosting import HostedCoordinator
from hocket.coordinator.ledger import FAILED
from hocket.coordinator.liveness import ENDED, LOST_AFTER, UNANSWERED, News, Silence
from hocket.errors import DeadlineExceeded, JobError, MismatchError, WorkerLost
from hocket.transport.gate import FINISHED
from hocket.transport.proof import NotProved
from hocket.transport.requests import WATCH, Talk, join
from hocket.transport.waiting import Description, Patience, Standing, give_notice, ranks, say
from hocket.transport.wire import Bell, Closed, Wire

_BEAT = 0.5  # seconds between two questions
_MOST = 8  # questions without an answer; a coordinator that is busy for hours is not asked more
_TELL = 0.4  # seconds of waiting until the others are told
_GATHER = 0.2  # seconds in which those who end together are noticed
_STACKS = 5.0  # seconds in which stacks are printed once
_GOODBYE = 2.0
_SLACK = 5.0  # seconds in which the coordinator can say who has not come


class Watch:
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
        self._rank, self._hosts, self._timeout = config.rank, hosts, config.timeout
        self._is_of_rank_0, self._hosted = is_of_rank_0, hosted
        self._wire = self._connect(config, secret)
        self.on_loss: Callable[[], None] = lambda: None
        self._news = News()
        self._counts: dict[str, int] = {}
        self._lane = ""
        self._standing: Standing | None = None
        self._stacks, self._stacks_after, self._left = 0, 0.0, ""
        self._fault: Exception | None = None
        is_first = self._rank == self._beside(self._rank)[0]  # the first rank of a host speaks for it
        self._silence = Silence(hosts[0], self._beside(0), self._say if is_first else lambda _: None)
        self._bell = Bell()
        self._thread = threading.Thread(target=self._run, name="hocket-watch", daemon=True)
        self._thread.start()

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
            self._tell(Standing(self._lane, dict(self._counts), say(what)))
        self.check(what)
        if patience.is_notice_due():
            self._give_notice(patience.seconds, what, members)
        if patience.is_over:
            self._give_up(what, members)

    def rest(self) -> None:
        """See ``Outlook``: this rank waits no longer."""
        if self._standing is not None:
            self._tell(None)

    def check(self, what: Description) -> None:
        """Raise if a rank was lost or has failed, or if ranks wait for each other in different places."""
        if self._fault is not None:
            raise JobError(f"the watch over the other ranks has failed: {self._fault!r}; please report this")
        if self._news.mismatch:
            raise MismatchError(
                f"the ranks do not do the same: {self._news.mismatch}. All ranks must make the same calls in the same "
                "order, with the same shapes and types"
            )
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
        self._left = FAILED if failed else "finished"
        self._bell.ring()
        self._thread.join(_GOODBYE)
        self._wire.close()
        self._thread.join(_GOODBYE)
        self._bell.close()
        hosted, self._hosted = self._hosted, None
        if hosted is not None:
            hosted.service.liveness.let_know(_GOODBYE)
            hosted.close()

    def _connect(self, config: Config, secret: bytes) -> Wire:
        deadline, here = time.monotonic() + config.timeout, self._hosts[self._rank]
        try:
            wire = reach_coordinator(config, secret, WATCH + self._rank, deadline)
        except NotProved:
            raise
        except JobError as error:
            raise JobError(
                f"rank {self._rank} on {here} cannot reach the coordinator, beside rank 0 on {self._hosts[0]} "
                f"({error}): open the firewall between the hosts, or name the interface that connects them "
                "(--interface)"
            ) from error
        join(wire, secrets.token_hex(8), deadline + _SLACK, {"host": here})
        return wire

    def _beside(self, rank: int) -> list[int]:
        """The ranks of the same host."""
        return [each for each, name in enumerate(self._hosts) if name == self._hosts[rank]]

    def _waits(self) -> dict[int, str]:
        """What each rank waits in; for this rank, as it is now."""
        mine = self._standing
        return {rank: text for rank, text in self._news.waits if rank != self._rank} | (
            {} if mine is None else {self._rank: mine.text}
        )

    def _not_waiting(self, members: Sequence[int] = ()) -> list[int]:
        waits = self._waits()
        return [rank for rank in members or range(len(self._hosts)) if rank not in waits]

    def _waiting(self, what: Description) -> str:
        here = sorted({self._rank, *(rank for rank, text in self._waits().items() if text == say(what))})
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

    def _tell(self, standing: Standing | None) -> None:
        self._standing = standing
        self._bell.ring()

    def _say(self, line: str) -> None:
        print(line, file=sys.stderr, flush=True)

    def _give_notice(self, seconds: float, what: Description, members: Sequence[int]) -> None:
        missing = self._not_waiting(members)
        here = [r for r in members or range(len(self._hosts)) if r not in missing]
        if missing and here and here[0] == self._rank:
            give_notice(here, missing, seconds, what, self._timeout)

    def _give_up(self, what: Description, members: Sequence[int]) -> None:
        # If all members wait, one of them does so for its host, and a rank that is no member has not come there.
        missing = self._not_waiting(members) or self._not_waiting()
        self._stacks += 1
        self._bell.ring()
        time.sleep(1.0)  # let everyone's stack reach the screen before the job ends
        places = "; ".join(f"{ranks([r])} in {text}" for r, text in sorted(self._waits().items()) if text != say(what))
        raise DeadlineExceeded(
            f"{self._waiting(what)}, for {self._timeout:g} s"
            + (f", for {ranks(missing)} on {', '.join(sorted({self._hosts[r] for r in missing}))}" if missing else "")
            + (f"; {places}" if places else "")
            + ": the stacks above say what each rank does; if that is honest work, raise --timeout"
        )

    # The methods below run in the thread of the watch.

    def _run(self) -> None:
        try:
            self._talk()
        except (Closed, TimeoutError):
            if self._silence.is_long:
                self._lose(self._beside(0), UNANSWERED)
            else:
                self._lose([0], ENDED if self._is_of_rank_0 else "or the coordinator beside it ended")
        except Exception as error:  # whoever waits must not wait for news that will not come
            self._fault = error
        finally:
            self._wire.close()

    def _talk(self) -> None:
        """Ask for news twice a second, and at once when there is something to tell, until this rank has left."""
        wire = self._wire
        wire.connection.settimeout(LOST_AFTER)  # for the rest of a message
        asked, answered, beat, told = 0, 0, 0.0, dict[str, Any](left="")
        while True:
            mine = self._tell_mine()
            is_time = asked == answered or mine != told or time.monotonic() >= beat
            if is_time and (asked - answered < _MOST or mine["left"] != told["left"]):
                asked, told, beat = asked + 1, mine, time.monotonic() + _BEAT
                wire.send(Ask.WATCH, asked, {**mine, "known": self._news.number})
            if wire.wait(self._bell, max(beat - time.monotonic(), 0.1)):
                message = wire.receive()
                if message.kind == Talk.ERROR:
                    raise JobError(message.head.get("text"))
                answered = message.sequence
                if message.head:
                    self._learn(News(**message.head))
                if told["left"] and answered == asked:
                    return
            if self._silence.is_final(wire.silence()):
                raise TimeoutError

    def _tell_mine(self) -> dict[str, Any]:
        standing = self._standing
        wait = standing and (standing.lane, standing.counts, standing.text)
        return {"wait": wait, "stacks": self._stacks, "left": self._left}

    def _learn(self, news: News) -> None:
        was_broken, stacks = self._is_broken, self._news.stacks
        self._news = news
        if news.stacks > stacks:
            self._print_stacks()
        if self._is_broken and not was_broken:
            with contextlib.suppress(Exception):  # the others are told already
                self.on_loss()

    def _lose(self, members: Sequence[int], how: str) -> None:
        """The coordinator is gone, and ``members`` with it, unless they or this rank had left before."""
        known = dict(self._news.gone)
        more = [(rank, how) for rank in members if rank not in known and not self._left]
        self._learn(dataclasses.replace(self._news, gone=[*self._news.gone, *more]))

    def _print_stacks(self) -> None:
        """Print the stacks of this rank, once if several ranks give up at the same time."""
        now = time.monotonic()
        if now > self._stacks_after:
            self._stacks_after = now + _STACKS
            with contextlib.suppress(OSError, ValueError, RuntimeError):
                faulthandler.dump_traceback(2, all_threads=True)
