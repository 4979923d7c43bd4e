"""A connection of the watch to one other rank: lines of JSON, and how long its host has been silent."""

from __future__ import annotations

import contextlib
import json
import socket
import struct
import time
from typing import Any

_MOST = 1 << 20  # bytes of a line
_RTO_MAX_MS = 44  # TCP_RTO_MAX_MS, since Linux 6.15
_LAST_ACK = struct.Struct("56xI")  # of Linux's struct tcp_info: milliseconds since the last acknowledgement


class Peer:
    """The other end.

    Attributes:
        rank: Which one it is.
        gone: Why nothing can come from it any more, if so.
    """

    def __init__(self, connection: socket.socket, rank: int) -> None:
        self.rank, self.gone = rank, ""
        self._connection, self._rest, self._unsent, self._last = connection, b"", b"", b""
        self._sent: float | None = None
        connection.setblocking(False)
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        with contextlib.suppress(OSError):  # a link that is up again is noticed within a second
            connection.setsockopt(socket.IPPROTO_TCP, _RTO_MAX_MS, 1000)

    def fileno(self) -> int:
        return self._connection.fileno()

    def send(self, line: bytes) -> None:
        """Send a message, or keep for later what there is no room for.

        Of what has not changed since, only an empty line is sent: who is busy for hours cannot read it.
        """
        if line != self._last:
            self._unsent += line
        self._last = line
        self._unsent += b"\n"
        try:
            self._unsent = self._unsent[self._connection.send(self._unsent) :]
        except BlockingIOError:
            if len(self._unsent) > _MOST:
                self.gone = self.gone or "takes no messages"
        except OSError as error:
            self.gone = self.gone or _why(error)
        self._sent = self._sent or time.monotonic()

    def receive(self) -> list[dict[str, Any]]:
        """The messages that have come."""
        try:
            data = self._connection.recv(1 << 16)
        except BlockingIOError:
            return []
        except OSError as error:
            self.gone = self.gone or _why(error)
            return []
        if not data:
            self.gone = self.gone or "ended"
            return []
        *lines, self._rest = (self._rest + data).split(b"\n")
        if len(self._rest) > _MOST:
            self.gone = "sends nonsense"
            return []
        messages = []
        for line in lines:
            with contextlib.suppress(ValueError):
                messages.append(json.loads(line))
        return [message for message in messages if isinstance(message, dict)]

    def silence(self) -> float:
        """Seconds since the other host's kernel has answered, whether or not the process there is busy."""
        if self._sent is None or not hasattr(socket, "TCP_INFO"):
            return 0.0
        try:
            raw = self._connection.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, _LAST_ACK.size)
        except OSError:
            return 0.0
        (milliseconds,) = _LAST_ACK.unpack(raw)
        return float(min(milliseconds / 1000, time.monotonic() - self._sent))

    def close(self) -> None:
        self._connection.close()


def _why(error: OSError) -> str:
    return "ended" if isinstance(error, (ConnectionError, BrokenPipeError)) else f"cannot be reached ({error.strerror})"
