"""A worker's connection to one server: requests are answered once, though the connection may break and be made anew."""

from __future__ import annotations

import os
import sys
import threading
import time
import weakref
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from typing import Any

from hocket import errors
from hocket.errors import HocketError, JobError, ServerLost
from hocket.server.terms import Kind
from hocket.transport import handoff
from hocket.transport.area import Area
from hocket.transport.wire import Closed, Wire, until

_AGAIN = 3.0  # seconds in which a broken connection can be made anew
_TRIES = 5  # for one request
_SLACK = 30.0  # seconds that a server has beyond the time in which it has to answer


class Link(ABC):
    """One server, as a worker sees it. Requests are made by one thread at a time."""

    is_local: bool
    """Whether the server is on this host, and can be given shared memory."""

    def request(
        self,
        kind: int,
        head: dict[str, Any],
        parts: Sequence[memoryview] = (),
        *,
        into: Sequence[memoryview] | None = None,
        area: Area | None = None,
    ) -> tuple[dict[str, Any], bytes]:
        """Ask, and wait for the answer; see ``begin`` and ``finish``."""
        self.begin(kind, head, parts, area=area)
        return self.finish(into)

    @abstractmethod
    def begin(
        self, kind: int, head: dict[str, Any], parts: Sequence[memoryview] = (), *, area: Area | None = None
    ) -> None:
        """Send a request with its bytes, which must stay as they are until ``finish``; with shared memory, if given."""

    @abstractmethod
    def finish(self, into: Sequence[memoryview] | None = None) -> tuple[dict[str, Any], bytes]:
        """The answer, and its bytes unless they go straight ``into`` place.

        Raises:
            HocketError: what the server says.
            ServerLost: it is gone.
        """

    @abstractmethod
    def close(self) -> None:
        """Say goodbye, if that is possible."""


class WireLink(Link):
    """A link over a socket.

    Args:
        name: Of the server, for messages.
        connect: Makes a connection until a monotonic time, proved and joined.
        timeout: Seconds that the worker may have to wait for others.
    """

    def __init__(self, name: str, connect: Callable[[float], Wire], timeout: float) -> None:
        self._name, self._connect, self._timeout = name, connect, timeout
        self._sequence = 0
        self._request: tuple[int, dict[str, Any], Sequence[memoryview], Area | None] = (0, {}, (), None)
        self._wire: Wire | None = connect(time.monotonic() + timeout)
        self.is_local = self._wire.is_local
        self._lock = threading.Lock()
        self._process = os.getpid()
        _links.add(self)

    def begin(
        self, kind: int, head: dict[str, Any], parts: Sequence[memoryview] = (), *, area: Area | None = None
    ) -> None:
        if self._process != os.getpid():
            raise JobError("a process that the script has forked is no worker, and cannot talk to servers")
        self._lock.acquire()
        self._sequence += 1
        self._request = kind, head, parts, area
        try:
            self._send()
        except Closed:
            pass  # finish() makes a new connection

    def finish(self, into: Sequence[memoryview] | None = None) -> tuple[dict[str, Any], bytes]:
        try:
            for tries in range(_TRIES):
                try:
                    if tries:
                        self._send()
                    return self._receive(into)
                except Closed as error:
                    self._reconnect(error)
            raise ServerLost(f"{self._name} does not answer request {self._sequence}: see its output")
        finally:
            self._lock.release()

    def close(self) -> None:
        if self._wire is None or self._process != os.getpid():
            return
        try:
            self._wire.connection.settimeout(2.0)
            with self._lock:
                self._sequence += 1
                self._wire.send(Kind.BYE, self._sequence, {})
                self._wire.receive()
        except (HocketError, OSError):
            pass
        self._wire.close()
        self._wire = None
        _links.discard(self)

    @property
    def traffic(self) -> tuple[int, int]:
        """Bytes that this connection has sent and received."""
        return (self._wire.sent, self._wire.received) if self._wire is not None else (0, 0)

    def abandon(self) -> None:
        """In a forked child: the connection is the parent's, whose end must be noticed."""
        if self._wire is not None:
            self._wire.connection.close()

    def _send(self) -> None:
        if self._wire is None:
            raise Closed("there is no connection")
        kind, head, parts, area = self._request
        self._wire.send(kind, self._sequence, head, parts)
        if area is not None:
            try:
                handoff.give(self._wire.connection, area.descriptor)
            except OSError as error:
                raise Closed(str(error)) from error

    def _receive(self, into: Sequence[memoryview] | None) -> tuple[dict[str, Any], bytes]:
        wire = self._wire
        if wire is None:
            raise Closed("there is no connection")
        wire.connection.settimeout(self._timeout + _SLACK)
        try:
            while True:
                message = wire.receive()
                if message.kind == Kind.NOTE:
                    _say_waiting(self._name, message.head)
                    continue
                if message.sequence != self._sequence:
                    wire.receive_bytes(message.body)  # of a request that was sent twice
                    continue
                break
            if message.kind != Kind.ERROR:
                return message.head, self._take_body(wire, message.body, into)
        except TimeoutError:
            raise ServerLost(
                f"{self._name} has not answered for {self._timeout + _SLACK:g} s: is its process stopped?"
            ) from None
        kind = getattr(errors, str(message.head.get("error")), JobError)
        raise kind(message.head.get("text"))  # may be a TimeoutError, too: another worker's, of which the server tells

    def _take_body(self, wire: Wire, length: int, into: Sequence[memoryview] | None) -> bytes:
        if into is None:
            return wire.receive_bytes(length)
        if sum(part.nbytes for part in into) != length:
            raise JobError(f"{self._name} sent {length:,} bytes, and others were expected")
        wire.receive_into(into)
        return b""

    def _reconnect(self, error: Closed) -> None:
        if self._wire is not None:
            self._wire.close()
            self._wire = None
        deadline = time.monotonic() + (0.2 if self.is_local else _AGAIN)
        try:
            self._wire = self._connect(deadline)
        except (HocketError, OSError) as failure:
            raise ServerLost(f"{self._name} has ended ({error}): see its output ({failure})") from None


def join(wire: Wire, rank: int, nonce: str, deadline: float) -> dict[str, Any]:
    """The first words on every connection; what the server answers."""
    wire.connection.settimeout(until(deadline))
    try:
        wire.send(Kind.JOIN, 0, {"role": "worker", "number": rank, "nonce": nonce})
        message = wire.receive()
    except TimeoutError:
        raise JobError("a server did not answer in time") from None
    wire.connection.settimeout(None)
    if message.kind == Kind.ERROR:
        kind = getattr(errors, str(message.head.get("error")), JobError)
        raise kind(message.head.get("text"))
    return message.head


def _say_waiting(name: str, head: dict[str, Any]) -> None:
    ranks = ", ".join(str(rank) for rank in head.get("ranks", ()))
    seconds = float(head.get("seconds", 0.0))
    print(f"hocket: {name} has been waiting {seconds:.0f} s for rank {ranks}", file=sys.stderr, flush=True)


_links: weakref.WeakSet[WireLink] = weakref.WeakSet()


def _abandon_all() -> None:
    for link in list(_links):
        link.abandon()


os.register_at_fork(after_in_child=_abandon_all)
