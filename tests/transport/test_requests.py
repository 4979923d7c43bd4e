"""A link that asks: what happens to its request when a server, the coordinator or their connection fails."""

import os
from collections.abc import Callable
from typing import Any

import pytest
import torch
from server.serving import Served, alone, client, copy, links, local_links, serve, together, train, until

from hocket.coordinator.coordinator_service import Ask
from hocket.errors import DeadlineExceeded, HocketError, JobError, ServerLost
from hocket.messages import Message, WireError
from hocket.server.server_client import Client
from hocket.server.terms import Kind, Push, Terms
from hocket.transport.requests import Link, WireLink

ASYNCHRONOUS = Terms(staleness=None, groups=0)


def connect(served: Served, workers: int, *, tcp: bool = True) -> Client:
    """Rank 0; whoever calls this closes it."""
    found = links(served, 0) if tcp else local_links(served, 0)
    return Client(0, workers, found[0], found[1:])


@pytest.mark.parametrize("to_coordinator", [False, True])
def test_a_garbled_answer_is_asked_for_again(to_coordinator: bool) -> None:
    with serve(1) as served, client(links(served, 0), 0, 1) as made:
        mine = made.link if to_coordinator else made.first
        assert isinstance(mine, WireLink) and mine._wire is not None
        genuine = mine._wire.receive
        once = iter([True])

        def receive() -> Message:
            message = genuine()
            if next(once, False):
                raise WireError("no message begins with that")
            return message

        mine._wire.receive = receive  # type: ignore[method-assign]
        assert torch.allclose(train(made, ASYNCHRONOUS, 4), alone(1, 4), rtol=1e-12, atol=1e-12)
        assert next(once, None) is None


@pytest.mark.few(1)
@pytest.mark.parametrize("tcp", [True, False])
def test_a_coordinator_that_ends_is_told_to_all_who_wait(tcp: bool) -> None:
    with serve(2, tcp=tcp) as served:
        made = connect(served, 2, tcp=tcp)
        waiting = served.coordinator.service.meetings

        def end() -> None:
            until(lambda: bool(waiting._meetings))
            served.coordinator.close()

        def wait() -> None:
            with pytest.raises(ServerLost, match="the coordinator has ended"):
                made.gather("a meeting", b"")

        together(2, lambda number: (end, wait)[number]())
        made.close()
        waiting.fail("over")  # its thread waits for rank 1


@pytest.mark.few(1)
@pytest.mark.parametrize("tcp", [True, False])
def test_a_server_that_ends_is_told_to_all_who_wait(tcp: bool) -> None:
    with serve(2, tcp=tcp) as served:
        made = connect(served, 2, tcp=tcp)

        def end() -> None:
            until(lambda: bool(served.services[0].tables and served.services[0].tables[0]._group.contributions))
            served.fronts[0].close()

        def wait() -> None:
            found = copy(made, Terms())
            with pytest.raises(ServerLost, match="server 0 has ended"):
                found.push(Push())

        together(2, lambda number: (end, wait)[number]())
        made.close()
        served.services[0].lose(1, "was lost")  # for whom its thread waits


def test_a_deadline_is_told_as_one() -> None:
    with serve(2, timeout=0.2) as served, client(links(served, 0), 0, 2) as made:
        with pytest.raises(DeadlineExceeded, match="rank 1 did not come to a meeting"):
            made.gather("a meeting", b"")
        assert served.refused_by_coordinator == {}


@pytest.mark.parametrize("tcp", [True, False])
def test_a_request_that_cannot_be_written_leaves_all_links_as_they_were(tcp: bool) -> None:
    def ask(wrong: int | None) -> Callable[[int, Link], Callable[[], Any]]:
        def begin(number: int, link: Link) -> Callable[[], Any]:
            link.begin(Kind.LEAVE, {"tables": [], "epoch": object() if number == wrong else 0})
            return link.finish

        return begin

    with serve(1, 2, tcp=tcp) as served:
        made = connect(served, 1, tcp=tcp)
        try:
            with pytest.raises(TypeError, match="not JSON serializable"):
                made.each(ask(1))
            assert len(made.each(ask(None))) == 2
            with pytest.raises(TypeError, match="not JSON serializable"):
                made.link.request(Ask.MEMBERSHIP, {"x": object()})
            assert made.live() == [0]
        finally:
            made.close()


def test_a_link_that_was_closed_makes_no_new_connection() -> None:
    with serve(1) as served:
        made = connect(served, 1)
        made.close()
        made.close()
        with pytest.raises(ServerLost, match="said goodbye"):
            made.first.request(Kind.LEAVE, {"tables": []})
        with pytest.raises(ServerLost, match="said goodbye"):
            made.live()


def test_closing_does_not_wait_for_a_request_that_is_under_way(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("hocket.transport.requests._GOODBYE", 0.1)
    with serve(2) as served:
        made = connect(served, 2)
        meetings = served.coordinator.service.meetings

        def work(number: int) -> None:
            if number == 0:
                with pytest.raises(HocketError):
                    made.gather("a meeting", b"")
                return
            until(lambda: bool(meetings._meetings))
            made.close()

        together(2, work)
        meetings.fail("over")


def test_a_forked_child_is_no_worker_and_does_not_keep_the_connection() -> None:
    with serve(1) as served:
        made = connect(served, 1)
        reader, writer = os.pipe()
        release, hold = os.pipe()
        child = os.fork()
        if child == 0:
            for link in (made.first, made.link):
                try:
                    link.request(Ask.MEMBERSHIP, {})
                except JobError as error:
                    os.write(writer, str(error).encode())
            os.close(hold)
            os.close(writer)
            os.read(release, 1)
            os._exit(0)
        os.close(writer)
        os.close(release)
        said = b""
        while part := os.read(reader, 1000):
            said += part
        assert said.count(b"no worker") == 2
        for link in (made.first, made.link):
            assert isinstance(link, WireLink) and link._wire is not None
            link._wire.connection.close()  # as the end of this process would, and no more
        until(lambda: served.said == ["hocket: rank 0 was lost"])
        os.close(hold)
        os.close(reader)
        os.waitpid(child, 0)
