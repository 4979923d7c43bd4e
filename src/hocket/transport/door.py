"""Doors at which servers let workers in: only peers that prove the job's secret, and strangers cannot block them."""

from __future__ import annotations

import contextlib
import os
import socket
import ssl
import struct
import threading
import time
from collections.abc import Callable

from hocket.errors import JobError
from hocket.transport import tls
from hocket.transport.proof import NotProved, prove
from hocket.transport.wire import Wire, hang_up, keep_from_children

_PROOF = 5.0  # seconds that a stranger has to prove the secret
_STRANGERS = 128  # most strangers at once; if more come, the one that has been here longest has to go
_RETRY = 0.02
_SILENCE = 10_000  # milliseconds of unanswered bytes after which a connection is given up
_RTO_MAX_MS = 44  # TCP_RTO_MAX_MS, since Linux 6.15
_PEER = struct.Struct("iII")  # pid, uid, gid of SO_PEERCRED

LetIn = Callable[[Wire, int], bool | None]
"""Talks with a peer that has proved who it is (by its number), until the end of the connection.

It may return True before that: then somebody else talks with the peer, and closes the wire.
"""


class Door:
    """Listens in a thread, and has one more thread for each peer.

    Args:
        listener: A listening socket; closed with the door.
        secret: The secret of the job.
        name: The number of this end in proofs.
        let_in: Talks with each peer, in a thread of its own.
        refuse: Is told why somebody was turned away, in a few words that are always the same.
        context: The context for TLS, if there is any.
        binding: What stands for the certificate of ``context`` in proofs.
    """

    def __init__(
        self,
        listener: socket.socket,
        secret: bytes,
        name: int,
        let_in: LetIn,
        refuse: Callable[[str], None],
        context: ssl.SSLContext | None = None,
        binding: bytes = b"",
    ) -> None:
        self._listener, self._secret, self._name = listener, secret, name
        self._let_in, self._refuse, self._context, self._binding = let_in, refuse, context, binding
        self._strangers: dict[socket.socket, None] = {}
        self._lock = threading.Lock()
        self._is_closed = False
        keep_from_children(listener)
        self._thread = threading.Thread(target=self._listen, daemon=True, name="hocket-door")
        self._thread.start()

    @property
    def port(self) -> int:
        """The port on which the door listens."""
        return int(self._listener.getsockname()[1])

    def close(self) -> None:
        """Close the door: let no more peers in."""
        self._is_closed = True
        with contextlib.suppress(OSError):
            self._listener.shutdown(socket.SHUT_RDWR)
        self._thread.join(_PROOF)  # else it could accept at a descriptor that is used again
        self._listener.close()
        with self._lock:
            for connection in self._strangers:
                hang_up(connection)

    def _listen(self) -> None:
        while not self._is_closed:
            try:
                connection, _ = self._listener.accept()
            except OSError:
                if not self._is_closed:
                    time.sleep(_RETRY)  # no descriptors left, perhaps
                continue
            try:
                connection.settimeout(_PROOF)
                if self._context is not None:
                    connection = tls.wrap_server(connection, self._context)
                self._note(connection)
                threading.Thread(target=self._meet, args=(connection,), daemon=True, name="hocket-peer").start()
            except (OSError, RuntimeError):  # the peer has gone, or this process has too many threads
                self._forget(connection)
                connection.close()

    def _note(self, connection: socket.socket) -> None:
        with self._lock:
            if len(self._strangers) >= _STRANGERS:
                oldest = next(iter(self._strangers))
                hang_up(oldest)
                self._strangers.pop(oldest)
            self._strangers[connection] = None

    def _meet(self, connection: socket.socket) -> None:
        try:
            if connection.family == socket.AF_UNIX and _uid(connection) != os.geteuid():
                raise JobError("another user")
            if isinstance(connection, ssl.SSLSocket):
                tls.shake_hands(connection)
            peer = prove(connection, self._secret, self._name, self._binding, accepts=True)
            prepare(connection)
        except (JobError, OSError, ValueError):
            self._refuse("without the job's secret")
            connection.close()
            return
        finally:
            self._forget(connection)
        wire, is_kept = Wire(connection), None
        try:
            is_kept = self._let_in(wire, peer)
        finally:
            if not is_kept:
                wire.close()

    def _forget(self, connection: socket.socket) -> None:
        with self._lock:
            self._strangers.pop(connection, None)


def listen_here(name: str) -> socket.socket:
    """A listening socket for this host alone: it has no file, and ends with its process."""
    listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    try:
        listener.bind(f"\0{name}")
    except OSError as error:
        listener.close()
        raise JobError(
            f"the socket {name} is already taken ({error.strerror}): is another such server alive?"
        ) from error
    listener.listen(1024)
    return listener


