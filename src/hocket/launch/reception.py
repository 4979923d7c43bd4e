"""Where agents come in that dial: a door for those who prove the job's secret, and a queue from its threads."""

from __future__ import annotations

import queue
import socket
from typing import Any, NamedTuple

from hocket.errors import JobError
from hocket.transport import tls
from hocket.transport.door import Door
from hocket.transport.wire import Bell, Wire

COMES = 1
"""The kind of the message with which an agent says who it is; then it talks frames (see ``channel``)."""

LAUNCHER = (1 << 32) - 2
"""The number of the launcher in proofs; an agent has that of its link."""

_HELLO = 5.0  # seconds that an agent has to say who it is


class Arrival(NamedTuple):
    """An agent that has proved the secret: its number, what it has said of itself, and the connection to it."""

    number: int
    said: dict[str, Any]
    connection: socket.socket


class Reception:
    """Lets agents in until it is closed.

    Args:
        listener: A listening socket; it is closed with the reception.
        secret: What agents have to prove.
        encrypted: Whether they talk over TLS.
    """

    def __init__(self, listener: socket.socket, secret: bytes, *, encrypted: bool) -> None:
        self.secret, self.encrypted = secret, encrypted
        self._bell = Bell()
        self._arrived: queue.SimpleQueue[Arrival] = queue.SimpleQueue()
        self._is_closed = False
        context, binding = tls.make_context() if encrypted else (None, b"")
        self._door = Door(listener, secret, LAUNCHER, self._let_in, lambda _: None, context, binding)

    @property
    def port(self) -> int:
        """The port at which agents dial."""
        return self._door.port

    def fileno(self) -> int:
        """Readable when somebody has come."""
        return self._bell.fileno()

    def take(self) -> list[Arrival]:
        """Those that have come since the last call; who takes them closes their connections."""
        self._bell.calm()
        found = []
        while not self._arrived.empty():
            found.append(self._arrived.get())
        return found

    def close(self) -> None:
        """Let nobody in any more; may be called twice."""
        if self._is_closed:
            return
        self._is_closed = True
        self._door.close()
        for arrival in self.take():
            arrival.connection.close()
        self._bell.close()

    def _let_in(self, wire: Wire, number: int) -> bool:
        """From the thread of one agent: another one, that of the launcher, talks with it afterwards."""
        wire.connection.settimeout(_HELLO)
        try:
            message = wire.receive()
        except (JobError, TimeoutError):
            return False
        if message.kind != COMES or message.body:
            return False
        self._arrived.put(Arrival(number, message.head, wire.connection))
        self._bell.ring()
        return True
