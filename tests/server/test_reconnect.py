"""A connection that breaks at any point is made anew, and no update is lost or made twice."""

import contextlib
import dataclasses
import random
import threading
from collections import Counter

import pytest
import torch
from server.cutting import cutting
from server.serving import Served, alone, client, copy, gradient, links, serve, together, train, until

from hocket.coordinator.dealer_client import Deal
from hocket.server.server_client import Client
from hocket.server.terms import Push, Terms
from hocket.transport import door, replies, requests
from hocket.transport.requests import Link, WireLink

ASYNCHRONOUS = Terms(staleness=None, groups=0)
STEPS = 12
TWICE = "messages that came twice"


@pytest.fixture
def patient(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whoever was cut off has time to come back, though this machine may be busy."""
    monkeypatch.setattr(replies, "GRACE", 30.0)
    monkeypatch.setattr(requests, "_AGAIN", 30.0)


def assert_exact(found: torch.Tensor, workers: int, steps: int = STEPS) -> None:
    assert torch.allclose(found, alone(workers, steps), rtol=1e-12, atol=1e-12)


def random_cuts(seed: int, count: int) -> list[tuple[str, int]]:
    """Anywhere: in the proof (68 bytes), in joining, in a request, between two, in an answer."""
    chance = random.Random(seed)
    return [(chance.choice(("up", "down")), int(2 ** chance.uniform(0, 14))) for _ in range(count)]


@pytest.mark.few(2)
@pytest.mark.usefixtures("patient")
@pytest.mark.parametrize("seed", range(6))
def test_one_asynchronous_worker_with_cuts(seed: int) -> None:
    with serve(1) as served, cutting(served.ports[0], random_cuts(seed, 8)) as proxy:
        with client(links(served, 0, ports=[proxy.port]), 0, 1) as made:
            assert_exact(train(made, ASYNCHRONOUS, STEPS), 1)
        assert proxy.made > 1
        assert served.services[0].tables[0].version == STEPS
        assert served.services[0].tables[0].tallies[0].pushes == STEPS
        assert served.said == []


@pytest.mark.few(2)
@pytest.mark.usefixtures("patient")
@pytest.mark.parametrize("seed", range(4))
def test_bulk_synchronous_workers_with_cuts_to_two_servers(seed: int) -> None:
    with serve(2, servers=2) as served, contextlib.ExitStack() as stack:
        proxies = [
            stack.enter_context(cutting(served.ports[server], random_cuts(10 * seed + server, 6)))
            for server in range(2)
        ]

        def work(rank: int) -> torch.Tensor:
            with client(links(served, rank, ports=[proxy.port for proxy in proxies]), rank, 2) as made:
                return train(made, Terms(), STEPS)

        for found in together(2, work):
            assert_exact(found, 2)
        assert all(table.version == STEPS for service in served.services for table in service.tables.values())


@pytest.mark.few(1)
@pytest.mark.usefixtures("patient")
@pytest.mark.parametrize("direction", ["up", "down"])
def test_every_point_of_a_push(direction: str) -> None:
    """A cut after each of so many bytes of the exchange in which one update is made."""
    with serve(1) as served, client(links(served, 0), 0, 1) as made:
        uncut = made.links[0]
        assert isinstance(uncut, WireLink) and uncut._wire is not None
        train(made, ASYNCHRONOUS, 1)
        before = uncut._wire.sent, uncut._wire.received
    whole = before[direction == "down"]
    for cut in range(68, 68 + whole, max(1, whole // 25)):
        with serve(1) as served, cutting(served.ports[0], [(direction, cut)]) as proxy:
            with client(links(served, 0, ports=[proxy.port]), 0, 1) as made:
                assert_exact(train(made, ASYNCHRONOUS, 2), 1, 2)
            assert served.services[0].tables[0].version == 2


@pytest.mark.usefixtures("patient")
def test_cuts_while_a_worker_waits_for_another() -> None:
    """It is cut off in a round that has begun, comes back, and its gradient is in that round once."""
    with serve(2) as served:
        found: list[Client] = []

        def work(rank: int) -> torch.Tensor:
            with client(links(served, rank), rank, 2) as made:
                if rank == 0:
                    found.append(made)
                else:
                    until(lambda: bool(served.services[0].tables and served.services[0].tables[0]._group.contributions))
                    mine, peer = found[0].links[0], served.peer(0)
                    before = peer.wire
                    hang_up(mine)
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


def hang_up(link: Link) -> None:
    assert isinstance(link, WireLink) and link._wire is not None
    door.hang_up(link._wire.connection)


def through(served: Served, port: int) -> Served:
    """The same, with the coordinator at another port."""
    return dataclasses.replace(served, coordinator_port=port)


def train_dealt(made: Client, terms: Terms, total: int) -> list[int]:
    """Train on batches as they are dealt; those that counted. The gradient follows from the number of the batch."""
    found, deal, mine = copy(made, terms), Deal(made), list[int]()
    made.paced = [found.number]
    made.gather("all are there", b"")
    while (number := deal.take(1, total)) is not None or made.await_batch(deal, 1):
        if number is None:
            continue
        found.gradients[0].copy_(gradient(0, number, found.gradients[0].numel()))
        if found.push(Push(epoch=1, batches=((deal.number, 1, number),))):
            mine.append(number)
        deal.finish([number])
    found.pull()
    return mine


@pytest.mark.usefixtures("patient")
@pytest.mark.parametrize("seed", range(4))
def test_batches_are_dealt_once_with_cuts_to_the_coordinator(seed: int) -> None:
    with serve(2) as served, cutting(served.coordinator_port, random_cuts(100 + seed, 12)) as proxy:

        def work(rank: int) -> list[int]:
            with client(links(through(served, proxy.port), rank), rank, 2) as made:
                return train_dealt(made, ASYNCHRONOUS, 30)

        taken = together(2, work)
        assert sorted(taken[0] + taken[1]) == list(range(30))
        assert proxy.made > 2
        assert served.services[0].tables[0].version == 30
        assert served.said == []


@pytest.mark.usefixtures("patient")
def test_cuts_while_a_worker_waits_in_a_meeting() -> None:
    """It comes back, and what it has given is in the meeting once."""
    with serve(2) as served:
        found: list[Client] = []

        def work(rank: int) -> dict[int, bytes]:
            with client(links(served, rank), rank, 2) as made:
                if rank == 0:
                    found.append(made)
                else:
                    until(lambda: bool(served.coordinator.service.meetings._meetings))
                    peer = served.peer(0, None)
                    before = peer.wire
                    hang_up(found[0].link)
                    until(lambda: peer.wire is not before)
                return made.gather("a meeting", bytes([rank]))

        assert together(2, work) == [{0: b"\0", 1: b"\1"}] * 2
        assert served.refused_by_coordinator == {TWICE: 1}
        assert served.said == []


@pytest.mark.parametrize("terms", [ASYNCHRONOUS, Terms(staleness=1, groups=0), Terms()])
def test_who_is_cut_off_for_too_long_comes_back_and_its_batch_counts_once(
    terms: Terms, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The batch in its hand is dealt to the other; its next request brings it back, and it goes on with others."""
    monkeypatch.setattr(replies, "GRACE", 0.0)
    total, counted, both, lost, back = 16, Counter[int](), threading.Barrier(2), threading.Event(), threading.Event()
    with serve(2) as served:

        def work(rank: int) -> list[bool]:
            with client(links(served, rank), rank, 2) as made:
                found, deal, accepted = copy(made, terms), Deal(made), list[bool]()
                made.paced = [found.number]
                made.gather("all are there", b"")
                while (number := deal.take(1, total)) is not None or made.await_batch(deal, 1):
                    if number is None:
                        continue
                    if len(accepted) == 2:
                        both.wait(20)  # have a batch in hand
                        if rank == 1:
                            hang_up(made.link)
                            until(lambda: served.said != [])
                            lost.set()
                        assert lost.wait(20)
                    elif len(accepted) == 3:  # the lost one has asked for a batch, and so come back
                        if rank == 1:
                            back.set()
                        assert back.wait(20)
                    accepted.append(bool(found.push(Push(epoch=1, batches=((deal.number, 1, number),)))))
                    counted[number] += accepted[-1]
                    deal.finish([number])
                assert made.live() == [0, 1]
                both.wait(20)  # nobody says goodbye before the other has looked
                return accepted

        accepted = together(2, work)
        assert counted == Counter(dict.fromkeys(range(total), 1))
        assert all(accepted[0])
        assert [index for index, each in enumerate(accepted[1]) if not each] == [2], "one push, and no more"
        assert len(accepted[1]) > 3, "it is one of the workers again"
        rounds = "; round 3 ends without it" if terms.staleness == 0 else ""
        assert served.said == [f"hocket: rank 1 was lost{rounds}; 1 of its batches is dealt to others"]
        assert not served.services[0].report().workers["1"]["lost"]


@pytest.mark.usefixtures("patient")
def test_who_is_cut_off_from_a_server_alone_is_not_lost() -> None:
    with serve(2) as served, client(links(served, 0), 0, 2) as made:
        found = copy(made, ASYNCHRONOUS)
        for _ in range(5):
            hang_up(made.first)
            assert found.push(Push())
        assert served.services[0].tables[0].version == 5
        assert made.live() == [0, 1]
        assert served.said == []
