"""Messages over sockets (see hocket.messages). They are read only from a peer that has proved the job's secret.

See ``proof`` for how a peer does so.
"""

from __future__ import annotations

import contextlib
import os
import select
import socket
import ssl
import struct
import threading
import time
import weakref
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

from hocket.errors import JobError
from hocket.messages import HEADER, MOST_BODY, MOST_HEAD, Message, begin, read_head, read_header

_AT_ONCE = 64  # parts of a body in one system call
_TLS_CHUNK = 1 << 18
_LONG = 1 << 16
_FIRST = 1 << 20  # bytes for which memory is taken at first
_LAST = struct.Struct("52xII")  # in Linux's struct tcp_info: milliseconds since data and an acknowledgement came


class Closed(JobError):
    """The other end has closed the connection, or it broke."""


class Bell:
    """Wakes a thread that waits at a connection (see ``Wire.wait``). Any thread may ring."""

    def __init__(self) -> None:
        self._ear, self._hammer = socket.socketpair()
        self._ear.setblocking(False)
        self._hammer.setblocking(False)

    def fileno(self) -> int:
        return self._ear.fileno()

    def ring(self) -> None:
        """Wake the thread, now or when it comes to wait."""
        with contextlib.suppress(OSError):  # the bell rings already, or is closed
            self._hammer.send(b"!")

    def calm(self) -> None:
        """Ring no longer."""
        with contextlib.suppress(OSError):
            self._ear.recv(1 << 16)

    def close(self) -> None:
        self._ear.close()
        self._hammer.close()


