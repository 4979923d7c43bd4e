"""The door of a server: only who proves the job's secret comes in, and no crowd is in the way of those who do."""

import os
import resource
import secrets
import socket
import threading
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from typing import Any

import pytest
from server.serving import until

from hocket.errors import JobError
from hocket.transport import door, proof
from hocket.transport.door import Door
from hocket.transport.proof import NotProved, prove
from hocket.transport.wire import Closed, Wire

SECRET = b"d" * 32
NAME = 1 << 30
REASON = "without the job's secret"
ADDRESS = "127.0.0.1"


class Guests:
    """Says back whatever comes in; knows who came, and how many were refused."""

    def __init__(self) -> None:
        self.names: list[int] = []
        self.refused: Counter[str] = Counter()
        self._lock = threading.Lock()

    def let_in(self, wire: Wire, name: int) -> None:
        self.names.append(name)
        try:
            while True:
                message = wire.receive()
                wire.send(message.kind, message.sequence, message.head)
        except Closed:
            pass

    def refuse(self, why: str) -> None:
        with self._lock:
            self.refused[why] += 1


@contextmanager
def opened(name: int = NAME, listener: socket.socket | None = None, *security: Any) -> Iterator[tuple[Door, Guests]]:
    guests = Guests()
    made = Door(listener or door.listen(ADDRESS, 0), SECRET, name, guests.let_in, guests.refuse, *security)
    try:
        yield made, guests
    finally:
        made.close()


def knock(port: int, number: int = 3, secret: bytes = SECRET, seconds: float = 5.0) -> Wire:
    return door.knock(ADDRESS, port, secret, number, time.monotonic() + seconds, encrypted=False)


def speak(wire: Wire, count: int = 1) -> None:
    """Have some words said back."""
    for sequence in range(count):
        wire.send(1, sequence, {"word": sequence})
        assert wire.receive().head == {"word": sequence}


def descriptors() -> int:
    return len(list(Path("/proc/self/fd").iterdir()))


def threads() -> int:
    return sum(thread.name == "hocket-peer" for thread in threading.enumerate())


def test_who_knows_the_secret_comes_in() -> None:
    with opened() as (made, guests):
        wire = knock(made.port, 7)
        speak(wire)
        wire.close()
        assert guests.names == [7]
        assert not guests.refused


def test_a_wrong_secret_is_refused_at_once_on_both_sides() -> None:
    with opened() as (made, guests):
        with pytest.raises(NotProved, match="did not know this job's secret"):
            knock(made.port, secret=b"x" * 32, seconds=600.0)
        until(lambda: guests.refused[REASON] == 1)
        assert not guests.names


@pytest.mark.parametrize("said", [b"", b"GET / HTTP/1.1\r\n\r\n", b"\0" * 36, b"\xff" * 200])
def test_other_programs_are_refused(said: bytes) -> None:
    with opened() as (made, guests):
        with socket.create_connection((ADDRESS, made.port)) as stranger:
            stranger.sendall(said)
            with suppress(OSError):  # the door may have hung up already
                stranger.shutdown(socket.SHUT_WR)
            until(lambda: guests.refused[REASON] == 1)
        assert not guests.names


def test_nothing_is_parsed_before_the_proof(monkeypatch: pytest.MonkeyPatch) -> None:
    """Not even looked at beyond what a proof takes."""
    read: list[int] = []
    genuine = proof.receive

    def receive(connection: socket.socket, count: int, deadline: float | None = None) -> bytes:
        read.append(count)
        return genuine(connection, count, deadline)

    monkeypatch.setattr(proof, "receive", receive)
    with opened() as (made, guests), socket.create_connection((ADDRESS, made.port)) as stranger:
        stranger.sendall(os.urandom(4096))
        until(lambda: guests.refused[REASON] == 1)
    assert sum(read) <= 128


def test_who_says_nothing_or_little_has_to_go(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(door, "_PROOF", 0.3)
    with opened() as (made, guests), ExitStack() as stack:
        silent = stack.enter_context(socket.create_connection((ADDRESS, made.port)))
        slow = stack.enter_context(socket.create_connection((ADDRESS, made.port)))
        slow.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)

        def both_refused() -> bool:
            """A byte now and then does not buy more time."""
            try:
                slow.send(b"x")
            except OSError:
                pass
            return guests.refused[REASON] == 2

        until(both_refused, 5.0)
        silent.settimeout(5.0)
        silent.recv(36)
        assert silent.recv(1) == b""
        speak(knock(made.port))
    until(lambda: not threads())


