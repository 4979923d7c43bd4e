"""Two ends of a connection prove to each other that they know the job's secret, without telling it.

Each sends a random challenge and answers with a keyed hash of both challenges, of who the two are, and of which end it
is: an answer that one server gives to a stranger is of no use to the stranger at another one. Nothing longer than 128
bytes is read before that.
"""

from __future__ import annotations

import hmac
import secrets
import socket
import struct
import time

from hocket.errors import JobError

_CHALLENGE = 32
_NAME = struct.Struct("!I")
CHALLENGE, ANSWER = _NAME.size + _CHALLENGE, 32
"""Bytes of a challenge, with the name of who sends it, and of an answer."""

_ALERT = b"\x15\x03"  # the first bytes of an alert of TLS


class NotProved(JobError):
    """The other end is not of this job; to try again is of no use."""


class Proof:
    """One end's part in the proof, whatever carries the bytes; both ends make one.

    Args:
        secret: The secret of the job.
        name: The number of this end.
        binding: What both ends must see alike of the connection: with TLS, the server's certificate.
        accepts: Whether this end has accepted the connection; the other one has made it.

    Attributes:
        challenge: What this end sends first.
    """

    def __init__(self, secret: bytes, name: int, binding: bytes = b"", *, accepts: bool) -> None:
        self._secret, self._name, self._binding, self._accepts = secret, name, binding, accepts
        self.challenge = _NAME.pack(name) + secrets.token_bytes(_CHALLENGE)

    def answer(self, theirs: bytes) -> bytes:
        """What this end sends when it has the other end's challenge."""
        return self._hash(self._accepts, self.challenge, theirs)

    def check(self, theirs: bytes, answer: bytes) -> int:
        """The number of the other end, which has sent the challenge ``theirs``, and then ``answer``.

        Raises:
            NotProved: the other end does not know the secret.
        """
        if not hmac.compare_digest(answer, self._hash(not self._accepts, theirs, self.challenge)):
            raise NotProved("a peer did not know this job's secret: another program has connected to its port")
        (peer,) = _NAME.unpack_from(theirs)
        if peer == self._name:
            raise NotProved("this process has connected to itself")
        return int(peer)

    def _hash(self, accepts: bool, own: bytes, other: bytes) -> bytes:
        role = b"accepts" if accepts else b"connects"
        return hmac.digest(self._secret, role + own + other + self._binding, "sha256")


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
    proof = Proof(secret, name, binding, accepts=accepts)
    connection.sendall(proof.challenge)
    theirs = receive(connection, CHALLENGE, deadline)
    connection.sendall(proof.answer(theirs))
    peer = proof.check(theirs, receive(connection, ANSWER, deadline))
    connection.settimeout(timeout)
    return peer


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