@dataclass
class Wire:
    """One end of a connection.

    Threads may use it and close it at the same time. Its descriptor is given back when the last of them is out of its
    call: OpenSSL still sends an alert when it sees the end of a connection, and if the descriptor's number had another
    file by then, these 24 bytes would go into that file.

    Args:
        connection: A blocking socket over which the secret was proved, with or without a timeout.
        most_head: Bytes of a head beyond which a message is refused.
        most_body: Bytes of a body beyond which a message is refused.
    """

    connection: socket.socket
    most_head: int = MOST_HEAD
    most_body: int = MOST_BODY
    sent: int = field(default=0, init=False)
    received: int = field(default=0, init=False)
    _lock: Any = field(default_factory=threading.RLock, init=False, repr=False)
    _users: int = field(default=0, init=False)  # calls that are under way
    _is_closed: bool = field(default=False, init=False)

    def __post_init__(self) -> None:
        keep_from_children(self.connection)

    def send(
        self,
        kind: int,
        sequence: int,
        head: dict[str, Any],
        parts: Sequence[memoryview] = (),
        generation: int = 0,
    ) -> None:
        """Send a message; blocks until the system has taken all of it.

        ``generation`` is that of the job's membership, where the message holds for one of them only.

        Raises:
            Closed: the connection broke.
            WireError: the message is too long; nothing was sent.
            TimeoutError: the timeout passed before all was taken; the connection is of no use any more.
        """
        length = sum(part.nbytes for part in parts)
        start = begin(kind, sequence, head, length, generation, self.most_head, self.most_body)
        with self._use():
            self._send_all([memoryview(start), *parts])
        self.sent += len(start) + length

    def receive(self) -> Message:
        """The next message, without its body; blocks until there is one.

        Raises:
            Closed: the other end has gone, or the connection broke.
            WireError: what came is no message.
            TimeoutError: nothing, or only a part of a message, came within the timeout.
        """
        kind, generation, sequence, head, body = read_header(self._receive(HEADER.size), self.most_head, self.most_body)
        return Message(kind, generation, sequence, read_head(self._receive(head)), body)

    def receive_into(self, parts: Sequence[memoryview]) -> None:
        """The body of the message that was received last, which must be as long as ``parts`` together."""
        for part in parts:
            self._fill(part.cast("B"))

    def receive_bytes(self, count: int) -> bytes:
        """The body of the message that was received last, as bytes."""
        return self._receive(count)

    def wait(self, bell: Bell | None, seconds: float) -> bool:
        """Wait for bytes, for ``bell``, or until ``seconds`` have passed; returns whether bytes have come.

        Raises:
            Closed: the connection was closed here.
        """
        with self._use():
            if isinstance(self.connection, ssl.SSLSocket) and self.connection.pending():
                return True
            poller = select.poll()
            poller.register(self.connection, select.POLLIN)
            if bell is not None:
                poller.register(bell, select.POLLIN)
            found = [descriptor for descriptor, _ in poller.poll(seconds * 1000)]
            if bell is not None and bell.fileno() in found:
                bell.calm()
            return self.connection.fileno() in found

    def has_ended(self) -> bool:
        """Whether the other end has closed the connection, or it broke; there may be bytes left to receive."""
        try:
            with self._use():
                poller = select.poll()
                poller.register(self.connection, select.POLLRDHUP if hasattr(select, "POLLRDHUP") else 0)
                return bool(poller.poll(0))
        except Closed:
            return True

    def silence(self) -> float:
        """Seconds since the kernel of the other host has answered, whether or not the process there is busy."""
        if self.is_local or not hasattr(socket, "TCP_INFO"):
            return 0.0
        try:
            with self._use():
                raw = self.connection.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, _LAST.size)
        except Closed:
            return 0.0
        return float(min(_LAST.unpack(raw))) / 1000

    @property
    def is_local(self) -> bool:
        """Whether both ends are on this host, and memory can be shared."""
        return self.connection.family == socket.AF_UNIX

    def close(self) -> None:
        """End the connection; a thread that waits at it is woken, and closes it on the way out."""
        with self._lock:
            self._is_closed = True
            hang_up(self.connection)
            if not self._users:
                self.connection.close()

    @contextlib.contextmanager
    def _use(self) -> Iterator[None]:
        """Keep the connection open inside this context, for one call."""
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
            take_off(views, self.connection.sendmsg(views[:_AT_ONCE]))

    def _receive(self, count: int) -> bytes:
        """Receive ``count`` bytes; memory is taken as bytes come, and not because a peer announces them."""
        data = bytearray()
        while len(data) < count:
            part = bytearray(min(count - len(data), max(_FIRST, len(data))))
            self._fill(memoryview(part))
            data += part
        return bytes(data)

    def _fill(self, view: memoryview) -> None:
        done = 0
        # The kernel fills the whole of a long part by itself, while other threads of this process run.
        is_long = view.nbytes > _LONG and not isinstance(self.connection, ssl.SSLSocket)
        flags = socket.MSG_WAITALL if is_long else 0
        with self._use():
            while done < view.nbytes:
                count = self.connection.recv_into(view[done:], 0, flags)
                if not count:
                    raise Closed("the other end has closed the connection")
                done += count
                self.received += count


def take_off(views: list[memoryview], count: int) -> None:
    """Remove the first ``count`` bytes."""
    while views and count >= views[0].nbytes:
        count -= views.pop(0).nbytes
    if count:
        views[0] = views[0][count:]


def hang_up(connection: socket.socket) -> None:
    """End a connection, so that a thread that waits at it is woken."""
    with contextlib.suppress(OSError):
        # Not the method of a TLS socket, which would let that thread go on without encryption.
        socket.socket.shutdown(connection, socket.SHUT_RDWR)


def until(deadline: float) -> float:
    """Seconds for a socket's timeout until the monotonic time ``deadline``; a little more than 0 if that has passed."""
    return max(deadline - time.monotonic(), 0.001)


_of_this_process: weakref.WeakSet[socket.socket] = weakref.WeakSet()


def keep_from_children(connection: socket.socket) -> None:
    """Have a forked child close its copy, so that the end of this process is noticed without that of its child."""
    _of_this_process.add(connection)


def _close_all() -> None:
    for connection in list(_of_this_process):
        connection.close()


os.register_at_fork(after_in_child=_close_all)
