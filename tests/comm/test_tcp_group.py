"""A group over TCP: what collectives give, and that a group can be left in the middle of any of them."""

import os
import socket
import threading
import time
from pathlib import Path

import load
import pytest
import torch
from products import product, rarely

from comm.algorithms.members import OPERATIONS, TYPES, reference, values
from comm.tcp_groups import ADDRESS, SECRET, Guard, groups, together, until
from comm.test_link_model import in_sites
from hocket.comm.tcp_group import TcpGroup
from hocket.config import SETTINGS
from hocket.errors import DeadlineExceeded, JobError, WorkerLost
from hocket.transport import door
from hocket.transport.door import knock
from hocket.transport.member_links import Links

BIG = 3_000_000


@pytest.mark.few(7)
@product("size", size=[2, 3, 5], dtype=TYPES, operation=OPERATIONS, count=[0, 1, 4000, 70_001, 400_000])
def test_allreduce(size: int, dtype: torch.dtype, operation: str, count: int) -> None:
    mine = values(size, count, dtype)
    expected = reference(mine, operation)
    with groups(size) as members:
        together(members, lambda group: group.allreduce(mine[group.rank], operation, "a test"))
    assert all(torch.equal(each, mine[0]) for each in mine)
    error = size * torch.finfo(dtype).eps if dtype.is_floating_point else 0.0
    assert torch.allclose(mine[0].double(), expected.double(), rtol=error, atol=0)


@product("encrypted", encrypted=[False, True], size=[2, 4], count=[1, 1000, 300_001], root=[0, 1])
def test_gather_and_broadcast(encrypted: bool, size: int, count: int, root: int) -> None:
    mine = values(size, count, torch.float64)
    whole = [each.clone() for each in mine]

    def all_of_them(group: TcpGroup) -> None:
        gathered = group.allgather(mine[group.rank], "a test")
        assert all(torch.equal(a, b) for a, b in zip(gathered, whole, strict=True))
        collected = group.gather(mine[group.rank], root, "a test")
        assert len(collected) == (size if group.rank == root else 0)
        assert all(torch.equal(a, b) for a, b in zip(collected, whole, strict=False))
        group.broadcast(mine[group.rank], root, "a test")
        assert torch.equal(mine[group.rank], whole[root])

    with groups(size, encrypted=encrypted) as members:
        assert together(members, all_of_them) == [None] * size


@pytest.mark.parametrize("size", [2, 3, 4, 5, 6])
def test_confirm(size: int) -> None:
    here = [0]
    lock = threading.Lock()

    def twice(group: TcpGroup) -> tuple[bool, bool, bool]:
        with lock:
            here[0] += 1
        first = group.confirm(7, "a test")
        are_all_here = here[0] == size
        return first, are_all_here, group.confirm(7 + (group.rank == size - 1), "another test")

    with groups(size) as members:
        assert together(members, twice) == [(True, True, False)] * size


def test_a_collective_after_those_under_way() -> None:
    mine = values(3, BIG, torch.float32)
    expected, small = reference(mine, "sum"), values(3, 5, torch.float32)

    def several(group: TcpGroup) -> float:
        work = group.start_sum(mine[group.rank])
        group.allreduce(small[group.rank], "max", "a test")
        assert work.is_completed()
        group.wait(work, "a test")
        return float(group.allgather(small[group.rank], "a test")[0][0])

    with groups(3) as members:
        assert len(set(together(members, several))) == 1
    assert torch.allclose(mine[0], expected)


def test_small_collectives_of_one_member_run_ahead() -> None:
    """One member broadcasts much that the other has not asked for yet."""
    with groups(2) as members:

        def many(group: TcpGroup) -> list[float]:
            found = []
            for number in range(300):
                value = torch.full((2000,), float(number if group.rank == 0 else -1))
                group.broadcast(value, 0, "a test")
                found.append(float(value[-1]))
            return found

        assert together(members, many) == [[float(number) for number in range(300)]] * 2


def descriptors() -> int:
    return len(os.listdir("/proc/self/fd"))  # noqa: PTH208


def mine_of_threads() -> set[str]:
    return {thread.name for thread in threading.enumerate() if thread.name.startswith("hocket")}


@pytest.mark.parametrize("encrypted", [False, True])
@pytest.mark.parametrize("at", ["idle", "a big sum", "a small one"])
def test_nothing_is_left(at: str, encrypted: bool) -> None:
    with groups(2, encrypted=encrypted):
        pass  # what is imported, and opened once
    before = descriptors()
    with groups(3, encrypted=encrypted) as members:
        works = [] if at != "a big sum" else [group.start_sum(torch.ones(BIG)) for group in members[:2]]
        waits = threading.Thread(target=lambda: together(members[:1], lambda g: g.allgather(torch.ones(3), "a test")))
        if at == "a small one":
            waits.start()
        assert not any(work.is_completed() for work in works)
        for group in members:
            group.close()
        assert all(work.is_completed() and isinstance(work.error, JobError) for work in works)
        if at == "a small one":
            waits.join(5)
            assert not waits.is_alive()
    until(lambda: not mine_of_threads() and descriptors() == before)


