"""What every algorithm costs: bytes and messages counted, and rounds on simulated links where only latency counts."""

import math

import pytest
import torch
from products import product

from comm.algorithms.members import MAKES, Counting, halves, simulated, values
from comm.tcp_groups import groups, together
from hocket.comm.algorithms.hierarchical import Hierarchical
from hocket.comm.algorithms.ring import Ring
from hocket.comm.tcp_group import TcpGroup
from hocket.transport.simulated import Speed

SIZES = range(2, 10)
LINE = 64  # slices begin at whole cache lines
COUNTS = [1, 1000, 12_345]
ALIKE = ["ring", "halving_doubling"]  # each member sends and receives as much as any other


def log2(size: int) -> int:
    return math.ceil(math.log2(size))


def on_simulated_links(name: str, size: int, count: int) -> list[Counting]:
    mine = values(size, count, torch.float32)
    return simulated(size, lambda links: MAKES[name](size).allreduce(links, mine[links.rank], "sum"), Speed())[0]


def over_tcp(name: str, size: int, count: int) -> list[Counting]:
    mine, found = values(size, count, torch.float32), dict[int, Counting]()

    def count_all(group: TcpGroup) -> None:
        links = found[group.rank] = Counting(group._links)
        group._do(lambda: MAKES[name](size).allreduce(links, mine[group.rank], "sum"), "a test")

    with groups(size) as members:
        assert together(members, count_all) == [None] * size
    return [found[rank] for rank in range(size)]


WAYS = {"simulated": on_simulated_links, "tcp": over_tcp}


@product("way", way=WAYS, name=["ring", "tree", "halving_doubling", "star"], size=SIZES, count=COUNTS)
def test_all_together_send_the_least(way: str, name: str, size: int, count: int) -> None:
    """2N(P - 1) bytes: each member's values have to go somewhere, and each member has to get the result."""
    members = WAYS[way](name, size, count)
    assert sum(member.nbytes for member in members) == 2 * 4 * count * (size - 1)
    assert sum(member.received for member in members) == 2 * 4 * count * (size - 1)


@product("way", way=WAYS, name=ALIKE, size=SIZES, count=COUNTS)
def test_members_share_the_bytes(way: str, name: str, size: int, count: int) -> None:
    """2N(P - 1)/P bytes from and to each member, as far as slices are equal."""
    slack = 2 * (size - 1) * LINE
    for member in WAYS[way](name, size, count):
        for nbytes in (member.nbytes, member.received):
            assert nbytes <= 2 * (size - 1) * (4 * count / size + LINE)
            assert nbytes >= 2 * (size - 1) * 4 * count / size - slack * size


@product("way", way=WAYS, size=SIZES, count=COUNTS)
def test_all_goes_through_the_root_of_a_star(way: str, size: int, count: int) -> None:
    root, *others = WAYS[way]("star", size, count)
    assert root.nbytes + root.received == 2 * 4 * count * (size - 1)
    assert all(member.sent == {0: 4 * count} for member in others)


@pytest.mark.few(6)
@product("way", way=WAYS, size=SIZES, count=COUNTS)
def test_direct_sends_everything_to_all(way: str, size: int, count: int) -> None:
    for member in WAYS[way]("direct", size, count):
        assert member.sent == {other: 4 * count for other in range(size) if other != member.rank}
        assert member.messages == size - 1


@pytest.mark.few(6)
@product("way", way=WAYS, size=SIZES)
def test_messages(way: str, size: int) -> None:
    """Of so little data that it travels in one piece."""
    count = 64 * size
    messages = {name: [member.messages for member in WAYS[way](name, size, count)] for name in MAKES}
    assert messages["ring"] == [2 * (size - 1)] * size
    assert messages["halving_doubling"] == [2 * log2(size)] * size
    assert messages["star"] == [size - 1] + [1] * (size - 1)
    assert sum(messages["tree"]) == 2 * (size - 1)
    assert max(messages["tree"]) <= 3


@pytest.mark.parametrize("size", SIZES)
def test_rounds(size: int) -> None:
    """Messages that have to wait for each other, one after the other."""

    def rounds(name: str) -> float:
        mine = values(size, 64 * size, torch.float32)
        call = MAKES[name](size).allreduce
        return simulated(size, lambda links: call(links, mine[links.rank], "sum"), Speed(latency=1.0))[1]

    assert rounds("ring") == 2 * (size - 1)
    assert rounds("tree") == 2 * log2(size)
    assert rounds("halving_doubling") == 2 * log2(size)
    assert rounds("star") == 2
    assert rounds("direct") == 1


@pytest.mark.few(3)
@pytest.mark.parametrize("size", SIZES)
def test_time_for_the_bytes(size: int) -> None:
    """Where bandwidth is all that counts: how many bytes pass the busiest member, one way."""
    count = 1 << 19  # 2 MiB, in many pieces

    def seconds(name: str) -> float:
        mine = values(size, count, torch.float32)
        call = MAKES[name](size).allreduce
        return simulated(size, lambda links: call(links, mine[links.rank], "sum"), Speed(bandwidth=4 * count))[1]

    share = (size - 1) / size
    assert seconds("ring") == pytest.approx(2 * share, rel=0.02)
    assert seconds("halving_doubling") == pytest.approx(2 * share, rel=0.02)
    assert seconds("direct") == pytest.approx(size - 1)
    assert size - 1 <= seconds("star") <= (size - 1) * (1 + 1 / 8) + 1 / 8  # both ways at once, but for a piece
    assert seconds("tree") <= (3 if size > 3 else 2) + 2 * log2(size) * 3 / 8


def test_little_crosses_between_groups() -> None:
    """Three levels: all members of a group together send each byte across its border once, each way, and no more."""
    size, count = 8, 4096
    mine = values(size, count, torch.float32)
    algorithm = Hierarchical(halves(size))
    members, _ = simulated(size, lambda links: algorithm.allreduce(links, mine[links.rank], "sum"), Speed())

    def crossing(group: int) -> int:
        return sum(
            nbytes for member in members for to, nbytes in member.sent.items() if member.rank // group != to // group
        )

    assert crossing(4) == 2 * 4 * count  # two sites: 2N(S - 1)
    assert crossing(2) == 2 * 4 * count + 2 * 2 * 4 * count  # and the pairs of each site
    around = simulated(size, lambda links: Ring().allreduce(links, mine[links.rank], "sum"), Speed())[0]
    assert sum(member.nbytes for member in around) == sum(member.nbytes for member in members)
