"""Requests to a server or the coordinator: each is answered once, though the connection may break and be made anew."""

from __future__ import annotations

import math
import os
import sys
import threading
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from enum import IntEnum
from typing import Any

from hocket import errors
from hocket.config import Config
from hocket.errors import HocketError, JobError, ServerLost
from hocket.messages import Message, WireError
from hocket.transport import door, handoff
from hocket.transport.area import Area
from hocket.transport.waiting import ranks
from hocket.transport.wire import Closed, Wire, until

_AGAIN = 3.0  # seconds in which a broken connection can be made anew
_RETRY = 0.02
_TRIES = 5  # how often one request is sent at most
_GOODBYE = 2.0
_SLACK = 30.0  # seconds that a server has beyond the time in which it has to answer


COORDINATOR = 1 << 31  # the coordinator's number in proofs, where workers have their ranks
BOARD = 1 << 29  # added to a rank: a second connection of the worker, over which its threads use the board
WATCH = 1 << 28  # added to a rank: the connection over which the coordinator sees whether the worker is alive
SERVER = 1 << 30  # added to the number of a server, to tell servers from ranks


class Talk(IntEnum):
    """The kinds of messages that every connection has; requests have kinds of their own."""

    JOIN = 1
    BYE = 2
    REPLY = 3
    NOTE = 4
    ERROR = 5


def encrypted(address: str, config: Config) -> bool:
    """Whether connections to ``address`` are encrypted."""
    return config.tls == "on" or (config.tls == "auto" and not door.is_loopback(address))


def reach(
    config: Config, secret: bytes, name: int, said: Mapping[str, Any], deadline: float, *, waits: bool = True
) -> Wire:
    """Connect to another process of the job, as ``name``, by what that process has said of itself.

    Args:
        config: The configuration of this process.
        secret: The secret of the job.
        name: The number of this end in proofs.
        said: What ``Reception.open_for`` gave the other process: a socket of its host, an address and a port.
        deadline: The monotonic time until which to try.
        waits: Whether the process may be about to open its door; else it is gone if nobody listens there.
    """
    beside = config.rendezvous is not None and str(said["socket"]).startswith(f"{config.rendezvous}-")
    if beside and config.transport != "gloo":
        return door.knock_here(said["socket"], secret, name, deadline, waits=waits)
    address = said["address"]
    is_encrypted = encrypted(address, config)
    return door.knock(address, said["port"], secret, name, deadline, encrypted=is_encrypted, waits=waits)


