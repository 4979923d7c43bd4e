"""Who comes in, and what is answered: everything once, to whoever proved the secret, whatever the others send."""

import time
from collections.abc import Iterator

import pytest
import torch
from server.serving import ADDRESS, SECRET, Served, alone, client, copy, knock, links, serve, train, until

from hocket.coordinator.coordinator_service import Ask
from hocket.errors import JobError
from hocket.messages import HEADER, MAGIC, VERSION
from hocket.server.server_client import Client
from hocket.server.terms import Kind, Push, Terms
from hocket.transport import door, replies
from hocket.transport.requests import SERVER, Talk, join
from hocket.transport.wire import Closed, Wire

ASYNCHRONOUS = Terms(staleness=None, groups=0)
TWICE, BEFORE, NO_SENSE = "messages that came twice", "messages that were sent before", "messages that make no sense"


@pytest.fixture
def patient(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """A worker that is away while the test speaks for it is not taken for dead."""
    with monkeypatch.context() as changed:
        changed.setattr(replies, "GRACE", 30.0)
        yield


class Recorder:
    """Keeps the bytes of every message that a wire sends."""

    def __init__(self, wire: Wire) -> None:
        self.frames: list[bytes] = []
        genuine = wire._send_all

        def record(parts: list[memoryview]) -> None:
            self.frames.append(b"".join(bytes(part.cast("B")) for part in parts if part.nbytes))
            genuine(parts)

        wire._send_all = record  # type: ignore[method-assign]


def recorded(served: Served) -> tuple[list[bytes], str]:
    """The messages of a worker to server 0 in some steps, and by what the worker is known."""
    found = links(served, 0)
    wire = found[1]._wire
    assert wire is not None
    recorder = Recorder(wire)
    nonce = served.peer(0).nonce
    made = Client(0, 1, found[0], found[1:])
    train(made, ASYNCHRONOUS, 3)
    wire.close()  # without a goodbye
    made.link.close()
    return recorder.frames, nonce


def test_replayed_messages_are_not_done_again() -> None:
    with serve(1) as served:
        frames, nonce = recorded(served)
        table = served.services[0].tables[0]
        state = table.shard.flats[0].clone()  # type: ignore[attr-defined]
        wire = knock(served.ports[0], 0, nonce)
        for _ in range(3):
            wire.connection.sendall(frames[-1])
            assert wire.receive_bytes(wire.receive().body)  # the answer that it had
        assert served.refused == {TWICE: 3}
        wire.connection.sendall(frames[-2])
        with pytest.raises(Closed):
            wire.receive()
        wire.close()
        assert served.refused == {TWICE: 3, BEFORE: 1}
        for frame in frames[:-1]:
            wire = knock(served.ports[0], 0, nonce)
            wire.connection.sendall(frame)
            with pytest.raises(Closed):
                wire.receive()
            wire.close()
        assert served.refused[BEFORE] == len(frames)
        assert table.version == 3
        assert table.tallies[0].pushes == 3
        assert torch.equal(table.shard.flats[0], state)  # type: ignore[attr-defined]


@pytest.mark.usefixtures("patient")
def test_a_replayed_question_deals_no_second_batch() -> None:
    """A worker whose answer was lost asks again, over a new connection: it gets the batch that it holds."""
    head = {"queue": 0, "done": [], "refused": [], "epoch": 1, "total": 3, "end": None, "wait": False, "more": 0,
            "in_step": False}  # fmt: skip
    with serve(2) as served:
        for _ in range(3):
            wire = knock(served.coordinator_port, 0, "n")
            wire.send(Ask.TAKE, 1, head)
            assert wire.receive().head["batch"] == 0
            wire.close()
        assert served.refused_by_coordinator == {TWICE: 2}
        wire = knock(served.coordinator_port, 0, "n")
        wire.send(Ask.TAKE, 2, {**head, "done": [0]})
        assert wire.receive().head["batch"] == 1
        wire.send(Talk.BYE, 3, {})
        wire.receive()
        wire.close()


@pytest.mark.parametrize("to_coordinator", [False, True])
def test_a_message_from_the_future_is_refused(to_coordinator: bool) -> None:
    with serve(1) as served:
        wire = knock(served.coordinator_port if to_coordinator else served.ports[0], 0, "n")
        wire.send(Ask.MEMBERSHIP if to_coordinator else Kind.PULL, 7, {"table": 0})
        with pytest.raises(Closed):
            wire.receive()
        wire.close()
        assert (served.refused_by_coordinator if to_coordinator else served.refused) == {BEFORE: 1}


def test_a_second_process_of_a_rank_is_refused() -> None:
    with serve(1) as served, client(links(served, 0), 0, 1) as made:
        train(made, ASYNCHRONOUS, 1)
        for port in (served.coordinator_port, served.ports[0]):
            with pytest.raises(JobError, match="two processes of rank 0"):
                knock(port, 0, "another")
        assert torch.allclose(train(made, ASYNCHRONOUS, 2), alone(1, 2), rtol=1e-12, atol=1e-12)
        assert served.refused == served.refused_by_coordinator == {"a second process of a rank": 1}


def test_who_is_not_of_the_job_is_refused_and_nobody_is_lost() -> None:
    """Whatever numbers they prove, and whatever they say when they join."""
    with serve(2) as served, client(links(served, 0), 0, 2) as made:
        found = copy(made, ASYNCHRONOUS)
        until_then = time.monotonic() + 5
        for port, names in ((served.ports[0], (2, SERVER + 1)), (served.coordinator_port, (2, SERVER + 1, SERVER + 2))):
            for name in names:
                wire = door.knock(ADDRESS, port, SECRET, name, until_then, encrypted=False)
                wire.send(Talk.JOIN, 0, {"nonce": "n", "said": {}})
                with pytest.raises(Closed):
                    wire.receive()
                wire.close()
        wire = door.knock(ADDRESS, served.ports[0], SECRET, 1, until_then, encrypted=False)
        wire.send(Talk.JOIN, 0, {"nonce": "n", "said": 7})
        with pytest.raises(Closed):
            wire.receive()
        wire.close()
        assert served.refused == served.refused_by_coordinator == {NO_SENSE: 3}
        assert made.live() == [0, 1]
        assert found.push(Push())
        assert served.said == []


def test_only_the_coordinator_tells_servers_of_losses() -> None:
    with serve(2) as served, client(links(served, 0), 0, 2) as made:
        found = copy(made, ASYNCHRONOUS)
        for kind in (96, 97, 98):
            with pytest.raises(JobError, match="makes no sense"):
                made.first.request(kind, {"rank": 0, "why": "was lost", "held": []})
        assert found.push(Push())
        assert not served.services[0].report().workers["0"]["lost"]


def test_a_header_that_says_too_much_ends_only_its_own_connection() -> None:
    with serve(2) as served, client(links(served, 0), 0, 2) as made:
        for port in (served.ports[0], served.coordinator_port):
            wire = knock(port, 1, "n")
            wire.connection.sendall(HEADER.pack(MAGIC, VERSION, Ask.GATHER, 0, 0, 1, 1 << 31, 1 << 62))
            with pytest.raises(Closed):
                wire.receive()
            wire.close()
        until(lambda: served.said != [])
        assert served.refused == served.refused_by_coordinator == {NO_SENSE: 1}
        assert torch.allclose(train(made, ASYNCHRONOUS, 3), alone(1, 3), rtol=1e-12, atol=1e-12)


def test_joining_is_the_first_that_is_said() -> None:
    with serve(1) as served:
        for port in (served.ports[0], served.coordinator_port):
            wire = door.knock(ADDRESS, port, SECRET, 0, time.monotonic() + 5, encrypted=False)
            wire.send(Kind.PULL, 1, {"table": 0})
            with pytest.raises(Closed):
                wire.receive()
            wire.close()
            wire = door.knock(ADDRESS, port, SECRET, 0, time.monotonic() + 5, encrypted=False)
            assert join(wire, "n", time.monotonic() + 5)["answered"] == 0
            wire.close()


def test_nobody_waits_for_who_does_not_join(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(replies, "_FIRST_WORDS", 0.05)
    with serve(1) as served:
        for port in (served.ports[0], served.coordinator_port):
            wire = door.knock(ADDRESS, port, SECRET, 0, time.monotonic() + 5, encrypted=False)
            with pytest.raises(Closed):
                wire.receive()
            wire.close()
        assert served.refused == served.refused_by_coordinator == {NO_SENSE: 1}
