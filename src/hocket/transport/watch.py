"""Who is alive, and who waits where: beside the data, every rank has one quiet connection to rank 0.

Gloo notices that a connection was closed, but neither whose fault it was nor that a host has fallen silent, and it
cannot say who is missing. So each rank tells rank 0 where it waits, once it has waited for a moment, and how it
ended; rank 0 tells everybody. A host whose kernel does not answer is named at once and given up after a while, so
that a cable may be plugged in again; a process that is busy is never taken for a lost one.
"""

from __future__ import annotations

import contextlib
import faulthandler
import selectors
import socket
import sys
import threading
import time
from collections.abc import Callable, Sequence
from typing import Any

from hocket.errors import DeadlineExceeded, JobError, MismatchError, WorkerLost
from hocket.transport.gate import Description, ranks, say
from hocket.transport.news import News, Wait
from hocket.transport.peer import Peer
from hocket.transport.proof import prove

SILENT_AFTER = 1.5  # seconds without an answer of a host until it is said
LOST_AFTER = 10.0  # and until it is given up
_BEAT = 0.5
_TELL = 0.4  # seconds of waiting until the others are told
_NOTICE = 30.0


class Watch:
    """The watch of one rank. Made by ``open``, which is collective; its thread ends with ``leave``.

    Attributes:
        on_loss: Called, in the watch's thread, when a rank is lost.
        waited: Seconds that ``wait`` has been in so far.
    """

    def __init__(self, rank: int, hosts: Sequence[str], timeout: float, peers: Sequence[Peer]) -> None:
        self._rank, self._hosts, self._timeout = rank, hosts, timeout
        self.on_loss: Callable[[], None] = lambda: None
        self.waited = 0.0
        self._news = News(rank, len(hosts))
        self._peers = {peer.rank: peer for peer in peers}
        self._silent: dict[int, float] = {}
        self._counts: dict[str, int] = {}
        self._lane, self._told = "", False
        self._left = ""
        self._waker, self._wake = socket.socketpair()
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
            peers = _accept(address, announce, len(hosts), secret, deadline, timeout)
        else:
            peers = [_connect(*find(), rank, secret, deadline)]
        return cls(rank, hosts, timeout, peers)

    def enter(self, lane: str) -> None:
        """Begin the next collective of ``lane``, of which every rank has the same number in the same order."""
        self._counts[lane] = self._counts.get(lane, 0) + 1
        self._lane = lane

    def wait(self, done: Callable[[float], bool], what: Description) -> None:
        """Until ``done(seconds)``, which itself waits for so long, is true; raises if that will not be."""
        start = time.monotonic()
        notice = start + _NOTICE
        try:
            while not done(0.1):
                now = time.monotonic()
                if now - start > _TELL and not self._told:
                    self._tell(Wait(self._lane, dict(self._counts), say(what)))
                self.check(what)
                if now > notice:
                    notice += _NOTICE
                    self._give_notice(now - start, what)
                if now - start > self._timeout:
                    self._give_up(what)
        finally:
            self.waited += time.monotonic() - start
            if self._told:
                self._tell(None)

    def check(self, what: Description) -> None:
        """Raise if a rank was lost or has failed, or if ranks wait for each other in different places."""
        news = self._news
        if news.mismatch:
            raise MismatchError(
                f"the ranks do not do the same: {news.mismatch}. All ranks must make the same calls in the same order, "
                "with the same shapes and types"
            )
        lost = {rank: how for rank, how in news.lost.items() if rank != self._rank}
        if lost:
            raise WorkerLost(f"{self._waiting(what)}, but {self._say_lost(lost)}")

    def explain(self, error: Exception, what: Description) -> Exception:
        """What the failure of a collective means."""
        deadline = time.monotonic() + 2.0
        while time.monotonic() < deadline:
            try:
                self.check(what)
            except (MismatchError, WorkerLost) as known:
                return known
            if self._news.finished:
                return WorkerLost(
                    f"{self._waiting(what)}, but {ranks(sorted(self._news.finished))} finished the script: every rank "
                    "must take the same number of steps; iterate over the loader that distribute() returned, and "
                    "call collectives on all ranks"
                )
            time.sleep(0.02)
        return WorkerLost(f"{self._waiting(what)}, and the connection to another rank broke ({error})")

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

    def _say_lost(self, lost: dict[int, str]) -> str:
        groups: dict[tuple[str, str], list[int]] = {}
        for rank, how in lost.items():
            groups.setdefault((self._hosts[rank], how), []).append(rank)
        return "; ".join(f"{ranks(sorted(who))} on {host} {how}" for (host, how), who in groups.items())

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
        for peer in self._peers.values():
            peer.close()

    def _hear(self, sender: int, message: dict[str, Any]) -> None:
        before = bool(self._news.lost)
        if self._rank == 0:
            self._news.hear_rank(sender, message)
        else:
            self._news.hear_all(message)
        if self._news.stacks_wanted:
            self._news.stacks_wanted = False
            with contextlib.suppress(OSError, ValueError, RuntimeError):
                faulthandler.dump_traceback(2, all_threads=True)
        if self._news.lost and not before:
            self.on_loss()

    def _speak(self) -> None:
        if self._rank == 0:
            self._news.look_for_mismatch()
            if self._left:
                self._news.hear_rank(0, {"left": self._left})
            message = self._news.tell_all()
        else:
            message = self._news.tell_mine()
            if self._left:
                message["left"] = self._left
        for peer in self._peers.values():
            peer.send(message)

    def _has_gone(self, peer: Peer) -> bool:
        silence = peer.silence()
        if not peer.gone and silence > LOST_AFTER:
            peer.gone = f"did not answer for {LOST_AFTER:.0f} s (its host is down, or the link to it is cut)"
        if peer.gone:
            if self._news.has_left(peer.rank):
                return True
            self._news.hear_rank(peer.rank, {"lost": peer.gone})
            self.on_loss()
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


def _accept(
    address: str, announce: Callable[[str, int], None], size: int, secret: bytes, deadline: float, timeout: float
) -> list[Peer]:
    family = socket.AF_INET6 if ":" in address else socket.AF_INET
    with socket.socket(family) as server:
        server.bind((address, 0))
        server.listen(size)
        announce(address, server.getsockname()[1])
        found: dict[int, Peer] = {}
        while len(found) < size - 1:
            server.settimeout(max(deadline - time.monotonic(), 0.001))
            try:
                connection, _ = server.accept()
            except TimeoutError:
                absent = [r for r in range(1, size) if r not in found]
                raise JobError(
                    f"{ranks(absent)} did not reach hocket.init() within {timeout:g} s: see their output"
                ) from None
            connection.settimeout(5.0)
            try:
                peer = prove(connection, secret, 0)
            except (OSError, JobError):
                connection.close()  # a stranger
                continue
            found[peer] = Peer(connection, peer)
    return list(found.values())


def _connect(address: str, port: int, rank: int, secret: bytes, deadline: float) -> Peer:
    while True:
        try:
            connection = socket.create_connection((address, port), timeout=5.0)
            break
        except OSError as error:
            if time.monotonic() > deadline:
                raise JobError(
                    f"rank {rank} on {socket.gethostname()} cannot reach rank 0 at {address}:{port} "
                    f"({error.strerror or error}): open the firewall between the hosts, or name the interface that "
                    "connects them (--interface)"
                ) from None
            time.sleep(0.05)
    connection.settimeout(max(deadline - time.monotonic(), 1.0))
    prove(connection, secret, rank)
    return Peer(connection, 0)
