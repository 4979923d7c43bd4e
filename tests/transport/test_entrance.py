"""The connections of the watch: whoever belongs to the job gets in, and nobody else holds that up."""

import queue
import secrets
import socket
import threading
import time

import pytest

from hocket.errors import JobError
from hocket.transport import entrance

SECRET = secrets.token_bytes(32)


def accept(ports: "queue.Queue[int]", size: int, timeout: float) -> list[int]:
    def announce(address: str, port: int) -> None:
        for _ in range(size - 1):
            ports.put(port)

    deadline = time.monotonic() + timeout
    peers = entrance.accept("127.0.0.1", announce, size, SECRET, deadline, timeout)
    for peer in peers:
        peer.close()
    return sorted(peer.rank for peer in peers)


def test_strangers_hold_nobody_up() -> None:
    ports: queue.Queue[int] = queue.Queue()
    found: list[list[int]] = []
    accepting = threading.Thread(target=lambda: found.append(accept(ports, 3, 60)))
    accepting.start()
    port = ports.get()
    strangers = [socket.create_connection(("127.0.0.1", port)) for _ in range(300)]
    for number, stranger in enumerate(strangers):
        stranger.sendall((b"", b"\0", b"GET / HTTP/1.0\r\n\r\n", b"\xff" * 128)[number % 4])
    with pytest.raises(JobError, match=r"did not know this job's secret|closed its connection"):
        entrance.connect("127.0.0.1", port, 1, bytes(32), time.monotonic() + 60)
    for rank in (2, 1):
        entrance.connect("127.0.0.1", port, rank, SECRET, time.monotonic() + 60).close()
    accepting.join(30)
    assert found == [[1, 2]]
    for stranger in strangers:
        stranger.close()


def test_who_does_not_come_is_named() -> None:
    ports: queue.Queue[int] = queue.Queue()
    with pytest.raises(JobError, match=r"ranks 1, 2 did not reach hocket.init\(\) within 0.1 s"):
        accept(ports, 3, 0.1)