def listen(address: str, port: int) -> socket.socket:
    """A listening TCP socket; port 0 is any that is free."""
    family = socket.AF_INET6 if ":" in address else socket.AF_INET
    try:
        return socket.create_server((address, port), family=family, backlog=1024)
    except OSError as error:
        raise JobError(f"a server cannot listen on {address}:{port} ({error.strerror})") from error


def knock_here(name: str, secret: bytes, number: int, deadline: float, *, waits: bool = True) -> Wire:
    """Connect to a server on this host, as peer ``number``; tries until the monotonic time ``deadline``.

    Without ``waits`` it is over at once if nobody listens.
    """

    def make() -> tuple[socket.socket, bytes]:
        connection = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        connection.settimeout(_some(deadline))
        try:
            connection.connect(f"\0{name}")
            if _uid(connection) != os.geteuid():
                raise NotProved(f"the socket {name} of this job belongs to another user; run the job again")
        except BaseException:
            connection.close()
            raise
        return connection, b""

    try:
        return _introduce(make, secret, number, deadline, waits=waits)
    except NotProved:
        raise
    except (OSError, JobError) as error:
        raise JobError(f"no server answers on this host ({error}): see its output for the reason") from None


def knock(
    address: str, port: int, secret: bytes, number: int, deadline: float, *, encrypted: bool, waits: bool = True
) -> Wire:
    """Connect to a server over TCP, as peer ``number``; tries until the monotonic time ``deadline``.

    Without ``waits`` it is over at once if nobody listens.

    Raises:
        NotProved: the process that answers is not of this job, or TLS is not the same at both ends.
        JobError: nobody was there in time.
    """

    def make() -> tuple[socket.socket, bytes]:
        connection = socket.create_connection((address, port), timeout=_some(deadline))
        return tls.wrap_client(connection) if encrypted else (connection, b"")

    try:
        return _introduce(make, secret, number, deadline, waits=waits)
    except NotProved as error:
        raise NotProved(f"the server at {address}:{port}: {error}") from None
    except (OSError, JobError) as error:
        raise JobError(
            f"the server at {address}:{port} cannot be reached ({error}): see its output, or open the firewall "
            "between the hosts"
        ) from None


def can_be_reached(address: str, port: int, seconds: float) -> bool:
    """Whether the host at ``address`` answers, be it that nobody listens there."""
    try:
        socket.create_connection((address, port), timeout=seconds).close()
    except ConnectionRefusedError:
        return True
    except OSError:
        return False
    return True


def prepare(connection: socket.socket) -> None:
    """Set up a connection for long messages, with long silence between them, to a host that may be cut off."""
    connection.settimeout(None)
    if connection.family == socket.AF_UNIX:
        return
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    # The kernels ask each other every second, so that ``Wire.silence`` is known of processes that are busy.
    for name, value in (("TCP_KEEPIDLE", 1), ("TCP_KEEPINTVL", 1), ("TCP_KEEPCNT", 9), ("TCP_USER_TIMEOUT", _SILENCE)):
        if hasattr(socket, name):
            connection.setsockopt(socket.IPPROTO_TCP, getattr(socket, name), value)
    with contextlib.suppress(OSError):  # a link that is up again is noticed within a second
        connection.setsockopt(socket.IPPROTO_TCP, _RTO_MAX_MS, 1000)


def is_loopback(address: str) -> bool:
    """Whether only this host reaches ``address``."""
    return address.startswith("127.") or address in ("::1", "localhost")


def _introduce(
    make: Callable[[], tuple[socket.socket, bytes]], secret: bytes, number: int, deadline: float, *, waits: bool
) -> Wire:
    """Make a connection and prove the secret; tries until ``deadline``, unless that is of no use."""
    while True:
        try:
            connection, binding = make()
            try:
                connection.settimeout(_some(deadline))
                prove(connection, secret, number, binding, accepts=False)
                prepare(connection)
                return Wire(connection)
            except BaseException:
                connection.close()
                raise
        except NotProved:
            raise
        except (OSError, JobError) as error:
            if time.monotonic() > deadline or (isinstance(error, ConnectionRefusedError) and not waits):
                raise
            time.sleep(_RETRY)


def _some(deadline: float) -> float:
    return max(0.1, min(_PROOF, deadline - time.monotonic()))


def _uid(connection: socket.socket) -> int:
    return int(_PEER.unpack(connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _PEER.size))[1])
