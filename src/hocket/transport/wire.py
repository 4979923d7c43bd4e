"""Messages between workers and servers: a fixed header, a small JSON head, and raw bytes that go straight into place.

Lengths are capped before anything is read into memory, and nothing is unpickled. A message is only read from a peer
that has proved the job's secret (see ``proof``).
"""

from __future__ import annotations

import contextlib
import json
import socket
import ssl
import struct
import threading
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from hocket.errors import JobError

MAGIC = b"HOCK"
VERSION = 1
HEADER = struct.Struct("!4sBBHIQIQ")  # magic, version, kind, nothing, generation, sequence, bytes of head and of body
MOST_HEAD = 8 << 20
MOST_BODY = 1 << 40
_AT_ONCE = 64  # parts of a body in one system call
_TLS_CHUNK = 1 << 18
_FIRST = 1 << 20  # bytes for which memory is taken at first


class WireError(JobError):
    """What came is no message, or not one that is allowed here."""


class Closed(JobError):
    """The other end has closed the connection, or it broke."""


class Message(NamedTuple):
    """A message whose body is still to be received."""

    kind: int
    generation: int
    sequence: int
    head: dict[str, Any]
    body: int  # bytes


@dataclass
class Wire:
    """One end of a connection.

    Threads may use it and close it at the same time. Its descriptor is given back when the last of them is out of its
    call: OpenSSL still sends an alert when it sees the end of a connection, and under a number that has another file
    by then these 24 bytes would go into that.

    Args:
        connection: Proved; blocking, with or without a timeout.
        most_head: Bytes of a head beyond which a message is refused; ``most_body`` likewise.
    """

    connection: socket.socket
    most_head: int = MOST_HEAD
    most_body: int = MOST_BODY
    sent: int = field(default=0, init=False)
    received: int = field(default=0, init=False)
    _lock: Any = field(default_factory=threading.RLock, init=False, repr=False)
    _users: int = field(default=0, init=False)  # calls that are under way
    _is_closed: bool = field(default=False, init=False)

    def send(
        self,
        kind: int,
        sequence: int,
        head: dict[str, Any],
        parts: Sequence[memoryview] = (),
        generation: int = 0,
    ) -> None:
        """Send a message; blocks until the system has taken all of it.

        Raises:
            Closed: the connection broke.
            WireError: it is too long; nothing was sent.
            TimeoutError: not all of it was taken in the time that the connection has, which is of no use any more.
        """
        text = json.dumps(head, separators=(",", ":")).encode()
        length = sum(part.nbytes for part in parts)
        if len(text) > self.most_head or length > self.most_body:
            raise WireError(f"a message of {len(text):,} + {length:,} bytes is longer than servers and workers allow")
        header = HEADER.pack(MAGIC, VERSION, kind, 0, generation, sequence, len(text), length)
        with self._use():
            self._send_all([memoryview(header + text), *parts])
        self.sent += len(header) + len(text) + length

    def receive(self) -> Message:
        """The next message, without its body; blocks until there is one.

        Raises:
            Closed: the other end has gone, or the connection broke.
            WireError: what came is no message.
            TimeoutError: nothing came in the time that the connection has, or only a part of it.
        """
        magic, version, kind, nothing, generation, sequence, head, body = HEADER.unpack(self._receive(HEADER.size))
        if magic != MAGIC or nothing:
            raise WireError(f"no message begins with {magic!r}")
        if version != VERSION:
            raise WireError(f"a message of version {version}, and this is version {VERSION}: install the same Hocket")
        if head > self.most_head or body > self.most_body:
            raise WireError(f"a message of {head:,} + {body:,} bytes is longer than is allowed here")
        try:
            content = json.loads(self._receive(head)) if head else {}
        except (ValueError, RecursionError):
            raise WireError("the head of a message is no JSON") from None
        if not isinstance(content, dict):
            raise WireError("the head of a message is no object")
        return Message(kind, generation, sequence, content, body)

    def receive_into(self, parts: Sequence[memoryview]) -> None:
        """The body of the message that was received last, which must be as long as ``parts`` together."""
        for part in parts:
            self._fill(part.cast("B"))

    def receive_bytes(self, count: int) -> bytes:
        """The body of the message that was received last, as bytes."""
        return self._receive(count)

    @property
    def is_local(self) -> bool:
        """Whether both ends are on this host, and memory can be shared."""
        return self.connection.family == socket.AF_UNIX

    def close(self) -> None:
        """End the connection; whoever waits at it is woken, and closes it on the way out."""
        with self._lock:
            self._is_closed = True
            hang_up(self.connection)
            if not self._users:
                self.connection.close()

    @contextlib.contextmanager
    def _use(self) -> Iterator[None]:
        """A call on the connection, which stays open until it has returned."""
        with self._lock:
            if self._is_closed:
                raise Closed("the connection was closed here")
            self._users += 1
        try:
            yield
        except TimeoutError:
            raise
        except (OSError, ssl.SSLError) as error:
            raise Closed(f"the connection broke: {error}") from error
        finally:
            with self._lock:
                self._users -= 1
                if self._is_closed and not self._users:
                    self.connection.close()

    def _send_all(self, parts: list[memoryview]) -> None:
        if isinstance(self.connection, ssl.SSLSocket):
            for part in parts:
                view = part.cast("B")
                for start in range(0, view.nbytes, _TLS_CHUNK):
                    self.connection.sendall(view[start : start + _TLS_CHUNK])
            return
        views = [part.cast("B") for part in parts if part.nbytes]
        while views:
            sent = self.connection.sendmsg(views[:_AT_ONCE])
            while views and sent >= views[0].nbytes:
                sent -= views.pop(0).nbytes
            if sent:
                views[0] = views[0][sent:]

    def _receive(self, count: int) -> bytes:
        """Memory is taken as bytes come, and not because somebody says that they will."""
        data = bytearray()
        while len(data) < count:
            part = bytearray(min(count - len(data), max(_FIRST, len(data))))
            self._fill(memoryview(part))
            data += part
        return bytes(data)

    def _fill(self, view: memoryview) -> None:
        done = 0
        with self._use():
            while done < view.nbytes:
                count = self.connection.recv_into(view[done:])
                if not count:
                    raise Closed("the other end has closed the connection")
                done += count
                self.received += count


def hang_up(connection: socket.socket) -> None:
    """Have whoever waits at a connection, in another thread, see its end."""
    with contextlib.suppress(OSError):
        # Not the method of a TLS socket, which would let that thread go on without encryption.
        socket.socket.shutdown(connection, socket.SHUT_RDWR)


def until(deadline: float) -> float:
    """Seconds for a socket's timeout until the monotonic time ``deadline``; a little if that has passed."""
    return max(deadline - time.monotonic(), 0.001)
