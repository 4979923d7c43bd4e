"""Collectives of a group over connections: whenever a member dies in one, it is over for all others, or for none."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st
from pool import Pool
from products import product

from comm.algorithms.members import values
from comm.tcp_groups import Guard, groups, together
from comm.test_link_model import alike, in_sites
from hocket.comm import group_operations as operations
from hocket.comm.algorithm_choice import Choice, Pick
from hocket.comm.channel import AloneChannel
from hocket.comm.group_operations import Gone, Party
from hocket.comm.groups import Line, Task
from hocket.comm.tcp_group import TcpGroup
from hocket.errors import MismatchError, WorkerLost
from hocket.job.worker import current
from hocket.transport.point_to_point import PointToPoint

BIG = 100_000  # elements that go round a ring, in several pieces


class Death(BaseException):
    """A worker is killed."""


class Mortal:
    """Messages of a member that dies with one of them."""

    def __init__(self, links: PointToPoint, messages: int) -> None:
        self.rank, self.size, self._links, self._left = links.rank, links.size, links, messages

    def send(self, to: int, *parts: torch.Tensor) -> None:
        self._pass()
        self._links.send(to, *parts)

    def receive(self, source: int, *into: torch.Tensor) -> None:
        self._pass()
        self._links.receive(source, *into)

    def flush(self) -> None:
        self._links.flush()

    def _pass(self) -> None:
        self._left -= 1
        if self._left < 0:
            raise Death


OPERATIONS: dict[str, Callable[[Party, torch.Tensor], Any]] = {
    "allreduce": lambda party, x: operations.allreduce(party, x, "sum"),
    "reduce": lambda party, x: operations.reduce(party, x, "max", 1),
    "broadcast": lambda party, x: operations.broadcast(party, x, 1),
    "allgather": operations.allgather,
    "allgather_rows": operations.allgather_rows,
    "gather": lambda party, x: operations.gather(party, x, 0),
    "scatter": lambda party, x: operations.scatter(party, [x] * party.size if party.me == 1 else None, 1),
    "reduce_scatter": lambda party, x: operations.reduce_scatter(party, x, "sum", [1] * party.size),
    "alltoall": lambda party, x: operations.alltoall(party, x, [1] * party.size),
    "barrier": lambda party, _: operations.barrier(party),
    "send": lambda party, x: operations.send(party, x) if party.me == 0 else operations.receive(party, None),
}


class Watching(Guard):
    """Knows at once that somebody is lost when a connection has ended."""

    def explain(self, error: Exception, what: Any) -> Exception:
        self.lost = "a member died"
        return super().explain(error, what)


@settings(max_examples=60)
@given(
    name=st.sampled_from(list(OPERATIONS)),
    size=st.integers(2, 4),
    count=st.sampled_from([1, BIG]),
    dead=st.integers(0, 3),
    messages=st.integers(0, 30),
    in_thread=st.booleans(),
)
@example(name="broadcast", size=3, count=1, dead=1, messages=6, in_thread=False)
@example(name="gather", size=3, count=BIG, dead=2, messages=7, in_thread=True)
def test_over_for_all_or_for_none(name: str, size: int, count: int, dead: int, messages: int, in_thread: bool) -> None:
    size = 2 if name == "send" else size
    dead %= size
    everyone, x = range(size), torch.ones(size, count)
    lines = [Line(everyone) for _ in everyone]

    def work(group: TcpGroup) -> str:
        line = lines[group.rank]
        task = Task(name, x.nbytes, lambda party: OPERATIONS[name](party, x), waits=True)
        task.number, task.commits = 1, True
        carry = line.carry_out(task, everyone, everyone)
        if group.rank == dead:
            with pytest.raises(Death):
                group.run(lambda links: carry(Mortal(links, messages)), 0, name)
                raise Death  # it dies after it
            group.close()
            return "dead"
        if in_thread:
            group.wait(group.start(carry), name)
        else:
            group.run(carry, 0, name)
        task.result()
        return "over"

    with groups(size, guard=Watching()) as members:
        found = together(members, work)
    told = [each for rank, each in enumerate(found) if rank != dead]
    assert all(each == "over" or isinstance(each, WorkerLost) for each in told), told
    if "over" in told:
        assert all(lines[rank].have == 1 for rank in everyone if rank != dead)


def test_everybody_is_told_what_all_came_for() -> None:
    def disagree(party: Party, _: torch.Tensor) -> None:
        party.agree(f"something else of rank {party.me}" if party.me else "something")

    with groups(3) as members:

        def work(group: TcpGroup) -> None:
            found: list[Exception] = []

            def call(links: PointToPoint) -> None:
                try:
                    disagree(Party(links, [4, 5, 7], "a call", [0, 1, 2]), torch.ones(1))
                except MismatchError as error:
                    found.append(error)

            group.run(call, 0, "a test")
            assert "rank 4: a call: something; rank 5: a call: something else of rank 1; rank 7:" in str(found[0])
            group.run(lambda links: operations.barrier(Party(links, [4, 5, 7], "", [0, 1, 2])), 0, "a test")

        assert together(members, work) == [None] * 3


def test_a_collective_without_its_root_is_told() -> None:
    with groups(2) as members:

        def work(group: TcpGroup) -> Any:
            task = Task("a call", 0, lambda party: party.find(2), waits=True, call="a call")
            line = Line([0, 1])
            group.run(line.carry_out(task, [0, 1], [0, 1]), 0, "a test")
            return task.result()

        for each in together(members, work):
            assert isinstance(each, Gone) and "a call: worker 2 is gone" in str(each)


class Noting(Choice):
    """Notes what it has picked."""

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        self.noted: list[tuple[int, str, bool]] = []

    def pick(self, nbytes: int, **options: bool) -> Pick:
        found = super().pick(nbytes, **options)
        self.noted.append((nbytes, found.algorithm.name, found.seconds is not None))
        return found


SUMS = ["allreduce", "reduce", "broadcast", "allgather", "reduce_scatter"]


def carried_out(operation: str, choices: list[Noting], count: int) -> list[list[tuple[int, str, bool]]]:
    """What each member has picked for a collective, whose results are right."""
    size = len(choices)
    mine = values(size, count * size, torch.float64)
    with groups(size) as members:

        def work(group: TcpGroup) -> Any:
            found: list[Any] = []
            rank = group.rank
            ranks = range(size)

            def call(links: PointToPoint) -> None:
                party = Party(links, ranks, "", ranks, choices[rank])
                found.append(OPERATIONS[operation](party, mine[rank].view(size, count)))

            group.run(call, 0, "a test")
            return found[0]

        results = together(members, work)
    summed, stacked = torch.stack(mine).sum(0).view(size, count), torch.stack(mine).view(size, size, count)
    for rank, result in enumerate(results):
        expected = {
            "allreduce": summed,
            "reduce": stacked.amax(0) if rank == 1 else None,
            "broadcast": stacked[1],
            "allgather": stacked,
            "reduce_scatter": summed[rank : rank + 1],
        }[operation]
        assert (expected is None and result is None) or torch.allclose(result, expected), (rank, result)
    return [choice.noted for choice in choices]


@pytest.mark.few(10)
@product("operation", operation=SUMS, name=["ring", "tree", "halving_doubling", "star", "direct", "hierarchical"])
def test_the_algorithm_that_was_asked_for(operation: str, name: str) -> None:
    model = in_sites(([0, 2], [1, 3])) if name in ("ring", "hierarchical") else None
    noted = carried_out(operation, [Noting(name, 4, model) for _ in range(4)], 3)
    assert [[each[1] for each in one] for one in noted] == [[name]] * 4


@product("operation", operation=SUMS, count=[3, 20_000])
def test_what_the_links_favour_over_two_sites(operation: str, count: int) -> None:
    """Rings go from site to site once; each result is the same, whichever order that is."""
    noted = carried_out(operation, [Noting("auto", 4, in_sites(([0, 2], [1, 3]))) for _ in range(4)], count)
    assert all(one == noted[0] for one in noted)
    assert noted[0][0][2], "nothing was predicted"


def test_links_count_if_all_members_know_them() -> None:
    """One has measured them a moment ago, in another thread; two has not come to that yet."""
    knows = [Noting("auto", 3, alike(3)), Noting("auto", 3), Noting("auto", 3, alike(3))]
    noted = carried_out("allreduce", knows, 50_000)
    assert all([each[1:] for each in one] == [("ring", False)] for one in noted)


def test_a_few_picks_serve_tensors_of_many_sizes() -> None:
    choice = Noting("auto", 2, alike(2))
    party = Party(AloneChannel(), [0], "", [0], choice)
    for count in range(1000, 2000):
        party.choose(torch.empty(count))
    assert len({nbytes for nbytes, _, _ in choice.noted}) <= 6


def open_channels() -> list[Any]:
    """What channels of some ranks know when the links between the hosts were measured, and one opened before that."""
    communicator = current().communicator
    pair = [1, 2] if communicator.rank == 1 else [0, 2]
    channels: list[Any] = [communicator.open_channel("all", [0, 1, 2]), communicator.open_channel("before", pair)]
    assert all(channel.choice.model is None for channel in channels)
    assert all(channel._links.refused is communicator.traffic.refused for channel in channels)
    communicator.open_lane(2 << 20)
    channels.append(communicator.open_channel("after", pair))
    return [pair, *((channel.choice.asked, channel.choice.model.rates) for channel in channels)]


def test_channels_have_the_choice_of_their_communicator(pool: Pool) -> None:
    found = pool.run(3, open_channels, hosts=[1] * 3, on_loss="end", algorithm="tree")
    for pair, (_, whole), *others in found:
        rates = tuple(tuple(whole[a][b] for b in pair) for a in pair)
        assert others == [("tree", rates)] * 2
