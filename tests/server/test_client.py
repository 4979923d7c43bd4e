"""A worker's client: one link to the coordinator and one to each server, and what happens when they fail."""

import dataclasses
import socket
import threading
from collections.abc import Callable
from contextlib import ExitStack
from typing import Any

import pytest
import torch
from server.serving import (
    SECRET,
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
from hocket.coordinator.hosting import HostedCoordinator
from hocket.errors import JobError
from hocket.server.front import Front
from hocket.server.server_client import Client, open_client
from hocket.server.server_service import Service
from hocket.server.terms import Kind, Push, Terms
from hocket.transport import replies
from hocket.transport.door import hang_up
from hocket.transport.interfaces import addresses
from hocket.transport.requests import Link, WireLink

ASYNCHRONOUS = Terms(staleness=None, groups=0)


@pytest.mark.parametrize("tcp", [True, False])
def test_an_error_of_one_server_leaves_all_links_as_they_were(tcp: bool) -> None:
    def ask(wrong: int | None) -> Callable[[int, Link], Callable[[], Any]]:
        def begin(number: int, link: Link) -> Callable[[], Any]:
            link.begin(Kind.LEAVE, {"epoch": 0, "tables": [] if number != wrong else "x"})
            return link.finish

        return begin

    with serve(1, 3, tcp=tcp) as served, client(links(served, 0) if tcp else local_links(served, 0), 0, 1) as made:
        for _ in range(3):
            with pytest.raises(JobError, match="server 1 refused a message"):
                made.each(ask(1))
        assert len(made.each(ask(None))) == 3


def hang_up_at(found: list[Link]) -> None:
    for link in found:
        assert isinstance(link, WireLink)
        if link._wire is not None:
            hang_up(link._wire.connection)


@pytest.mark.parametrize("everywhere", [False, True])
def test_who_comes_back_after_it_was_taken_for_dead_is_judged_and_its_death_is_noticed_again(
    everywhere: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whether its connections to the servers break, too, or only the one to the coordinator, who decides."""
    monkeypatch.setattr(replies, "GRACE", 0.0)
    with serve(2) as served:
        coordinator, *others = links(served, 0)
        made = Client(0, 2, coordinator, others)
        found = copy(made, ASYNCHRONOUS)
        assert found.push(Push())
        broken: list[Link] = [coordinator, *(others if everywhere else [])]
        hang_up_at(broken)
        until(lambda: len(served.said) == 1)
        assert not found.push(Push()), "its batch was dealt to others"
        assert found.push(Push())
        assert served.services[0].tables[0].version == 2
        assert not served.services[0].report().workers["0"]["lost"]
        coordinator._is_closed = True
        hang_up_at(broken)
        until(lambda: len(served.said) == 2)
        assert served.services[0].report().workers["0"]["lost"]
        for link in others:
            link.close()


def test_a_thousand_idle_connections_while_a_worker_trains() -> None:
    with serve(1) as served, client(links(served, 0), 0, 1) as made, ExitStack() as stack:
        found = copy(made, ASYNCHRONOUS)
        for step in range(1000):
            stack.enter_context(socket.create_connection(("127.0.0.1", served.ports[0])))
            if step % 10 == 0:
                flat = found.gradients[0]
                flat.copy_(gradient(0, step // 10, flat.numel()))
                assert found.push(Push())
        assert torch.allclose(found.parameters[0], alone(1, 100), rtol=1e-12, atol=1e-12)
        until(lambda: served.refused.get("without the job's secret", 0) >= 1000 - 128)
        known = 4  # the worker at both, the server at the coordinator, and the coordinator at the server
        until(lambda: sum(thread.name == "hocket-peer" for thread in threading.enumerate()) <= 128 + known)


def test_encrypted_from_end_to_end(free_port: int) -> None:
    """Two servers on an address that others could reach, and workers that find them as a job does."""
    found = [address for name, address in addresses() if not address.startswith("127.") and ":" not in address]
    if not found:
        pytest.skip("this host has no address but loopback")
    fields = Config(
        launched=True,
        size=2,
        servers=2,
        timeout=20.0,
        address=found[0],
        host_address=found[0],
        coordinator_port=free_port,
        transport="gloo",
    )
    with ExitStack() as stack:
        coordinator = HostedCoordinator(fields, SECRET)
        stack.callback(coordinator.close)
        for number in range(2):
            service = Service(number, 2, 20.0)
            stack.callback(Front(dataclasses.replace(fields, server=number), SECRET, service).close)

        def work(rank: int) -> torch.Tensor:
            made = open_client(dataclasses.replace(fields, rank=rank), SECRET)
            try:
                for link in [made.link, *made.links]:
                    assert isinstance(link, WireLink) and link._wire is not None
                    assert type(link._wire.connection).__name__ == "SSLSocket"
                return train(made, Terms(clip=100.0), 5)
            finally:
                made.close()

        for each in together(2, work):
            assert torch.allclose(each, alone(2, 5), rtol=1e-12, atol=1e-12)
