"""Means over several hosts: what is hidden behind computation, and how many buckets are under way."""

from dataclasses import replace
from typing import Any
from unittest import mock

import pytest
import torch
from pool import Pool
from products import rarely

from comm.tcp_groups import groups, together, until
from comm.test_link_model import alike
from hocket.comm.algorithms.network_reductions import Flat, Lane, NetworkTimes
from hocket.comm.bucket_layout import Layout, Limits
from hocket.comm.exchange import Ticket
from hocket.comm.tcp_group import TcpGroup
from hocket.comm.topology import Topology
from hocket.job.worker import current

COUNT = 50_000  # elements of a tensor: more bytes than a group leaves to who waits where links are slow


def round_of(group: TcpGroup, computes: Any) -> NetworkTimes:
    """The times of one round of two buckets, during which the script computes."""
    times = NetworkTimes(f"host {group.rank}")
    topology = Topology(group.rank, tuple((rank,) for rank in range(group.size)), ("a", "b"))
    lane = Lane(topology, [group], times, lambda: None, lambda numbers, what: None)
    layout = Layout([torch.ones(COUNT), torch.ones(COUNT)], limits=Limits(1, 1 << 18))
    flat = Flat(lane, layout, in_place=True)
    for slot in flat.slots:
        slot.fill_(group.rank)
    flat.ready(0)
    flat.begin(Ticket(1, 0, "a test"))
    computes(flat)
    flat.progress()
    flat.finish()
    assert len(flat.results) == 2 and all(float(each.mean()) == 0.5 for each in flat.results)
    return times


@pytest.mark.parametrize("is_slow", [False, True])
def test_only_what_has_begun_is_under_way(is_slow: bool) -> None:
    """Over slow links a thread sends while the script computes; else who waits does, and then nothing is hidden."""

    def all_there(flat: Flat) -> None:
        if is_slow:
            until(lambda: all(work.is_completed() for work in flat._works))

    with groups(2) as members:
        for group in members:
            group.choice.learn(alike(2, rate=1e7 if is_slow else 1e9))
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr("os.sched_getaffinity", lambda _: {0})
            found = together(members, lambda group: round_of(group, all_there))
    for times in found:
        assert isinstance(times, NetworkTimes), times
        assert times.under_way > 0
        assert times.exposed == (0 if is_slow else times.under_way)


def over_long_links() -> list[tuple[int, list[torch.Tensor]]]:
    """For short links, then long ones: how many groups an exchange has, and the means."""
    communicator: Any = current().communicator
    random = torch.Generator().manual_seed(communicator.rank)
    tensors = [torch.randn(70_000, generator=random) for _ in range(8)]
    found = []
    for latency in (1e-4, 1e-2):
        communicator._model = None
        model = replace(alike(communicator.topology.size, rate=1e7), latency=latency)
        with mock.patch("hocket.comm.several_hosts.measure", lambda links, model=model: model):
            exchange = communicator.exchange(Layout(tensors, limits=Limits(1, 1 << 18)))
        exchange.put(tensors)
        for bucket in range(len(exchange.slots) - 1):
            exchange.ready(bucket)
        exchange.begin(Ticket(1, 0, "a test"))
        exchange.finish()
        found.append((len(exchange._turns[0].algorithm._groups), [result.clone() for result in exchange.results]))
        exchange.close()
    return found


@pytest.mark.parametrize("hosts", [[1, 1], rarely([2, 2])])
def test_over_long_links_several_sums_are_under_way(pool: Pool, hosts: list[int]) -> None:
    """The bits are those of sums one after the other."""
    for (few, expected), (several, means) in pool.run(
        sum(hosts), over_long_links, hosts=hosts, on_loss="end", algorithm="ring"
    ):
        assert (few, several) == (1, 3) and len(means) > several
        assert all(torch.equal(mean, each) for mean, each in zip(means, expected, strict=True))
