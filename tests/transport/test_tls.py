"""Encryption between hosts: who stands between a worker and a server is found out, and nothing is left on disk."""

import os
import socket
import ssl
import tempfile
import threading
import time
from contextlib import ExitStack, suppress
from pathlib import Path

import pytest
from server.serving import until

from hocket.config import Config
from hocket.transport import door, tls
from hocket.transport.proof import NotProved
from hocket.transport.requests import encrypted
from hocket.transport.wire import Wire
from transport.test_door import ADDRESS, NAME, REASON, SECRET, descriptors, opened, speak, threads


def knock(port: int, *, encrypted: bool = True, seconds: float = 5.0) -> Wire:
    return door.knock(ADDRESS, port, SECRET, 3, time.monotonic() + seconds, encrypted=encrypted)


def test_words_come_through() -> None:
    with opened(NAME, None, *tls.make_context()) as (made, guests):
        wire = knock(made.port)
        assert isinstance(wire.connection, ssl.SSLSocket)
        assert wire.connection.version() == "TLSv1.3"
        speak(wire, 5)
        wire.close()
        assert guests.names == [3]


def test_a_long_body_comes_through() -> None:
    body = os.urandom(3 << 20)
    left, right = socket.socketpair()
    context, _ = tls.make_context()
    found: list[bytes] = []

    def serve() -> None:
        wrapped = tls.wrap_server(right, context)
        tls.shake_hands(wrapped)
        wire = Wire(wrapped)
        found.append(wire.receive_bytes(wire.receive().body))
        wire.close()

    thread = threading.Thread(target=serve)
    thread.start()
    wire = Wire(tls.wrap_client(left)[0])
    wire.send(1, 1, {}, [memoryview(body)[:100], memoryview(body)[100:]])
    thread.join()
    wire.close()
    assert found == [body]


class Between:
    """Ends TLS with a certificate of his own, and passes on every byte between a worker and a server."""

    def __init__(self, port: int) -> None:
        self._port, self._context = port, tls.make_context()[0]
        self._listener = socket.create_server((ADDRESS, 0))
        self.port = self._listener.getsockname()[1]
        self._open: list[socket.socket] = []
        self._threads = [threading.Thread(target=self._stand)]
        self._threads[0].start()

    def _stand(self) -> None:
        with suppress(OSError):
            to_worker = self._context.wrap_socket(self._listener.accept()[0], server_side=True)
            to_server, _ = tls.wrap_client(socket.create_connection((ADDRESS, self._port)))
            self._open += [to_worker, to_server]
            for source, target in ((to_worker, to_server), (to_server, to_worker)):
                self._threads.append(threading.Thread(target=self._pass_on, args=(source, target)))
                self._threads[-1].start()

    def _pass_on(self, source: socket.socket, target: socket.socket) -> None:
        with suppress(OSError):
            while data := source.recv(4096):
                target.sendall(data)

    def close(self) -> None:
        for each in (self._listener, *self._open):
            with suppress(OSError):
                socket.socket.shutdown(each, socket.SHUT_RDWR)
        for thread in self._threads:
            thread.join(5.0)
        for each in (self._listener, *self._open):
            each.close()


def test_who_stands_between_with_his_own_certificate_is_found_out() -> None:
    with opened(NAME, None, *tls.make_context()) as (made, guests):
        between = Between(made.port)
        try:
            with pytest.raises(NotProved, match="did not know this job's secret"):
                knock(between.port)
            until(lambda: guests.refused[REASON] == 1)
            assert not guests.names
        finally:
            between.close()


def test_a_plain_worker_at_an_encrypted_door_is_told_so_at_once() -> None:
    with opened(NAME, None, *tls.make_context()) as (made, guests):
        with pytest.raises(NotProved, match="is --tls the same on all hosts"):
            knock(made.port, encrypted=False, seconds=600.0)
        until(lambda: guests.refused[REASON] == 1)


def test_an_encrypted_worker_at_a_plain_door_is_told_so_at_once() -> None:
    with opened() as (made, guests):
        with pytest.raises(NotProved, match="is --tls the same on all hosts"):
            knock(made.port, seconds=600.0)
        until(lambda: guests.refused[REASON] == 1)


def test_idle_strangers_at_an_encrypted_door_are_turned_away(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(door, "_PROOF", 600.0)  # it is not that their time is over
    with opened(NAME, None, *tls.make_context()) as (made, guests), ExitStack() as stack:
        count = door._STRANGERS + 60
        for _ in range(count):
            stack.enter_context(socket.create_connection((ADDRESS, made.port)))
        until(lambda: guests.refused[REASON] >= 60)
        until(lambda: threads() <= door._STRANGERS + 1)  # who was refused leaves a moment later
        speak(knock(made.port))


@pytest.mark.parametrize("with_memory_files", [True, False])
def test_no_certificate_is_left_on_disk(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, with_memory_files: bool
) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    if not with_memory_files:
        monkeypatch.delattr(os, "memfd_create")
    before = descriptors()
    context, binding = tls.make_context()
    assert len(binding) == 32
    assert context.get_ca_certs() == []
    assert not list(tmp_path.iterdir())
    assert descriptors() == before


def test_every_server_has_a_certificate_of_its_own() -> None:
    assert tls.make_context()[1] != tls.make_context()[1]


@pytest.mark.parametrize(
    ("address", "setting", "expected"),
    [
        ("127.0.0.1", "auto", False),
        ("::1", "auto", False),
        ("localhost", "auto", False),
        ("10.0.0.1", "auto", True),
        ("fe80::1", "auto", True),
        ("0.0.0.0", "auto", True),
        ("10.0.0.1", "off", False),
    ],
)
def test_who_is_reached_from_beyond_the_host_is_encrypted(address: str, setting: str, expected: bool) -> None:
    assert encrypted(address, Config(tls=setting)) is expected
