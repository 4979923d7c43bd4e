"""The two-way line between the launcher and an agent: messages over two pipes or a socket, on which nobody blocks.

Messages have the one format of the job (see ``transport.wire``); the head of each says its ``kind`` in words. An agent
writes a marker before its first message, so that whatever a shell prints at login is not taken for one.
"""

from __future__ import annotations

import os
import socket
import ssl
import threading
from typing import Any, NamedTuple

from hocket import messages
from hocket.errors import JobError

MARKER = b"\n\0hocket agent, messages from here\0\n"
MOST = 1 << 20  # bytes of a head, and of a body
_KIND = 0  # of every message here: the head says more
_READ = 1 << 18
_WANTS = (BlockingIOError, ssl.SSLWantReadError, ssl.SSLWantWriteError)


class MessagePipe:
    """One end of the line; it owns both descriptors. Without them, what is sent waits until it is connected.

    Attributes:
        reader: The descriptor to wait on for something to come.
        writer: The descriptor to wait on while there is something ``pending``.
        is_open: Whether the other end is there, as far as is known.
    """

    def __init__(self, reader: int = -1, writer: int = -1) -> None:
        self.reader, self.writer = reader, writer
        self.is_open = True
        self._connection: socket.socket | None = None
        self._decoder = messages.Decoder(MOST, MOST)
        self._out = bytearray()
        self._own = {reader, writer} - {-1}
        self._lock = threading.Lock()  # the launcher says from a thread that it is alive
        for descriptor in self._own:
            os.set_blocking(descriptor, False)

    def connect(self, connection: socket.socket) -> None:
        """The other end is at ``connection``, which this end owns from now on."""
        connection.setblocking(False)
        with self._lock:
            self._connection, self.reader = connection, connection.fileno()
            self.writer = os.dup(self.reader)  # who waits for room waits for it under another number
            self._own.add(self.writer)
        self.flush()

    @property
    def pending(self) -> int:
        """How many bytes wait for room."""
        return len(self._out)

    def send(self, kind: str, body: bytes = b"", **head: Any) -> None:
        """Send a frame, now or when there is room; to an end that is gone, nothing."""
        self.send_raw(encode(kind, body, **head))

    def send_raw(self, data: bytes) -> None:
        """Send bytes that are no frame, or one that is encoded."""
        with self._lock:
            self._out += data
        self.flush()

    def flush(self) -> None:
        """Write what is pending, as far as there is room."""
        with self._lock:
            try:
                while self._out and self.is_open and self.writer >= 0:
                    sends = self._connection.send if self._connection is not None else self._write
                    del self._out[: sends(self._out)]
            except _WANTS:
                pass
            except OSError:
                self._out.clear()  # whether all is over, the reader will tell

    def receive(self) -> list[Frame]:
        """The frames that have come.

        Raises:
            JobError: what came is no frame.
        """
        data = self.read()
        try:
            return self.decode(data)
        except JobError:
            self.is_open = False
            raise

    def read(self) -> bytes:
        """The bytes that have come, at most some 256 KiB of them; notices the end."""
        try:
            data = os.read(self.reader, _READ) if self._connection is None else self._receive(self._connection)
        except _WANTS:
            return b""
        except OSError:
            data = b""
        self.is_open = self.is_open and bool(data)
        return data

    def decode(self, data: bytes) -> list[Frame]:
        """The frames that ``data``, which was read by hand, completes."""
        return [_frame(message, body) for message, body in self._decoder.feed(data)]

    def close(self) -> None:
        """Let go of both descriptors; the other end sees the end. May be called twice."""
        with self._lock:
            self.is_open = False
            self._out.clear()
            while self._own:  # a number that was closed may be another one's by now
                os.close(self._own.pop())
            if self._connection is not None:
                self._connection.close()

    def _write(self, data: bytearray) -> int:
        return os.write(self.writer, data)

    def _receive(self, connection: socket.socket) -> bytes:
        with self._lock:  # OpenSSL reads and writes one at a time
            data = connection.recv(_READ)
            while isinstance(connection, ssl.SSLSocket) and (left := connection.pending()):
                data += connection.recv(left)  # what is decrypted already makes no descriptor readable
            return data


class Frame(NamedTuple):
    """One message: what it says, and bytes that belong to it."""

    head: dict[str, Any]
    body: bytes

    @property
    def kind(self) -> str:
        return str(self.head["kind"])


def encode(kind: str, body: bytes = b"", **head: Any) -> bytes:
    """The bytes of one frame; ``head`` is plain data."""
    return messages.encode(_KIND, {"kind": kind, **head}, body, MOST, MOST)


def _frame(message: messages.Message, body: bytes) -> Frame:
    if message.kind != _KIND or not isinstance(message.head.get("kind"), str):
        raise messages.WireError("a message without a kind came")
    return Frame(message.head, body)