class Link(ABC):
    """A server or the coordinator, as a worker sees it. Requests are made by one thread at a time."""

    is_local: bool
    """Whether the server is on this host, and can be given shared memory."""

    area: Area | None = None
    """The shared memory that came with the last answer, if there was any."""

    timeout: float = math.inf
    """Seconds that the worker may have to wait for others."""

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
            HocketError: the server has answered with this error.
            ServerLost: the server is gone.
        """

    @abstractmethod
    def close(self) -> None:
        """Say goodbye, if that is possible."""


class WireLink(Link):
    """A link over a socket.

    Args:
        name: The name of the server, for messages.
        connect: Makes a connection, proved and joined; tries until a monotonic time.
        timeout: Seconds that the worker may have to wait for others.
    """

    def __init__(self, name: str, connect: Callable[[float], Wire], timeout: float) -> None:
        self._name, self._connect, self.timeout = name, connect, timeout
        self._sequence = 0
        self._request: tuple[int, dict[str, Any], Sequence[memoryview], Area | None] = (0, {}, (), None)
        self._failure: Exception | None = None  # why the last request could not be sent
        self._is_closed = False
        self._wire: Wire | None = None
        self._wire = self._make(time.monotonic() + timeout)
        self.is_local = self._wire.is_local
        self._lock = threading.Lock()
        self._process = os.getpid()

    def begin(
        self, kind: int, head: dict[str, Any], parts: Sequence[memoryview] = (), *, area: Area | None = None
    ) -> None:
        if self._process != os.getpid():
            raise JobError("a process that the script has forked is no worker, and cannot talk to servers")
        self._lock.acquire()
        self._sequence += 1
        self._request, self._failure = (kind, head, parts, area), None
        try:
            self._send()
        except (Closed, ServerLost) as error:
            self._failure = error  # for finish(), which makes a new connection if that helps
        except BaseException as error:
            if isinstance(error, Exception):
                self._sequence -= 1  # the message cannot be encoded: nothing was sent
            else:
                self._drop()
            self._lock.release()
            raise

    def finish(self, into: Sequence[memoryview] | None = None) -> tuple[dict[str, Any], bytes]:
        try:
            message, data = self._exchange(into)
        except BaseException:
            self._drop()  # there may be half a message in it
            raise
        finally:
            self._lock.release()
        if message.kind == Talk.ERROR:
            raise _error(message)
        return message.head, data

    def close(self) -> None:
        if self._is_closed or self._process != os.getpid():
            return
        self._is_closed = True
        wire = self._wire
        if wire is not None and self._lock.acquire(timeout=_GOODBYE):
            try:
                wire.connection.settimeout(_GOODBYE)
                self._sequence += 1
                wire.send(Talk.BYE, self._sequence, {})
                wire.receive()
            except (HocketError, OSError):
                pass
            finally:
                self._lock.release()
        if wire is not None:
            wire.close()
        self._wire = None

    @property
    def traffic(self) -> tuple[int, int]:
        """Bytes that this connection has sent and received."""
        return (self._wire.sent, self._wire.received) if self._wire is not None else (0, 0)

    def _exchange(self, into: Sequence[memoryview] | None) -> tuple[Message, bytes]:
        """Get the answer to a request; the request is sent again when the connection breaks, a few times at most."""
        failure, self._failure = self._failure, None
        for tries in range(_TRIES):
            try:
                if failure is not None:
                    raise failure
                if tries:
                    self._send()
                return self._receive(into)
            except (Closed, _Garbled) as error:
                failure = None
                self._reconnect(error)
        raise ServerLost(f"{self._name} does not answer request {self._sequence}: see its output")

    def _send(self) -> None:
        wire = self._wire
        if wire is None:
            raise Closed("there is no connection")
        kind, head, parts, area = self._request
        try:
            wire.send(kind, self._sequence, head, parts)
            if area is not None:
                handoff.give(wire.connection, area.descriptor)
        except TimeoutError:
            raise self._is_silent() from None
        except OSError as error:
            raise Closed(str(error)) from error

    def _receive(self, into: Sequence[memoryview] | None) -> tuple[Message, bytes]:
        wire = self._wire
        if wire is None:
            raise Closed("there is no connection")
        wire.connection.settimeout(self.timeout + _SLACK)
        try:
            while True:
                try:
                    message = wire.receive()
                except WireError as error:
                    raise _Garbled(str(error)) from error
                if message.kind == Talk.NOTE:
                    _say_waiting(self._name, message.head)
                    continue
                if message.sequence != self._sequence:
                    wire.receive_bytes(message.body)  # the answer to a request that was sent twice
                    continue
                break
            if message.head.get("shared"):
                self.area = Area(_take(wire))
            if into is None or message.kind == Talk.ERROR:
                return message, wire.receive_bytes(message.body)
            if sum(part.nbytes for part in into) != message.body:
                raise JobError(f"{self._name} sent {message.body:,} bytes, and others were expected")
            wire.receive_into(into)
            return message, b""
        except TimeoutError:
            raise self._is_silent() from None

    def _is_silent(self) -> ServerLost:
        return ServerLost(f"{self._name} has not answered for {self.timeout + _SLACK:g} s: is its process stopped?")

    def _reconnect(self, error: Exception) -> None:
        self._drop()
        try:
            if self._is_closed:
                raise JobError("this worker has said goodbye")
            self._wire = self._make(time.monotonic() + (0.2 if self.is_local else _AGAIN))
        except (HocketError, OSError) as failure:
            raise ServerLost(f"{self._name} has ended ({error}): see its output ({failure})") from None

    def _make(self, deadline: float) -> Wire:
        """A new connection; one that breaks while it is made is made again."""
        while True:
            try:
                return self._connect(deadline)
            except Closed:
                if time.monotonic() > deadline:
                    raise
                time.sleep(_RETRY)

    def _drop(self) -> None:
        wire, self._wire = self._wire, None
        if wire is not None:
            wire.close()


class _Garbled(JobError):
    """The bytes that came are no message: the connection is of no use any more."""


def join(wire: Wire, nonce: str, deadline: float, said: dict[str, Any] | None = None) -> dict[str, Any]:
    """Say the first words on a connection, which is closed if they fail; returns what the other end answers.

    Args:
        wire: A connection over which the secret was just proved.
        nonce: Tells this process from another one that claims the same rank.
        deadline: The monotonic time until which the other end has to answer.
        said: What this process says of itself.
    """
    try:
        wire.connection.settimeout(until(deadline))
        wire.send(Talk.JOIN, 0, {"nonce": nonce, "said": said or {}})
        message = wire.receive()
        wire.connection.settimeout(None)
        if message.kind == Talk.ERROR:
            raise _error(message)
    except BaseException as error:
        wire.close()
        if isinstance(error, TimeoutError) and not isinstance(error, HocketError):
            raise JobError("the other end did not answer in time: see its output") from None
        raise
    return message.head


def _take(wire: Wire) -> int:
    try:
        return handoff.take(wire.connection)
    except (OSError, JobError) as error:
        raise Closed(f"no shared memory came ({error})") from error


def _error(message: Message) -> HocketError:
    kind = getattr(errors, str(message.head.get("error")), JobError)
    found: HocketError = kind(message.head.get("text"))
    return found


def _say_waiting(name: str, head: dict[str, Any]) -> None:
    missing, seconds = [int(rank) for rank in head.get("ranks", ())], float(head.get("seconds", 0.0))
    print(f"hocket: waited {seconds:.0f} s for {ranks(missing)} at {name}", file=sys.stderr, flush=True)
