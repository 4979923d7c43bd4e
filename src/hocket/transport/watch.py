"""Who is alive, and who waits where: beside the data, every rank has one quiet connection to rank 0.

Gloo notices that a connection was closed, but neither whose fault it was nor that a host has fallen silent, and it
cannot say who is missing. So each rank tells rank 0 where it waits, once it has waited for a moment, and how it
ended; rank 0 tells everybody. A host whose kernel does not answer is named at once and given up after a while, so
that a cable may be plugged in again; a process that is busy is never taken for a lost one.
"""

from __future__ import annotations

import contextlib
import faulthandler
import json
import os
import selectors
import socket
import sys
import threading
import time
import weakref
from collections.abc import Callable, Sequence
from typing import Any

from hocket.errors import DeadlineExceeded, JobError, MismatchError, WorkerLost
from hocket.transport import entrance
from hocket.transport.gate import FINISHED, Description, ranks, say
from hocket.transport.news import News, Wait
from hocket.transport.peer import Peer

SILENT_AFTER = 1.5  # seconds without an answer of a host until it is said
LOST_AFTER = 10.0  # and until it is given up
_BEAT = 0.5
_TELL = 0.4  # seconds of waiting until the others are told
_GATHER = 0.2  # seconds in which those who end together are noticed
_NOTICE = 30.0
_STACKS = 5.0  # seconds in which stacks are printed once


