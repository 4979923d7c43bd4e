"""A connection that breaks at any point is made anew, and no update is lost or made twice."""

import contextlib
import random
import time

import pytest
import torch
from server.cutting import cutting
from server.serving import (
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

from hocket.errors import DeadlineExceeded, JobError, ServerLost
from hocket.server import link, session
from hocket.server.client import Client
from hocket.server.link import WireLink, join
from hocket.server.terms import Kind, Push, Terms
from hocket.transport import door
from hocket.transport.wire import HEADER, Closed, Message, Wire, WireError

ASYNCHRONOUS = Terms(staleness=None, groups=0)
STEPS = 12
TWICE, BEFORE, NO_SENSE = "messages that came twice", "messages that were sent before", "messages that make no sense"


@pytest.fixture
def patient(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whoever was cut off has time to come back, though this machine may be busy."""
    monkeypatch.setattr(session, "GRACE", 30.0)
    monkeypatch.setattr(link, "_AGAIN", 30.0)


def assert_exact(found: torch.Tensor, workers: int, steps: int = STEPS) -> None:
    assert torch.allclose(found, alone(workers, steps), rtol=1e-12, atol=1e-12)


def random_cuts(seed: int, count: int) -> list[tuple[str, int]]:
    """Anywhere: in the proof (68 bytes), in joining, in a request, between two, in an answer."""
    chance = random.Random(seed)
    return [(chance.choice(("up", "down")), int(2 ** chance.uniform(0, 14))) for _ in range(count)]


@pytest.mark.usefixtures("patient")
@pytest.mark.parametrize("seed", range(6))
def test_one_asynchronous_worker_with_cuts(seed: int) -> None:
    with serve(1) as served, cutting(served.ports[0], random_cuts(seed, 8)) as proxy:
        with client(links([proxy.port], 0), 0, 1) as made:
            assert_exact(train(made, ASYNCHRONOUS, STEPS), 1)
        assert proxy.made > 1
        assert served.services[0].tables[0].version == STEPS
        assert served.services[0].tables[0].tallies[0].pushes == STEPS
        assert served.said == []


@pytest.mark.usefixtures("patient")
@pytest.mark.parametrize("seed", range(4))
def test_bulk_synchronous_workers_with_cuts_to_two_servers(seed: int) -> None:
    with serve(2, servers=2) as served, contextlib.ExitStack() as stack:
        proxies = [
            stack.enter_context(cutting(served.ports[server], random_cuts(10 * seed + server, 6)))
            for server in range(2)
        ]

        def work(rank: int) -> torch.Tensor:
            with client(links([proxy.port for proxy in proxies], rank), rank, 2) as made:
                return train(made, Terms(), STEPS)

        for found in together(2, work):
            assert_exact(found, 2)
        assert all(table.version == STEPS for service in served.services for table in service.tables.values())


@pytest.mark.usefixtures("patient")
@pytest.mark.parametrize("direction", ["up", "down"])
def test_every_point_of_a_push(direction: str) -> None:
    """A cut after each of so many bytes of the exchange in which one update is made."""
    with serve(1) as served, client(links([served.ports[0]], 0), 0, 1) as made:
        uncut = made.links[0]
        assert isinstance(uncut, WireLink) and uncut._wire is not None
        train(made, ASYNCHRONOUS, 1)
        before = uncut._wire.sent, uncut._wire.received
    whole = before[direction == "down"]
    for cut in range(68, 68 + whole, max(1, whole // 25)):
        with serve(1) as served, cutting(served.ports[0], [(direction, cut)]) as proxy:
            with client(links([proxy.port], 0), 0, 1) as made:
                assert_exact(train(made, ASYNCHRONOUS, 2), 1, 2)
            assert served.services[0].tables[0].version == 2


@pytest.mark.usefixtures("patient")
def test_cuts_while_a_worker_waits_for_another() -> None:
    """It is cut off in a round that has begun, comes back, and its gradient is in that round once."""
    with serve(2) as served:
        found: list[Client] = []

        def work(rank: int) -> torch.Tensor:
            with client(links([served.ports[0]], rank), rank, 2) as made:
                if rank == 0:
                    found.append(made)
                else:
                    until(lambda: bool(served.services[0].tables and served.services[0].tables[0]._group.contributions))
                    mine, peer = found[0].links[0], served.fronts[0]._peers[0]
                    assert isinstance(mine, WireLink) and mine._wire is not None
                    before = peer.wire
                    door.hang_up(mine._wire.connection)
                    until(lambda: peer.wire is not before)
                return train_without_meeting(made)

        for each in together(2, work):
            assert_exact(each, 2, 3)
        assert served.services[0].tables[0].tallies[0].pushes == 3
        assert served.refused == {TWICE: 1}


def train_without_meeting(made: Client) -> torch.Tensor:
    found = copy(made, Terms())
    for step in range(3):
        found.gradients[0].copy_(gradient(made.rank, step, found.gradients[0].numel()))
        assert found.push(Push())
    return found.parameters[0].clone()


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
    """The messages of a worker that made some steps, and by what it is known."""
    found = links([served.ports[0]], 0)
    assert found[0]._wire is not None
    recorder = Recorder(found[0]._wire)
    nonce = served.fronts[0]._peers[0].nonce
    made = Client(0, 1, found)
    train(made, ASYNCHRONOUS, 3)
    found[0]._wire.close()  # without a goodbye
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


def test_a_message_from_the_future_is_refused() -> None:
    with serve(1) as served:
        wire = knock(served.ports[0], 0, "n")
        wire.send(Kind.QUEUE, 7, {"queue": 0})
        with pytest.raises(Closed):
            wire.receive()
        wire.close()
        assert served.refused == {BEFORE: 1}


def test_a_second_process_of_a_rank_is_refused() -> None:
    with serve(1) as served, client(links([served.ports[0]], 0), 0, 1) as made:
        train(made, ASYNCHRONOUS, 1)
        with pytest.raises(JobError, match="two processes of rank 0"):
            knock(served.ports[0], 0, "another")
        assert_exact(train(made, ASYNCHRONOUS, 2), 1, 2)
        assert served.refused == {"a second process of a rank": 1}


def test_who_proves_to_be_one_cannot_join_as_another() -> None:
    with serve(2) as served:
        until_then = time.monotonic() + 5
        for role, number in (("worker", 1), ("server", 0), ("king", 0), ("worker", -1)):
            wire = door.knock("127.0.0.1", served.ports[0], SECRET, 0, until_then, encrypted=False)
            wire.send(Kind.JOIN, 0, {"role": role, "number": number, "nonce": "", "said": {}})
            with pytest.raises(Closed):
                wire.receive()
            wire.close()
        assert served.refused == {NO_SENSE: 4}


def test_a_garbled_answer_is_asked_for_again() -> None:
    with serve(1) as served, client(links([served.ports[0]], 0), 0, 1) as made:
        mine = made.links[0]
        assert isinstance(mine, WireLink) and mine._wire is not None
        genuine = mine._wire.receive
        once = iter([True])

        def receive() -> Message:
            message = genuine()
            if next(once, False):
                raise WireError("no message begins with that")
            return message

        mine._wire.receive = receive  # type: ignore[method-assign]
        assert_exact(train(made, ASYNCHRONOUS, 4), 1, 4)


@pytest.mark.parametrize("tcp", [True, False])
def test_a_server_that_ends_is_told_to_all_who_wait(tcp: bool) -> None:
    with serve(2, tcp=tcp) as served:
        made = Client(0, 2, links(served.ports, 0) if tcp else local_links(served, 0))
        waiting = served.services[0].meetings

        def end() -> None:
            until(lambda: bool(waiting._meetings))
            served.fronts[0].close()

        def wait() -> None:
            with pytest.raises(ServerLost, match="server 0 has ended"):
                made.gather("a meeting", b"")

        together(2, lambda number: (end, wait)[number]())
        made.close()
        waiting.fail("over")  # its thread waits for rank 1


def test_a_deadline_is_told_as_one() -> None:
    with serve(2, timeout=0.2) as served, client(links(served.ports, 0), 0, 2) as made:
        with pytest.raises(DeadlineExceeded, match="rank 1 did not come to a meeting"):
            made.gather("a meeting", b"")
        assert served.refused == {}


def test_a_header_that_says_too_much_ends_only_its_own_connection() -> None:
    with serve(2) as served, client(links(served.ports, 0), 0, 2) as made:
        wire = knock(served.ports[0], 1, "n")
        wire.connection.sendall(HEADER.pack(b"HOCK", 1, Kind.GATHER, 0, 0, 1, 1 << 31, 1 << 62))
        with pytest.raises(Closed):
            wire.receive()
        wire.close()
        until(lambda: served.said != [])
        assert served.refused == {NO_SENSE: 1}
        assert_exact(train(made, ASYNCHRONOUS, 3), 1, 3)


def test_joining_is_the_first_that_is_said() -> None:
    with serve(1) as served:
        wire = door.knock("127.0.0.1", served.ports[0], SECRET, 0, time.monotonic() + 5, encrypted=False)
        wire.send(Kind.PULL, 1, {"table": 0})
        with pytest.raises(Closed):
            wire.receive()
        wire.close()
        wire = door.knock("127.0.0.1", served.ports[0], SECRET, 0, time.monotonic() + 5, encrypted=False)
        assert join(wire, 0, "n", time.monotonic() + 5)["answered"] == 0
        wire.close()
