"""A worker's quiet connection to the coordinator, beside the data: where the worker waits, and who else waits where.

A worker that waits cannot see who is missing, and one that others wait for may be anywhere in its script. So a thread
of each worker on one of several hosts tells the coordinator where the worker waits, and hears the same of all others
(see ``liveness``). The thread prints the worker's stack when somebody has waited too long.
"""

from __future__ import annotations

import contextlib
import faulthandler
import secrets
import sys
import threading
import time
from collections.abc import Mapping
from typing import Any

from hocket.config import Config
from hocket.coordinator.coordinator_client import reach_coordinator
from hocket.coordinator.coordinator_service import Ask
from hocket.coordinator.ledger import FAILED
from hocket.coordinator.liveness import LOST_AFTER, News, Silence
from hocket.errors import JobError, MismatchError
from hocket.transport.proof import NotProved
from hocket.transport.requests import WATCH, Talk, join
from hocket.transport.waiting import Standing
from hocket.transport.wire import Bell, Closed, Wire

_BEAT = 0.5  # seconds between two questions
_MOST = 8  # questions without an answer; a coordinator that is busy for hours is not asked more
_STACKS = 5.0  # seconds in which stacks are printed once
_PRINT = 1.0  # seconds in which everyone's stack reaches the screen
_GOODBYE = 2.0
_SLACK = 5.0  # seconds in which the coordinator can say who has not come


class QuietConnection:
    """One worker's end of it; the thread ends with ``leave``.

    Args:
        config: The configuration of this worker: where the coordinator is, and how long to wait for others.
        secret: The secret of the job.
        host: The name of this worker's host.
        beside: Who is on the host of the coordinator, in words.
        goes_on: Whether workers come and go. If not, the end of this connection is the loss of the worker.
    """

    def __init__(
        self, config: Config, secret: bytes, host: str, beside: str = "the first worker", *, goes_on: bool = True
    ) -> None:
        self._rank, self._address, self._news = config.rank, config.address, News()
        self._wire = _connect(config, secret, host, beside, goes_on=goes_on)
        self._standing: Standing | None = None
        self._stacks, self._stacks_after, self._left = 0, 0.0, ""
        self._fault: Exception | None = None
        self._silence = Silence()
        self._bell = Bell()
        self._thread = threading.Thread(target=self._run, name="hocket-watch", daemon=True)
        self._thread.start()

    def follow(self, places: Mapping[int, tuple[str, str]]) -> None:
        """Say from now on when the coordinator's host falls silent, if this worker is the first on its own host.

        Args:
            places: The name and the address of the host of each worker.
        """
        here, _ = places[self._rank]
        first = next(rank for rank, (host, _) in places.items() if host == here)
        beside = [rank for rank, (_, address) in places.items() if address == self._address]
        host = places[beside[0]][0] if beside else self._address
        self._silence.follow(host, beside, _say if first == self._rank else lambda _: None)

    def tell(self, standing: Standing | None) -> None:
        """Tell the others where this worker waits; None if it waits no longer."""
        self._standing = standing
        self._bell.ring()

    def waits(self) -> dict[int, str]:
        """What each worker waits in; for this one, as it is now."""
        mine = self._standing
        return {rank: text for rank, text in self._news.waits if rank != self._rank} | (
            {} if mine is None else {self._rank: mine.text}
        )

    def compare(self) -> None:
        """Raise if workers wait for each other in different places, as far as is known."""
        if self._fault is not None:
            raise JobError(f"the watch over the other ranks has failed: {self._fault!r}; please report this")
        if self._news.mismatch:
            raise MismatchError(
                f"the ranks do not do the same: {self._news.mismatch}. All ranks must make the same calls in the same "
                "order, with the same shapes and types"
            )

    def print_stacks(self) -> None:
        """Have all workers print their stacks, and wait until that is on the screen."""
        self._stacks += 1
        self._bell.ring()
        time.sleep(_PRINT)

    def leave(self, failed: bool) -> None:
        """Say how this worker ended, and close the connection."""
        self._left = FAILED if failed else "finished"
        self._bell.ring()
        self._thread.join(_GOODBYE)
        self._wire.close()
        self._thread.join(_GOODBYE)
        self._bell.close()

    # The methods below run in the thread of the connection.

    def _run(self) -> None:
        try:
            self._talk()
        except (Closed, TimeoutError):
            self._lose_coordinator()
        except Exception as error:  # whoever waits must not wait for news that will not come
            self._fault = error
        finally:
            self._wire.close()

    def _talk(self) -> None:
        """Ask for news twice a second, and at once when there is something to tell, until this worker has left."""
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
        wait = standing and (standing.lane, standing.counts, standing.text, standing.generation)
        return {"wait": wait, "stacks": self._stacks, "left": self._left}

    def _learn(self, news: News) -> None:
        stacks, self._news = self._news.stacks, news
        if news.stacks > stacks:
            self._print_stacks()

    def _lose_coordinator(self) -> None:
        """The coordinator is gone or not reached; where workers come and go, whoever asks it next notices."""

    def _print_stacks(self) -> None:
        """Print the stacks of this worker, once if several workers give up at the same time."""
        now = time.monotonic()
        if now > self._stacks_after:
            self._stacks_after = now + _STACKS
            with contextlib.suppress(OSError, ValueError, RuntimeError):
                faulthandler.dump_traceback(2, all_threads=True)


def _connect(config: Config, secret: bytes, host: str, beside: str, *, goes_on: bool) -> Wire:
    deadline = time.monotonic() + config.timeout
    try:
        wire = reach_coordinator(config, secret, WATCH + config.rank, deadline)
    except NotProved:
        raise
    except JobError as error:
        raise JobError(
            f"rank {config.rank} on {host} cannot reach the coordinator, beside {beside} ({error}): open the firewall "
            "between the hosts, or name the interface that connects them (--interface)"
        ) from error
    said = {"host": host, "newcomer": config.newcomer, "goes_on": goes_on}
    join(wire, secrets.token_hex(8), deadline + _SLACK, said)
    return wire


def _say(line: str) -> None:
    print(line, file=sys.stderr, flush=True)