class Watch:
    """The watch of one rank. Made by ``open``, which is collective; its thread ends with ``leave``.

    Attributes:
        on_loss: Called, in the watch's thread, when a rank is lost.
    """

    def __init__(self, rank: int, hosts: Sequence[str], timeout: float, peers: Sequence[Peer]) -> None:
        self._rank, self._hosts, self._timeout = rank, hosts, timeout
        self.on_loss: Callable[[], None] = lambda: None
        self._news = News(rank, len(hosts))
        self._peers = {peer.rank: peer for peer in peers}
        self._silent: dict[int, float] = {}
        self._counts: dict[str, int] = {}
        self._lane, self._told, self._notice = "", False, 0.0
        self._left, self._stacks_after = "", 0.0
        self._fault: Exception | None = None
        self._waker, self._wake = socket.socketpair()
        _watches.add(self)
        self._thread = threading.Thread(target=self._run, name="hocket-watch", daemon=True)
        self._thread.start()

    @classmethod
    def open(
        cls,
        rank: int,
        hosts: Sequence[str],
        timeout: float,
        secret: bytes,
        address: str,
        announce: Callable[[str, int], None],
        find: Callable[[], tuple[str, int]],
    ) -> Watch:
        """Connect to rank 0, or be it and wait for all others.

        Args:
            rank: Who this is.
            hosts: The name of every rank's host.
            timeout: Seconds to wait for the others, now and later.
            secret: The job's.
            address: Of this host, on which rank 0 listens.
            announce: With which rank 0 tells the others where.
            find: With which the others find that out.
        """
        deadline = time.monotonic() + timeout
        if rank == 0:
            peers = entrance.accept(address, announce, len(hosts), secret, deadline, timeout)
        else:
            peers = [entrance.connect(*find(), rank, secret, deadline)]
        return cls(rank, hosts, timeout, peers)

    def enter(self, lane: str) -> None:
        """Begin the next collective of ``lane``, of which every rank has the same number in the same order."""
        self._counts[lane] = self._counts.get(lane, 0) + 1
        self._lane = lane

    def wait(self, done: Callable[[float], bool], what: Description) -> None:
        """Until ``done(seconds)``, which itself waits for so long, is true; raises if that will not be."""
        start = time.monotonic()
        try:
            while not done(0.1):
                self.look(what, start)
        finally:
            self.rest()

    def look(self, what: Description, since: float) -> None:
        """See ``Outlook``: what this rank waits in, since when; it is told to the others."""
        waited = time.monotonic() - since
        if waited > _TELL and not self._told:
            self._notice = since + _NOTICE
            self._tell(Wait(self._lane, dict(self._counts), say(what)))
        self.check(what)
        if self._told and time.monotonic() > self._notice:
            self._notice += _NOTICE
            self._give_notice(waited, what)
        if waited > self._timeout:
            self._give_up(what)

    def rest(self) -> None:
        """See ``Outlook``: this rank waits no longer."""
        if self._told:
            self._tell(None)

    def check(self, what: Description) -> None:
        """Raise if a rank was lost or has failed, or if ranks wait for each other in different places."""
        news = self._news
        if self._fault is not None:
            raise JobError(f"the watch over the other ranks has failed: {self._fault!r}; please report this")
        if news.mismatch:
            raise MismatchError(
                f"the ranks do not do the same: {news.mismatch}. All ranks must make the same calls in the same order, "
                "with the same shapes and types"
            )
        if news.lost or news.failed:
            time.sleep(_GATHER)
            raise WorkerLost(f"{self._waiting(what)}, but {self._cause()}")

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

    def forget(self) -> None:
        """In a forked child: hold nothing open, so that the end of this rank is noticed without that of its child."""
        for peer in self._peers.values():
            peer.close()
        self._waker.close()
        self._wake.close()

    def leave(self, failed: bool) -> None:
        """Say how this rank ended; the watch is over."""
        self._left = "failed" if failed else "finished"
        self._poke()
        self._thread.join(2.0)
        for connection in (self._waker, self._wake):
            connection.close()

    def _waiting(self, what: Description) -> str:
        here = sorted({self._rank, *self._news.waiting_in(say(what))})
        return f"{ranks(here)} wait{'' if len(here) > 1 else 's'} in {say(what)}"

    def _cause(self) -> str:
        """Who keeps the others from going on, and how; not those who failed because of that."""
        news = self._news
        if news.lost:
            groups: dict[tuple[str, str], list[int]] = {}
            for rank, how in list(news.lost.items()):
                groups.setdefault((self._hosts[rank], how), []).append(rank)
            return "; ".join(f"{ranks(sorted(who))} on {host} {how}" for (host, how), who in groups.items())
        if news.finished:
            return f"{ranks(sorted(news.finished))} {FINISHED}"
        return f"{ranks(news.failed[:1])} on {self._hosts[news.failed[0]]} ended before arriving there"

    @property
    def _is_broken(self) -> bool:
        return bool(self._news.lost or self._news.failed)

    def _tell(self, wait: Wait | None) -> None:
        self._told = wait is not None
        self._news.put_wait(wait)
        self._poke()

    def _poke(self) -> None:
        with contextlib.suppress(OSError):
            self._wake.send(b"x")

    def _give_notice(self, seconds: float, what: Description) -> None:
        missing = self._news.not_waiting()
        here = [r for r in range(len(self._hosts)) if r not in missing]
        if missing and here and here[0] == self._rank:
            print(
                f"hocket: {ranks(here)} waited {seconds:.0f} s for {ranks(missing)} (alive) in {say(what)}; "
                f"giving up after {self._timeout:g} s (--timeout)",
                file=sys.stderr,
                flush=True,
            )

    def _give_up(self, what: Description) -> None:
        missing = self._news.not_waiting()
        self._news.ask_for_stacks()
        self._poke()
        time.sleep(1.0)  # let everyone's stack reach the screen before the job ends
        places = "; ".join(f"{ranks([r])} in {text}" for r, text in self._news.elsewhere(say(what)))
        raise DeadlineExceeded(
            f"{self._waiting(what)}, for {self._timeout:g} s"
            + (f", for {ranks(missing)} on {', '.join(sorted({self._hosts[r] for r in missing}))}" if missing else "")
            + (f"; {places}" if places else "")
            + ": the stacks above say what each rank does; if that is honest work, raise --timeout"
        )

    # From here on, in the thread of the watch.

    def _run(self) -> None:
        try:
            self._serve()
        except Exception as error:  # whoever waits must not wait for news that will not come
            self._fault = error
        finally:
            for peer in self._peers.values():
                peer.close()

    def _serve(self) -> None:
        with selectors.DefaultSelector() as selector:
            selector.register(self._waker, selectors.EVENT_READ)
            for peer in self._peers.values():
                selector.register(peer, selectors.EVENT_READ, peer)
            beat = 0.0
            while not self._left:
                for key, _ in selector.select(0.1):
                    if key.data is None:
                        self._waker.recv(64)
                    else:
                        for message in key.data.receive():
                            self._hear(key.data.rank, message)
                now = time.monotonic()
                if now >= beat or self._news.changed:
                    beat = now + _BEAT
                    self._speak()
                for peer in list(self._peers.values()):
                    if self._has_gone(peer):
                        selector.unregister(peer)
                        del self._peers[peer.rank]
                        peer.close()
            self._speak()

    def _hear(self, sender: int, message: dict[str, Any]) -> None:
        before = self._is_broken
        if self._rank == 0:
            self._news.hear_rank(sender, message)
        else:
            self._news.hear_all(message)
        if self._news.stacks_wanted:
            self._news.stacks_wanted = False
            self._print_stacks()
        if self._is_broken and not before:
            self._act_on_loss()

    def _act_on_loss(self) -> None:
        self._speak()
        with contextlib.suppress(Exception):  # the others are told already
            self.on_loss()

    def _print_stacks(self) -> None:
        """Once, if several ranks give up at the same time."""
        now = time.monotonic()
        if now > self._stacks_after:
            self._stacks_after = now + _STACKS
            with contextlib.suppress(OSError, ValueError, RuntimeError):
                faulthandler.dump_traceback(2, all_threads=True)

    def _speak(self) -> None:
        if self._rank == 0:
            if self._news.changed:
                self._news.look_for_mismatch()
            if self._left:
                self._news.hear_rank(0, {"left": self._left})
            message = self._news.tell_all()
        else:
            message = self._news.tell_mine()
            if self._left:
                message["left"] = self._left
        line = json.dumps(message).encode()
        for peer in self._peers.values():
            peer.send(line)

    def _has_gone(self, peer: Peer) -> bool:
        """Whether nothing more will come from ``peer``, which is noted then, and said at the first sign of it."""
        silence = peer.silence()
        gone = [peer.rank]
        if not peer.gone and silence > LOST_AFTER:
            peer.gone = f"did not answer for {LOST_AFTER:.0f} s (the host is down, or the link to it is cut)"
            gone = [rank for rank, host in enumerate(self._hosts) if host == self._hosts[peer.rank]]
        if peer.gone:
            before = self._is_broken
            for rank in gone:
                self._news.hear_rank(rank, {"lost": peer.gone})
            if self._is_broken and not before:
                self._act_on_loss()
            return True
        if silence > SILENT_AFTER and peer.rank not in self._silent:
            self._silent[peer.rank] = time.monotonic() - silence
            self._say_of(peer, f"does not answer: it is down or its link is cut; giving up after {LOST_AFTER:g} s")
        elif silence < SILENT_AFTER and peer.rank in self._silent:
            self._say_of(peer, f"answers again after {time.monotonic() - self._silent.pop(peer.rank):.1f} s")
        return False

    def _say_of(self, peer: Peer, text: str) -> None:
        """Once for all ranks of a host."""
        host = self._hosts[peer.rank]
        everyone = [r for r, name in enumerate(self._hosts) if name == host]
        here = [r for r, name in enumerate(self._hosts) if name == self._hosts[self._rank]]
        if peer.rank == everyone[0] and self._rank == here[0]:
            print(f"hocket: {host} ({ranks(everyone)}) {text}", file=sys.stderr, flush=True)


_watches: weakref.WeakSet[Watch] = weakref.WeakSet()


def _forget_all() -> None:
    for watch in _watches:
        watch.forget()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_forget_all)
