"""What is predicted of algorithms over links, against the same algorithms on simulated links."""

import contextlib
import io
from typing import Any

import pytest
import torch
from pool import Pool
from products import product

from comm.algorithms.members import MAKES, simulated, values
from comm.tcp_groups import groups, together
from hocket.comm.algorithm_choice import Choice, choices
from hocket.comm.algorithms.hierarchical import Hierarchical
from hocket.comm.algorithms.ring import Ring
from hocket.comm.link_model import LinkModel
from hocket.config import SETTINGS
from hocket.job.worker import current
from hocket.transport.simulated import Speed

FAST, SLOW = 1e9, 6.25e6
ALTERNATING = [0, 2], [1, 3]  # the ranks of two sites


def alike(size: int, rate: float = 1e8, latency: float = 1e-4) -> LinkModel:
    return LinkModel(latency, tuple(tuple(rate for _ in range(size)) for _ in range(size)))


def in_sites(sites: tuple[list[int], ...]) -> LinkModel:
    """Sites that are joined by a link of twice SLOW: two pairs of members shared it when it was measured."""
    size = sum(map(len, sites))
    site = {rank: number for number, ranks in enumerate(sites) for rank in ranks}
    rates = (tuple(FAST if site[a] == site[b] else SLOW for b in range(size)) for a in range(size))
    return LinkModel(1e-4, tuple(rates))


@pytest.mark.few(14)
@product("name", name=["ring", "tree", "halving_doubling", "star", "direct"], size=range(2, 10), nbytes=[4096, 4 << 20])
def test_a_prediction_is_what_simulated_links_take(name: str, size: int, nbytes: int) -> None:
    latency, rate = 1e-3, 1e8
    mine = values(size, nbytes // 4, torch.float32)
    call = MAKES[name](size).allreduce
    took = simulated(size, lambda links: call(links, mine[links.rank], "sum"), Speed(latency, rate))[1]
    assert alike(size, rate, latency).predict(MAKES[name](size), nbytes) == pytest.approx(took, rel=0.25)


def test_sites_are_found() -> None:
    assert alike(5).sites == [0, 1, 2, 3, 4] and not alike(5).has_sites
    model = in_sites(ALTERNATING)
    assert model.sites == [[0, 2], [1, 3]] and model.order == [0, 2, 1, 3]
    assert in_sites(([0, 1, 2], [3])).sites == [[0, 1, 2], [3]]


def test_three_levels() -> None:
    """Pairs of members on a host, two hosts in a site, two sites."""

    def rate(a: int, b: int) -> float:
        return 1e10 if a // 2 == b // 2 else 1e9 if a // 4 == b // 4 else 1e7

    model = LinkModel(1e-4, tuple(tuple(rate(a, b) for b in range(8)) for a in range(8)))
    assert model.sites == [[[0, 1], [2, 3]], [[4, 5], [6, 7]]]


def test_what_two_sites_share_counts_once() -> None:
    """64 MiB over a trunk: a ring that alternates sends all its slices over it twice at a time, an ordered one once."""
    model, nbytes = in_sites(ALTERNATING), 64 << 20
    trunk = nbytes / (2 * SLOW)
    assert model.predict(Ring(), nbytes) == pytest.approx(3 * trunk, rel=0.02)
    assert model.predict(Ring(), nbytes, model.order) == pytest.approx(1.5 * trunk, rel=0.02)
    assert model.predict(Hierarchical(model.sites), nbytes) == pytest.approx(trunk, rel=0.1)
    choice = Choice("auto", 4)
    choice.learn(in_sites(([0, 1], [2, 3])))
    assert choice.pick(nbytes).algorithm.name == "hierarchical"


def test_small_sums_go_to_all_at_once_and_large_ones_round_a_ring() -> None:
    choice = Choice("auto", 4)
    assert [choice.pick(nbytes).algorithm.name for nbytes in (4, 1 << 26)] == ["direct", "ring"]
    choice.learn(alike(4))
    assert choice.pick(4).algorithm.name == "direct"
    assert choice.pick(64 << 20).algorithm.name in ("ring", "halving_doubling")
    for nbytes in (4096, 1 << 20, 64 << 20):
        assert choice.pick(nbytes).seconds == min(choice.predict(name, nbytes).seconds for name in choices(alike(4)))


@pytest.mark.few(5)
@pytest.mark.parametrize("name", SETTINGS["algorithm"].choices)
@pytest.mark.parametrize("knows", [False, True])
def test_an_algorithm_by_name(name: str, knows: bool) -> None:
    mine = values(4, 5000, torch.float64)
    whole = torch.stack(mine).sum(0)
    with groups(4) as members:
        for group in members:
            group.choice.asked = name
            if knows:
                group.choice.learn(in_sites(ALTERNATING))
        together(members, lambda group: group.allreduce(mine[group.rank], "sum", "a test"))
        assert all(torch.equal(each, mine[0]) for each in mine)
        assert torch.allclose(mine[0], whole)
        assert name == "auto" or list(members[0].uses) == [name]


@pytest.mark.parametrize("name", ["ring", "tree", "halving_doubling", "star", "direct"])
def test_the_bits_of_a_named_algorithm_do_not_follow_what_was_measured(name: str) -> None:

    def add_up(model: LinkModel | None) -> list[torch.Tensor]:
        mine, pick = values(4, 5001, torch.float32), Choice(name, 4, model).pick(20_004)
        simulated(4, lambda links: pick.allreduce(links, mine[links.rank], "sum"), Speed(1e-5, 1e8))
        return mine

    first, *others = (each for model in (None, alike(4), in_sites(ALTERNATING)) for each in add_up(model))
    assert all(torch.equal(each, first) for each in others)
    assert Choice("auto", 4, in_sites(ALTERNATING)).predict("ring", 64 << 20).order == [0, 2, 1, 3]


def hierarchical() -> str:
    """What is said when a small exchange begins."""
    with contextlib.redirect_stderr(io.StringIO()) as said:
        communicator: Any = current().communicator
        assert communicator.open_lane(1000).groups[0].choice.model.sites
    return said.getvalue()


def test_that_there_are_no_sites_is_said_once(pool: Pool) -> None:
    """It is measured before any exchange: two hosts cannot be in several sites."""
    said = "".join(pool.run(2, hierarchical, hosts=[1, 1], on_loss="end", algorithm="hierarchical"))
    assert said.count("--algorithm hierarchical: no host is closer to some hosts than to others") == 1
