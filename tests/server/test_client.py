"""A worker's links: what happens to them when a server, a request or a connection fails."""

import os
import socket
import threading
from collections.abc import Callable
from contextlib import ExitStack
from typing import Any

import pytest
import torch
from server.serving import (
    SECRET,
    Served,
    alone,
    client,
    copy,
    gradient,
    links,
    local_links,
    serve,
    together,
    train,
    until,
)

from hocket.config import Config
from hocket.errors import HocketError, JobError, ServerLost
from hocket.server import session
from hocket.server.client import Client, open_client
from hocket.server.front import Front
from hocket.server.link import Link, WireLink
from hocket.server.service import Service
from hocket.server.terms import Kind, Push, Terms
from hocket.transport.door import hang_up
from hocket.transport.interfaces import addresses

ASYNCHRONOUS = Terms(staleness=None, groups=0)


def connect(served: Served, tcp: bool) -> list[WireLink]:
    return links(served.ports, 0) if tcp else local_links(served, 0)


def ask(head: dict[str, Any], kind: int = Kind.QUEUE) -> Callable[[int, Link], Callable[[], Any]]:
    def begin(_: int, link: Link) -> Callable[[], Any]:
        link.begin(kind, head)
        return link.finish

    return begin


@pytest.mark.parametrize("tcp", [True, False])
def test_an_error_of_one_server_leaves_all_links_as_they_were(tcp: bool) -> None:
    def begin(number: int, link: Link) -> Callable[[], Any]:
        return ask({"queue": 0 if number != 1 else "x"})(number, link)

    with serve(1, 3, tcp=tcp) as served, client(connect(served, tcp), 0, 1) as made:
        for _ in range(3):
            with pytest.raises(JobError, match="server 1 refused a message"):
                made.each(begin)
        assert len(made.each(ask({"queue": 0}))) == 3


@pytest.mark.parametrize("tcp", [True, False])
def test_a_request_that_cannot_be_written_leaves_all_links_as_they_were(tcp: bool) -> None:
    def begin(number: int, link: Link) -> Callable[[], Any]:
        return ask({"queue": object() if number else 0})(number, link)

    with serve(1, 2, tcp=tcp) as served, client(connect(served, tcp), 0, 1) as made:
        with pytest.raises(TypeError, match="not JSON serializable"):
            made.each(begin)
        assert len(made.each(ask({"queue": 0}))) == 2


def hang_up_all(made: Client) -> None:
    for link in made.links:
        assert isinstance(link, WireLink)
        if link._wire is not None:
            hang_up(link._wire.connection)


def test_a_link_that_was_closed_makes_no_new_connection() -> None:
    with serve(1) as served:
        made = Client(0, 1, links(served.ports, 0))
        made.close()
        made.close()
        with pytest.raises(ServerLost, match="said goodbye"):
            made.first.request(Kind.QUEUE, {"queue": 0})


def test_closing_does_not_wait_for_a_request_that_is_under_way(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("hocket.server.link._GOODBYE", 0.1)
    with serve(2) as served:
        made = Client(0, 2, links(served.ports, 0))
        meetings = served.services[0].meetings

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
        made = Client(0, 1, links(served.ports, 0))
        reader, writer = os.pipe()
        release, hold = os.pipe()
        child = os.fork()
        if child == 0:
            try:
                made.first.request(Kind.QUEUE, {"queue": 0})
            except JobError as error:
                os.write(writer, str(error).encode())
            os.close(hold)
            os.read(release, 1)
            os._exit(0)
        os.close(writer)
        os.close(release)
        assert b"no worker" in os.read(reader, 1000)
        link = made.first
        assert isinstance(link, WireLink) and link._wire is not None
        link._wire.connection.close()  # as the end of this process would, and no more
        until(lambda: served.said == ["hocket: rank 0 was lost"])
        os.close(hold)
        os.close(reader)
        os.waitpid(child, 0)


def test_who_comes_back_after_it_was_taken_for_dead_is_judged_and_its_death_is_noticed_again(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(session, "GRACE", 0.0)
    with serve(2) as served:
        made = Client(0, 2, links(served.ports, 0))
        found = copy(made, ASYNCHRONOUS)
        assert found.push(Push())
        hang_up_all(made)
        until(lambda: len(served.said) == 1)
        assert not found.push(Push()), "its batch was dealt to others"
        assert found.push(Push())
        assert served.services[0].tables[0].version == 2
        assert not served.services[0].report().workers["0"]["lost"]
        hang_up_all(made)
        made.links[0]._is_closed = True  # type: ignore[attr-defined]
        until(lambda: len(served.said) == 2)
        assert served.services[0].report().workers["0"]["lost"]


def test_a_thousand_idle_connections_while_a_worker_trains() -> None:
    with serve(1) as served, client(links(served.ports, 0), 0, 1) as made, ExitStack() as stack:
        found = copy(made, ASYNCHRONOUS)
        for step in range(1000):
            stack.enter_context(socket.create_connection(("127.0.0.1", served.ports[0])))
            if step % 10 == 0:
                flat = found.gradients[0]
                flat.copy_(gradient(0, step // 10, flat.numel()))
                assert found.push(Push())
        assert torch.allclose(found.parameters[0], alone(1, 100), rtol=1e-12, atol=1e-12)
        until(lambda: served.refused.get("without the job's secret", 0) >= 1000 - 128)
        assert sum(thread.name == "hocket-peer" for thread in threading.enumerate()) <= 130


def test_encrypted_from_end_to_end() -> None:
    """Two servers on an address that others could reach, and workers that find them as a job does."""
    found = [address for name, address in addresses() if not address.startswith("127.") and ":" not in address]
    if not found:
        pytest.skip("this host has no address but loopback")
    served = Served([], [], [], [], "")
    port = None
    fields: dict[str, Any] = {"launched": True, "size": 2, "servers": 2, "timeout": 20.0, "address": found[0]}
    try:
        for number in range(2):
            config = Config(server=number, host_address=found[0], port=port, transport="gloo", **fields)
            served.services.append(Service(number, 2, 2, 20.0))
            served.fronts.append(Front(config, SECRET, served.services[-1]))
            port = port or served.fronts[0]._said["port"]

        def work(rank: int) -> torch.Tensor:
            made = open_client(Config(rank=rank, port=port, transport="gloo", **fields), SECRET)
            try:
                for link in made.links:
                    assert isinstance(link, WireLink) and link._wire is not None
                    assert type(link._wire.connection).__name__ == "SSLSocket"
                return train(made, Terms(clip=100.0), 5)
            finally:
                made.close()

        for each in together(2, work):
            assert torch.allclose(each, alone(2, 5), rtol=1e-12, atol=1e-12)
    finally:
        for front in served.fronts:
            front.close()
