"""Who comes in, and what is answered: everything once, to whoever proved the secret, whatever the others send."""

import contextlib
import threading
import time
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from server.serving import (
    ADDRESS,
    SECRET,
    Served,
    alone,
    client,
    copy,
    gradient,
    knock,
    links,
    local_links,
    serve,
    together,
    train,
    until,
)

from hocket.coordinator.coordinator_service import Ask, split
from hocket.errors import JobError, ServerLost
from hocket.messages import HEADER, MAGIC, VERSION
from hocket.server.server_client import Client
from hocket.server.terms import Kind, Push, Terms
from hocket.transport import door, replies, waiting
from hocket.transport.requests import BOARD, SERVER, Talk, join
from hocket.transport.wire import Closed, Wire, hang_up

ASYNCHRONOUS = Terms(staleness=None, groups=0)
TAKE: dict[str, Any] = {
    "queue": 0, "done": [], "refused": [], "epoch": 1, "total": 1, "end": None, "wait": True, "more": 0,
    "in_step": False,
}  # fmt: skip
WAITS: dict[str, tuple[int, int, dict[str, Any]]] = {  # the number of a peer, and what it asks
    "a meeting": (0, Ask.GATHER, {"number": 1, "what": "a meeting"}),
    "the end of a loop": (0, Ask.SETTLE, {"has_trained": True, "stays": False}),
    "a batch": (0, Ask.TAKE, TAKE),
    "the answers before": (2, Ask.KEPT, {}),
    "joining": (2, Ask.JOIN, {}),
    "the board": (BOARD, Ask.BOARD, {"operation": "get", "key": "k", "seconds": 60.0}),
}
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


@contextlib.contextmanager
def recorded(served: Served) -> Iterator[tuple[list[bytes], str]]:
    """The messages of a worker to server 0 in some steps, and by what the worker is known.

    The worker stays with the coordinator until the end of the block: a server drops whoever has left.
    """
    found = links(served, 0)
    wire = found[1]._wire
    assert wire is not None
    recorder = Recorder(wire)
    nonce = served.peer(0).nonce
    made = Client(0, 1, found[0], found[1:])
    train(made, ASYNCHRONOUS, 3)
    wire.close()  # without a goodbye
    try:
        yield recorder.frames, nonce
    finally:
        made.link.close()


@pytest.mark.usefixtures("patient")
def test_replayed_messages_are_not_done_again() -> None:
    with serve(1) as served, recorded(served) as (frames, nonce):
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


def reach(served: Served, number: int, nonce: str, said: dict[str, Any], *, tcp: bool) -> Wire:
    """A connection to the coordinator of a process that has joined."""
    until_then = time.monotonic() + 20
    if tcp:
        wire = door.knock(ADDRESS, served.coordinator_port, SECRET, number, until_then, encrypted=False)
    else:
        wire = door.knock_here(f"{served.name}-coordinator", SECRET, number, until_then)
    join(wire, nonce, until_then, said)
    return wire


