"""Measures the network between two hosts: round trips of small messages, and how much passes in each direction.

Who listens does so for the moment of the measurement, and takes orders only from those who know the secret; both ends
prove it. Nothing is kept of what is sent, and every connection has an end.
"""

from __future__ import annotations

import contextlib
import select
import socket
import struct
import threading
import time
from typing import Any

from hocket.errors import JobError
from hocket.transport.proof import prove, receive

_ASKS, _ANSWERS = 0, 1  # the numbers of the two ends
_ORDER = struct.Struct("!cd")  # what is wanted, and for how many seconds
_COUNTED = struct.Struct("!Qd")  # bytes, and seconds
_SMALL = 64  # bytes of a message that goes to and fro
_BLOCK = bytes(1 << 18)
_MOST_SECONDS = 2.0  # most seconds of one order
_PATIENCE = 3.0  # seconds to wait for an answer
_MOST_TRIPS = 500
_MOST_STRANGERS = 8  # connections at once
_FIRST = 0.25  # the part of the time that is not counted: buckets of shapers are full, windows are small


class Meter:
    """Answers measurements on one address from threads of its own, until it is closed.

    Attributes:
        port: The port on which the meter listens.
    """

    def __init__(self, secret: bytes, address: str) -> None:
        self._secret = secret
        family = socket.AF_INET6 if ":" in address else socket.AF_INET
        self._server = socket.create_server((address, 0), family=family, backlog=16)
        self._server.settimeout(0.1)
        self.port = int(self._server.getsockname()[1])
        self._is_closed = threading.Event()
        self._threads: list[threading.Thread] = []
        self._accepting = threading.Thread(target=self._accept, name="hocket-meter")
        self._accepting.start()

    def close(self) -> None:
        """Listen no longer; its threads have ended then, within a few seconds."""
        self._is_closed.set()
        self._accepting.join()
        self._server.close()
        for thread in self._threads:
            thread.join()

    def _accept(self) -> None:
        while not self._is_closed.is_set():
            self._threads = [thread for thread in self._threads if thread.is_alive()]
            with contextlib.suppress(OSError):
                connection = self._server.accept()[0]
                if len(self._threads) >= _MOST_STRANGERS:
                    connection.close()
                    continue
                self._threads.append(threading.Thread(target=self._serve, args=(connection,), name="hocket-meter"))
                self._threads[-1].start()

    def _serve(self, connection: socket.socket) -> None:
        with connection, contextlib.suppress(OSError, JobError):
            _prepare(connection)
            prove(connection, self._secret, _ANSWERS, accepts=True)
            self._obey(connection)

    def _obey(self, connection: socket.socket) -> None:
        """Many small messages, or one stream."""
        for _ in range(_MOST_TRIPS):
            kind, wanted = _ORDER.unpack(_read(connection, _ORDER.size))
            seconds = min(max(float(wanted), 0.0), _MOST_SECONDS)
            if kind == b"E":
                connection.sendall(_read(connection, _SMALL))
            elif kind == b"S":
                connection.sendall(_COUNTED.pack(*_count(connection, seconds)))
                _count(connection, _PATIENCE)  # what is under way, until the other end has heard and hung up
                return
            else:
                _stream(connection, seconds)
                return


def measure(address: str, port: int, secret: bytes, seconds: float) -> dict[str, Any]:
    """Measure the way to the ``Meter`` at ``address``; blocks for about four times ``seconds``.

    Returns:
        Latencies in seconds (``median``, ``p90``, of so many ``trips``), and bytes per second ``there`` and ``back``.

    Raises:
        OSError: it cannot be reached, or is silent.
        JobError: it hung up, or does not know the secret.
    """
    with _connect(address, port, secret) as connection:
        times = _round_trips(connection, min(seconds, 0.3))
    with _connect(address, port, secret) as connection:  # one that is full of bytes is of no use for anything else
        connection.sendall(_ORDER.pack(b"S", seconds))
        _stream(connection, seconds + _PATIENCE)
        there, took = _COUNTED.unpack(_read(connection, _COUNTED.size))
    with _connect(address, port, secret) as connection:
        connection.sendall(_ORDER.pack(b"F", min(seconds + 0.5, _MOST_SECONDS)))
        back, waited = _count(connection, seconds)
    times.sort()
    return {
        "median": times[len(times) // 2],
        "p90": times[min(len(times) - 1, len(times) * 9 // 10)],
        "trips": len(times),
        "there": there / took if took > 0 else 0.0,
        "back": back / waited if waited > 0 else 0.0,
    }


def _connect(address: str, port: int, secret: bytes) -> socket.socket:
    connection = socket.create_connection((address, port), _PATIENCE)
    try:
        _prepare(connection)
        prove(connection, secret, _ASKS, accepts=False)
    except BaseException:
        connection.close()
        raise
    return connection


def _prepare(connection: socket.socket) -> None:
    connection.settimeout(_PATIENCE)
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    # What is still to be sent when a stream is over must not get into the way of the next one.
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))


def _round_trips(connection: socket.socket, seconds: float) -> list[float]:
    times: list[float] = []
    message = _ORDER.pack(b"E", 0) + bytes(_SMALL)
    deadline = time.perf_counter() + seconds
    while len(times) < _MOST_TRIPS and (len(times) < 3 or time.perf_counter() < deadline):
        begun = time.perf_counter()
        connection.sendall(message)
        _read(connection, _SMALL)
        times.append(time.perf_counter() - begun)
    return times[1:]  # the first one wakes everybody up


def _stream(connection: socket.socket, seconds: float) -> None:
    """Send as much as passes until the other end says something, or hangs up, or the time is over."""
    deadline = time.monotonic() + seconds
    connection.setblocking(False)
    try:
        while (left := deadline - time.monotonic()) > 0:
            heard, free, _ = select.select([connection], [connection], [], left)
            if heard:
                break
            if free:
                with contextlib.suppress(BlockingIOError):
                    connection.send(_BLOCK)
    finally:
        connection.settimeout(_PATIENCE)


def _count(connection: socket.socket, seconds: float) -> tuple[int, float]:
    """The bytes that come within ``seconds`` of the first, a part at the beginning left out, and in how long."""
    block = bytearray(len(_BLOCK))
    if not connection.recv_into(block):
        raise JobError("the other end hung up")
    begun = time.perf_counter()
    since, end, count, last = begun + _FIRST * seconds, begun + seconds, 0, begun
    while (now := time.perf_counter()) < end:
        connection.settimeout(max(end - now, 0.001))
        try:
            got = connection.recv_into(block)
        except TimeoutError:
            break
        if not got:
            break
        last = time.perf_counter()
        if last > since:
            count += got
    connection.settimeout(_PATIENCE)
    return count, max(end, last) - since


def _read(connection: socket.socket, size: int) -> bytes:
    """Exactly so many bytes, in all within the patience that one has with an answer."""
    data = receive(connection, size, time.monotonic() + _PATIENCE)
    connection.settimeout(_PATIENCE)
    return data
