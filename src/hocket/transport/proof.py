"""Two ends of a connection prove to each other that they know the job's secret, without telling it.

Each sends a random challenge and answers that of the other with a keyed hash of it and of who it says it is.
Nothing longer than 128 bytes is read before that.
"""

from __future__ import annotations

import hashlib
import hmac
import secrets
import socket
import struct

from hocket.errors import JobError

_CHALLENGE = 32
_NAME = struct.Struct("!I")


def prove(connection: socket.socket, secret: bytes, name: int, binding: bytes = b"") -> int:
    """Say who this end is, prove it, and have the other end prove it; both ends call it.

    Args:
        connection: Just made, with a timeout.
        secret: The job's.
        name: The number of this end.
        binding: What both ends must see alike of the connection: with TLS, the server's certificate.

    Returns:
        The number of the other end.

    Raises:
        JobError: the other end does not know the secret, or went away.
    """
    mine = secrets.token_bytes(_CHALLENGE)
    connection.sendall(_NAME.pack(name) + mine)
    theirs = receive(connection, _NAME.size + _CHALLENGE)
    (peer,) = _NAME.unpack_from(theirs)
    connection.sendall(_answer(secret, name, theirs[_NAME.size :] + binding))
    if not hmac.compare_digest(receive(connection, 32), _answer(secret, peer, mine + binding)):
        raise JobError("a peer did not know this job's secret: another program has connected to its port")
    if peer == name:
        raise JobError("this process has connected to itself")
    return int(peer)


def _answer(secret: bytes, name: int, challenge: bytes) -> bytes:
    return hmac.new(secret, _NAME.pack(name) + challenge, hashlib.sha256).digest()


def receive(connection: socket.socket, count: int) -> bytes:
    """Exactly ``count`` bytes."""
    data = b""
    while len(data) < count:
        part = connection.recv(count - len(data))
        if not part:
            raise JobError("a peer closed its connection during start-up: see its output for the reason")
        data += part
    return data