@pytest.mark.few(4)
@pytest.mark.parametrize("tcp", [False, True])
@pytest.mark.parametrize("what", WAITS)
def test_who_ends_while_it_waits_is_lost_and_makes_room(what: str, tcp: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(replies, "GRACE", 0.1)
    number, kind, head = WAITS[what]
    with serve(2, tcp=tcp) as served:
        other = reach(served, 1, "other", {}, tcp=tcp)
        other.send(Ask.TAKE, 1, {**TAKE, "wait": False})  # the only batch
        assert other.receive().head["batch"] == 0
        dead = reach(served, number, "dead", {"newcomer": number == 2}, tcp=tcp)
        dead.send(kind, 1, head)
        known = served.peer(number, None)
        until(known.lock.locked)
        dead.close()
        new = reach(served, number, "new", {"newcomer": True}, tcp=tcp)
        until(lambda: not known.lock.locked())  # nobody waits in the name of the one that is dead
        assert served.coordinator.service.ledger.live == ([0, 1] if number else [1])
        for wire in (new, other):
            wire.close()


@pytest.mark.parametrize("cuts", [1, 2])
def test_who_comes_back_while_its_request_waits_is_answered_once(cuts: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(replies, "GRACE", 30.0)
    monkeypatch.setattr(waiting, "LOOK", 0.001)
    meeting = {"number": 1, "what": "a meeting"}
    with serve(2) as served:
        wire = knock(served.coordinator_port, 0, "n")
        for _ in range(cuts):
            wire.send(Ask.GATHER, 1, meeting)
            until(served.peer(0, None).lock.locked)
            wire.close()
            wire = knock(served.coordinator_port, 0, "n")
        wire.send(Ask.GATHER, 1, meeting)
        other = knock(served.coordinator_port, 1, "n")
        other.send(Ask.GATHER, 1, meeting)
        for each in (wire, other):
            assert split(each.receive_bytes(each.receive().body)) == {0: b"", 1: b""}
        assert served.coordinator.service.ledger.live == [0, 1]
        for each in (wire, other):
            each.close()


def test_a_killed_worker_makes_room_at_a_server_where_its_gradient_waits_for_others() -> None:
    """The gradient counts, for the server has it."""
    with serve(2, tcp=False) as served, client(local_links(served, 1), 1, 2) as made:
        table = served.services[0].tables
        coordinator, server = found = local_links(served, 0)
        dead, living = copy(Client(0, 2, coordinator, [server]), Terms()), copy(made, Terms())

        def work(rank: int) -> None:
            if rank == 0:
                dead.gradients[0].copy_(gradient(0, 0, dead.gradients[0].numel()))
                with pytest.raises(ServerLost, match="said goodbye"):
                    dead.push(Push())
                return
            until(lambda: table[0]._group.contributions)
            for link in found:
                assert link._wire is not None
                link._is_closed = True  # it makes no new connection
                hang_up(link._wire.connection)
            knock_newcomer()
            living.gradients[0].copy_(gradient(1, 0, living.gradients[0].numel()))
            assert living.push(Push())

        def knock_newcomer() -> None:
            for label in ("coordinator", "server-0"):
                wire = door.knock_here(f"{served.name}-{label}", SECRET, 0, time.monotonic() + 20)
                join(wire, "new", time.monotonic() + 20, {"newcomer": True})
                wire.close()

        together(2, work)
        assert torch.allclose(living.parameters[0], alone(2, 1), rtol=1e-12, atol=1e-12)


def test_a_push_counts_once_whose_connection_breaks_for_long_while_it_waits(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(replies, "GRACE", 0.0)
    monkeypatch.setattr(waiting, "LOOK", 0.001)
    with serve(2) as served, client(links(served, 1), 1, 2) as made:
        coordinator, server = links(served, 0)
        connect = server._connect

        def connect_late(deadline: float) -> Wire:
            threading.Event().wait(0.05)  # it is the time itself that is tested
            return connect(deadline)

        server._connect = connect_late
        with client([coordinator, server], 0, 2) as other:
            cut, mine, tables = copy(other, Terms()), copy(made, Terms()), served.services[0].tables

            def work(rank: int) -> None:
                if rank == 0:
                    cut.gradients[0].copy_(gradient(0, 0, cut.gradients[0].numel()))
                    assert cut.push(Push())
                    return
                until(lambda: tables[0]._group.contributions)
                before = served.peer(0).wire
                hang_up(before.connection)
                until(lambda: served.peer(0).wire is not before)
                mine.gradients[0].copy_(gradient(1, 0, mine.gradients[0].numel()))
                assert mine.push(Push())

            together(2, work)
            assert tables[0].version == 1
            for found in (cut, mine):
                assert torch.allclose(found.parameters[0], alone(2, 1), rtol=1e-12, atol=1e-12)


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
    with serve(1) as served:
        monkeypatch.setattr(replies, "_FIRST_WORDS", 0.05)  # only now: the server has said its first words
        for port in (served.ports[0], served.coordinator_port):
            wire = door.knock(ADDRESS, port, SECRET, 0, time.monotonic() + 5, encrypted=False)
            with pytest.raises(Closed):
                wire.receive()
            wire.close()
        assert served.refused == served.refused_by_coordinator == {NO_SENSE: 1}
