"""Addresses of this host, and the proof that one leads to the right host."""

import contextlib
import socket
import threading

import pytest

from hocket.transport import interfaces
from hocket.transport.interfaces import Listener, Target

SECRET, OTHER = b"s" * 32, b"o" * 32


def test_addresses_of_this_host() -> None:
    found = interfaces.addresses()
    assert ("lo", "127.0.0.1") in found
    assert {name for name, _ in found} <= {name for _, name in socket.if_nameindex()}
    assert not any(address.startswith("fe80") for _, address in found)
    loopback = [name == "lo" for name, _ in found]
    assert loopback == sorted(loopback), "last"
    assert {name for name, _ in interfaces.addresses("lo")} == {"lo"}
    assert interfaces.addresses("nothing0") == []


def test_only_the_right_host_with_the_right_secret_counts() -> None:
    listener, elsewhere = Listener(SECRET, 1), Listener(SECRET, 2)
    try:
        good = [Target(1, address, listener.port) for _, address in interfaces.addresses()]
        wrong = Target(1, "127.0.0.1", elsewhere.port)  # as docker0, which is another host for everyone
        nobody = Target(1, "127.0.0.1", 1)
        assert interfaces.try_addresses([*good, wrong, nobody], SECRET, 5) == good
        assert interfaces.try_addresses(good, OTHER, 5) == []
        assert interfaces.try_addresses([Target(2, "127.0.0.1", elsewhere.port)], SECRET, 5) != []
        assert interfaces.try_addresses([], SECRET, 5) == []
    finally:
        listener.close()
        elsewhere.close()


def test_an_answer_that_was_passed_on_does_not_count() -> None:
    """Who forwards to the right host is not the right host: the proof covers the address that was tried."""
    listener = Listener(SECRET, 1)
    relay = socket.create_server(("127.0.0.2", 0))

    def forward() -> None:
        near, _ = relay.accept()
        with contextlib.suppress(OSError), near, socket.create_connection(("127.0.0.1", listener.port)) as far:
            for _ in range(2):  # challenges, and answers
                far.sendall(near.recv(100))
                near.sendall(far.recv(100))

    thread = threading.Thread(target=forward)
    thread.start()
    try:
        assert interfaces.try_addresses([Target(1, "127.0.0.2", relay.getsockname()[1])], SECRET, 5) == []
    finally:
        thread.join()
        relay.close()
        listener.close()


def test_strangers_and_silence_do_no_harm() -> None:
    listener = Listener(SECRET, 1)
    silent = socket.create_server(("127.0.0.1", 0))
    try:
        with socket.create_connection(("127.0.0.1", listener.port)) as stranger:
            stranger.sendall(b"GET / HTTP/1.1\r\nHost: 127.0.0.1\r\nAccept: everything\r\n\r\n")
            while stranger.recv(100):
                pass
        with socket.create_connection(("127.0.0.1", listener.port)):  # says nothing
            assert interfaces.try_addresses([Target(1, "127.0.0.1", listener.port)], SECRET, 5)
            assert interfaces.try_addresses([Target(1, "127.0.0.1", silent.getsockname()[1])], SECRET, 0.2) == []
    finally:
        silent.close()
        listener.close()


def test_who_is_silent_at_the_end_is_let_go_without_a_word(caplog: pytest.LogCaptureFixture) -> None:
    listener = Listener(SECRET, 1)
    with socket.create_connection(("127.0.0.1", listener.port)) as silent:
        assert silent.recv(1)  # of a challenge: an answer to this connection is under way
        listener.close()
    assert not caplog.records
