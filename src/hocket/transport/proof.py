"""Two ends of a connection prove to each other that they know the job's secret, without telling it.

Each sends a random challenge and answers with a keyed hash of both challenges, of who the two are, and of which end it
is: an answer that one server gives to a stranger is of no use to the stranger at another one. Nothing longer than 128
bytes is read before that.
"""

from __future__ import annotations

import hashlib
import hmac
import secrets
import socket
import struct
import time

from hocket.errors import JobError

_CHALLENGE = 32
_NAME = struct.Struct("!I")
_ALERT = b"\x15\x03"  # the first bytes of an alert of TLS


class NotProved(JobError):
    """The other end is not of this job; to try again is of no use."""


def prove(connection: socket.socket, secret: bytes, name: int, binding: bytes = b"", *, accepts: bool) -> int:
    """Say who this end is, prove the secret, and have the other end prove it; both ends call this.

    Args:
        connection: A new connection, whose timeout is for the whole proof.
        secret: The secret of the job.
        name: The number of this end.
        accepts: Whether this end has accepted the connection; the other one has made it.
        binding: What both ends must see alike of the connection: with TLS, the server's certificate.

    Returns:
        The number of the other end.

    Raises:
        NotProved: the other end does not know the secret.
        JobError: the other end went away.
        TimeoutError: the other end has not said enough in time.
    """
    timeout = connection.gettimeout()
    deadline = None if timeout is None else time.monotonic() + timeout
    mine = _NAME.pack(name) + secrets.token_bytes(_CHALLENGE)
    connection.sendall(mine)
    theirs = receive(connection, len(mine), deadline)
    connection.sendall(_answer(secret, accepts, mine, theirs, binding))
    if not hmac.compare_digest(receive(connection, 32, deadline), _answer(secret, not accepts, theirs, mine, binding)):
        raise NotProved("a peer did not know this job's secret: another program has connected to its port")
    connection.settimeout(timeout)
    (peer,) = _NAME.unpack_from(theirs)
    if peer == name:
        raise NotProved("this process has connected to itself")
    return int(peer)


def _answer(secret: bytes, accepts: bool, own: bytes, other: bytes, binding: bytes) -> bytes:
    role = b"accepts" if accepts else b"connects"
    return hmac.new(secret, role + own + other + binding, hashlib.sha256).digest()


def receive(connection: socket.socket, count: int, deadline: float | None = None) -> bytes:
    """Exactly ``count`` bytes, until the monotonic time ``deadline``."""
    data = b""
    while len(data) < count:
        if deadline is not None:
            connection.settimeout(max(deadline - time.monotonic(), 0.001))
        part = connection.recv(count - len(data))
        if not part and data.startswith(_ALERT):
            raise NotProved("the other end speaks TLS, and this one does not: is --tls the same on all hosts?")
        if not part:
            raise JobError("a peer closed its connection during start-up: see its output for the reason")
        data += part
    return data