NAMED = sorted({*SETTINGS["algorithm"].choices} - {"auto"})
LOSSES = [(lost, count) for lost in (0, 1, 3) for count in (3, BIG)]
OFTEN = [("auto", *each) for each in LOSSES] + [(name, *LOSSES[i % 3 * 2 + 1]) for i, name in enumerate(NAMED)]
RARELY = [(name, *each) for name in NAMED for each in LOSSES if (name, *each) not in OFTEN]


@pytest.mark.few(4)
@pytest.mark.parametrize(("name", "lost", "count"), [*OFTEN, *(rarely(*each) for each in RARELY)])
def test_all_notice_that_one_is_lost(name: str, lost: int, count: int) -> None:
    """One of four leaves in the middle of a sum: the others are told at once, and their tensors are let alone."""
    mine = values(4, count, torch.float32)
    with groups(4) as members:
        for group in members:
            group.choice.asked = name
            if name == "hierarchical":
                group.choice.learn(in_sites(([0, 2], [1, 3])))
        left = [group for group in members if group.rank != lost]
        works = {group.rank: group.start_sum(mine[group.rank]) for group in left}
        begun = time.monotonic()
        threading.Timer(0.1, members[lost].close).start()

        def wait(group: TcpGroup) -> float:
            with pytest.raises(WorkerLost):
                group.wait(works[group.rank], "a test")
            seconds = time.monotonic() - begun
            after = mine[group.rank].clone()
            time.sleep(0.05)
            assert torch.equal(after, mine[group.rank])
            return seconds

        told = together(left, wait)
        assert all(seconds < 1.1 + load.share() - 1 for seconds in told), told
        for group in left:
            with pytest.raises(WorkerLost):
                group.allreduce(torch.ones(2), "sum", "a test")


def test_a_wait_ends_when_the_watch_says_so() -> None:
    guard = Guard(timeout=0.3)
    with groups(2, guard=guard) as members:
        value = torch.ones(BIG)
        with pytest.raises(DeadlineExceeded):
            members[0].allreduce(value, "sum", "a test")
        with pytest.raises(WorkerLost):
            members[1].allreduce(torch.ones(BIG), "sum", "a test")
    guard = Guard()
    with groups(2, guard=guard) as members:
        threading.Timer(0.1, lambda: setattr(guard, "lost", "rank 1 is gone")).start()
        with pytest.raises(WorkerLost, match="rank 1 is gone, in a test"):
            members[0].allgather(torch.ones(3), "a test")


def test_a_member_may_take_its_time(monkeypatch: pytest.MonkeyPatch) -> None:
    """One that is alive and takes in nothing, for longer than an unanswered byte may take, is waited for."""
    monkeypatch.setattr(door, "_SILENCE", 300)
    with groups(2) as members:

        def late(group: TcpGroup) -> float:
            time.sleep(1.2 * group.rank)  # it is the time itself that is tested
            value = torch.ones(4 * BIG)
            group.allreduce(value, "sum", "a test")
            return float(value[-1])

        assert together(members, late) == [2.0, 2.0]


def test_sums_are_done_in_their_order_by_who_waits() -> None:
    """Small ones that nobody has carried out yet come before, and a later one may be waited for first."""
    with groups(3) as members:

        def several(group: TcpGroup) -> list[float]:
            values = [torch.full((10,), float(number)) for number in range(5)]
            works = [group.start_sum(value) for value in values]
            assert not any(work.is_completed() for work in works)
            for work in reversed(works):
                group.wait(work, "a test")
            return [float(value[0]) for value in values]

        assert together(members, several) == [[0.0, 3.0, 6.0, 9.0, 12.0]] * 3
        assert not any(thread.startswith("hocket-group") for thread in mine_of_threads())


def test_other_sizes_are_refused() -> None:
    with groups(2) as members:
        outcomes = together(members, lambda group: group.allgather(torch.ones(3 + group.rank), "a test"))
    assert all(isinstance(outcome, JobError) for outcome in outcomes)
    assert any("bytes was to come" in str(outcome) for outcome in outcomes)


def listening() -> set[str]:
    lines = [line.split() for line in Path("/proc/self/net/tcp").read_text().splitlines()[1:]]
    held = {str(path.readlink()) for path in Path("/proc/self/fd").iterdir() if os.path.lexists(path)}
    return {fields[1] for fields in lines if fields[3] == "0A" and f"socket:[{fields[9]}]" in held}


def test_nobody_listens_when_all_have_come() -> None:
    before = listening()
    with groups(2):
        assert listening() == before


def test_strangers_do_not_come_in() -> None:
    """Neither one without the secret nor a member of another group, and neither is in the way."""
    links = Links("test", 0, 2, SECRET, ADDRESS, lambda _: False)
    other = Links("another", 1, 2, SECRET, ADDRESS, lambda _: False)
    try:
        port = links.said["port"]
        with socket.create_connection((ADDRESS, port)) as stranger:
            stranger.sendall(b"x" * 1000)
            stranger.settimeout(10)
            with pytest.raises((ConnectionError, EOFError)):
                while True:
                    if not stranger.recv(100):
                        raise EOFError
        deadline = time.monotonic() + 10
        wire = knock(ADDRESS, port, SECRET, 7, deadline, encrypted=False)  # the group has no member 7
        wire.close()
        assert other._reach(0, links.said, 1.0, deadline)
        until(lambda: not links._coming and links.refused.total() == 3)
        assert not links._in
        assert links.refused == {"without the job's secret": 1, "no member of this group": 2}
    finally:
        links.close()
        other.close()