def test_a_thousand_idle_connections_are_not_in_the_way() -> None:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if hard < 4096:
        pytest.skip("too few file descriptors")
    resource.setrlimit(resource.RLIMIT_NOFILE, (max(soft, 4096), hard))
    before = descriptors()
    try:
        with opened() as (made, guests):
            early = knock(made.port, 1)
            speak(early)
            with ExitStack() as stack:
                for _ in range(1000):
                    stack.enter_context(socket.create_connection((ADDRESS, made.port)))
                speak(early, 20)
                late = knock(made.port, 2)
                speak(late, 20)
                until(lambda: guests.refused[REASON] >= 1000 - door._STRANGERS)
                until(lambda: threads() <= door._STRANGERS + 2)  # who was refused leaves a moment later
            until(lambda: guests.refused[REASON] == 1000)
            speak(early)
            speak(late)
            assert guests.names == [1, 2]
            early.close()
            late.close()
        until(lambda: descriptors() <= before and not threads())
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


def test_an_answer_of_one_server_opens_no_other() -> None:
    """A stranger passes on the challenge of one server to another, whose answer it gives as its own."""
    with opened(NAME) as (first, guests), opened(NAME + 1) as (second, _), ExitStack() as stack:
        victim = stack.enter_context(socket.create_connection((ADDRESS, first.port), 5.0))
        oracle = stack.enter_context(socket.create_connection((ADDRESS, second.port), 5.0))
        oracle.sendall(proof.receive(victim, 36))
        victim.sendall(proof.receive(oracle, 36))
        proof.receive(victim, 32)
        victim.sendall(proof.receive(oracle, 32))
        until(lambda: guests.refused[REASON] == 1)
        assert not guests.names


def test_an_answer_cannot_be_sent_back() -> None:
    with opened() as (made, guests), socket.create_connection((ADDRESS, made.port), 5.0) as mirror:
        mirror.sendall(proof.receive(mirror, 36))
        mirror.sendall(proof.receive(mirror, 32))
        until(lambda: guests.refused[REASON] == 1)
        assert not guests.names


def test_a_recorded_proof_is_of_no_use() -> None:
    with opened() as (made, guests):
        said = bytearray()
        with socket.create_connection((ADDRESS, made.port), 5.0) as genuine:
            genuine_send = genuine.sendall

            class Recorded:
                def sendall(self, data: bytes) -> None:
                    said.extend(data)
                    genuine_send(data)

                def __getattr__(self, name: str) -> Any:
                    return getattr(genuine, name)

            prove(Recorded(), SECRET, 3, accepts=False)  # type: ignore[arg-type]
        with socket.create_connection((ADDRESS, made.port), 5.0) as replay:
            replay.sendall(bytes(said))
            until(lambda: guests.refused[REASON] == 1)
        assert guests.names == [3]


def test_another_user_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    name = f"hocket-{secrets.token_hex(8)}"
    monkeypatch.setattr(door, "_uid", lambda _: os.geteuid() + 1)
    with opened(NAME, door.listen_here(name)) as (_, guests):
        with pytest.raises(NotProved, match="belongs to another user"):
            door.knock_here(name, SECRET, 3, time.monotonic() + 5.0)
        with socket.socket(socket.AF_UNIX) as stranger:
            stranger.connect(f"\0{name}")
            until(lambda: guests.refused[REASON] == 2)
        assert not guests.names


def test_nobody_there_is_told_with_the_remedy() -> None:
    with pytest.raises(JobError, match="see its output"):
        door.knock_here(f"hocket-{secrets.token_hex(8)}", SECRET, 3, time.monotonic() + 0.1)
    with socket.socket() as unused:
        unused.bind((ADDRESS, 0))
        with pytest.raises(JobError, match="firewall"):
            knock(unused.getsockname()[1], seconds=0.1)


def test_a_server_that_says_nothing_is_given_up_at_the_deadline() -> None:
    with socket.create_server((ADDRESS, 0)) as silent, pytest.raises(JobError, match="cannot be reached"):
        knock(silent.getsockname()[1], seconds=0.3)
