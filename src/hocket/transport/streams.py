"""The two ends of a connection that carries messages one way, where nobody waits: each does what it can, and says so.

Whoever waits does so for all connections at once, in one thread (see ``member_links``): while a message is awaited from
one member, what others are to get goes on.
"""

from __future__ import annotations

import contextlib
import select
import socket
import ssl
from collections.abc import Iterator

from hocket.errors import JobError
from hocket.messages import HEADER, begin, read_header
from hocket.transport.wire import Closed, Wire, take_off

DATA = 3  # the kind of message that a stream carries
_MOST_HEAD, _MOST_BODY = 0, 1 << 40
_PARTS = 64  # in one system call
_TLS_CHUNK = 1 << 18
_ONE_RECORD = 1 << 14  # bytes that TLS sends as one record


class Outgoing:
    """The end that sends; messages have numbers from 0.

    Args:
        wire: The connection, which does not block from now on.
    """

    def __init__(self, wire: Wire) -> None:
        self.wire = wire
        self._connection = wire.connection
        self._connection.setblocking(False)
        self._is_encrypted = isinstance(self._connection, ssl.SSLSocket)
        self._number = 0
        self._left: list[memoryview] = []
        with contextlib.suppress(OSError):
            # A member that computes for long, and takes in nothing meanwhile, is alive. If its host is not, the
            # connection in the other direction tells.
            self._connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, 0)

    def send(self, views: list[memoryview]) -> bool:
        """Send a message, as far as that goes without waiting; returns whether nothing is left.

        Raises:
            Closed: the connection broke.
        """
        nbytes = sum(view.nbytes for view in views)
        start = begin(DATA, self._number, {}, nbytes, 0, _MOST_HEAD, _MOST_BODY)
        self._number += 1
        if self._is_encrypted and nbytes <= _ONE_RECORD:
            self._left.append(memoryview(b"".join((start, *views))))
        else:
            self._left += [memoryview(start), *views]
        return self.push()

    def push(self) -> bool:
        """Send more of what is left; returns whether nothing is.

        Raises:
            Closed: the connection broke.
        """
        with _broken(), contextlib.suppress(BlockingIOError, ssl.SSLWantWriteError, ssl.SSLWantReadError):
            while self._left:
                if self._is_encrypted:  # after a refusal, OpenSSL wants to be given the same bytes again
                    take_off(self._left, self._connection.send(self._left[0][:_TLS_CHUNK]))
                else:
                    take_off(self._left, self._connection.sendmsg(self._left[:_PARTS]))
        return not self._left


class Incoming:
    """The end that receives; each message has to be the one that is expected.

    Args:
        wire: The connection, which does not block from now on.
        source: Whose messages come, for errors.

    Attributes:
        is_wrong: Whether something else has come than was expected, so that nothing more can be received.
    """

    def __init__(self, wire: Wire, source: str) -> None:
        self.wire, self.events, self.is_wrong = wire, select.POLLIN, False
        self._connection, self._source = wire.connection, source
        self._connection.setblocking(False)
        self._is_encrypted = isinstance(self._connection, ssl.SSLSocket)
        self._header = bytearray(HEADER.size)
        self._number = self._body = 0
        self._left: list[memoryview] = []
        self._bytes = 0

    def expect(self, views: list[memoryview]) -> None:
        """The next message is to fill ``views``."""
        self._body = sum(view.nbytes for view in views)
        self._bytes = HEADER.size + self._body
        self._left = [memoryview(self._header), *views]

    def take(self) -> bool:
        """Take in what is there of the message that is expected; returns whether it is complete.

        Raises:
            Closed: the connection broke.
            JobError: something else came.
        """
        self.events = select.POLLIN
        with _broken():
            try:
                while self._left:
                    asked = self._bytes
                    got = self._take_some()
                    if not got:
                        raise Closed("the other end has closed the connection")
                    self._note(got)
                    if got < asked and not self._is_encrypted and self._left:
                        break  # there is no more
            except (BlockingIOError, ssl.SSLWantReadError):
                pass
            except ssl.SSLWantWriteError:
                self.events = select.POLLOUT
        return not self._left

    def _take_some(self) -> int:
        if len(self._left) == 1 or self._is_encrypted:
            return self._connection.recv_into(self._left[0])
        return self._connection.recvmsg_into(self._left[:_PARTS])[0]

    def _note(self, count: int) -> None:
        is_header = self._bytes > self._body
        self._bytes -= count
        take_off(self._left, count)
        self.wire.received += count
        if not is_header or self._bytes > self._body:
            return
        self.is_wrong = True  # until it is known to be what was to come
        kind, generation, number, head, body = read_header(bytes(self._header), _MOST_HEAD, _MOST_BODY)
        if (kind, generation, number, head, body) != (DATA, 0, self._number, 0, self._body):
            raise JobError(
                f"{self._source} sent message {number} with {body:,} bytes, where message {self._number} with "
                f"{self._body:,} bytes was to come: please report this"
            )
        self.is_wrong = False
        self._number += 1


@contextlib.contextmanager
def _broken() -> Iterator[None]:
    """Errors of a connection become Closed."""
    try:
        yield
    except (BlockingIOError, ssl.SSLWantReadError, ssl.SSLWantWriteError):
        raise
    except (OSError, ValueError) as error:
        raise Closed(f"the connection broke: {error}") from error
