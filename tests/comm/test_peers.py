"""Workers that talk to each other directly: rounds, pairs and snapshots, among threads of one process."""

import contextlib
import dataclasses
import random
import secrets
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from server.serving import until

from hocket.comm import wire_peers
from hocket.comm.graphs import Graph
from hocket.comm.neighbour_rounds import PeerKind, Rounds
from hocket.comm.pairs import Pairs
from hocket.comm.peers import Peers, Sending
from hocket.comm.snapshots import Snapshots
from hocket.comm.wire_peers import WirePeers
from hocket.config import Config
from hocket.errors import DeadlineExceeded, JobError
from hocket.transport import door
from hocket.transport.tensor_bytes import as_bytes

SECRET = b"p" * 32


@pytest.fixture
def patient(monkeypatch: pytest.MonkeyPatch) -> None:
    """A wire that broke is made anew, though this machine may be busy."""
    monkeypatch.setattr(wire_peers, "_AGAIN", 30.0)


class Meeting:
    """What the coordinator does for workers in threads."""

    def __init__(self, size: int) -> None:
        self._barrier, self._given = threading.Barrier(size), dict[int, bytes]()

    def gather(self, rank: int) -> Callable[[str, bytes], Mapping[int, bytes]]:
        def gather(_: str, data: bytes) -> Mapping[int, bytes]:
            self._given[rank] = data
            self._barrier.wait(10)
            found = dict(self._given)
            self._barrier.wait(10)
            return found

        return gather


@contextlib.contextmanager
def workers(size: int, make: Callable[[Peers], Any], **fields: Any) -> Iterator[list[tuple[Peers, Any]]]:
    """All links are there; ``make`` has set the handlers of each."""
    name, meeting = f"hocket-{secrets.token_hex(8)}", Meeting(size)

    def one(rank: int) -> tuple[Peers, Any]:
        peers = WirePeers(Config(rank=rank, size=size, rendezvous=name, timeout=10.0, **fields), SECRET)
        made = make(peers)
        peers.join(meeting.gather(rank))
        return peers, made

    with ThreadPoolExecutor(size) as threads:
        found = [each.result(30) for each in [threads.submit(one, rank) for rank in range(size)]]
    try:
        yield found
    finally:
        for peers, _ in found:
            peers.close()


def together(work: Callable[..., Any], items: list[Any]) -> list[Any]:
    with ThreadPoolExecutor(len(items)) as threads:
        return [each.result(30) for each in [threads.submit(work, *item) for item in items]]


def vector(rank: int, count: int = 5) -> list[torch.Tensor]:
    made = torch.Generator().manual_seed(rank)
    return [torch.randn(count, generator=made, dtype=torch.float64), torch.randn(3, generator=made)]


def mix(graph: Graph, rounds: Rounds, rank: int, flats: list[torch.Tensor], number: int) -> None:
    """One round, as a strategy does it."""
    weights = {} if rounds.rests else graph.neighbours(rounds.members, rank, number)
    rounds.start(flats, {other: {"weight": weight} for other, weight in weights.items()}, weights)
    found = rounds.finish()
    used = {other: min(weights[other], arrival.head["weight"]) for other, arrival in found.items()}
    for place, flat in enumerate(flats):
        mixed = flat * (1 - sum(used.values()))
        for other, arrival in found.items():
            mixed += used[other] * arrival.flats[place]
        flat.copy_(mixed)
    rounds.recycle(found.values())


@pytest.mark.parametrize("fields", [{}, {"transport": "gloo"}, {"transport": "gloo", "tls": "on"}])
@pytest.mark.parametrize("topology", ["ring", "complete", "pairs"])
def test_rounds_are_the_matrix(topology: str, fields: dict[str, Any]) -> None:
    size, graph, count = 4, Graph(topology), 100_000
    vectors = [vector(rank, count) for rank in range(size)]
    expected = torch.stack([flats[0] for flats in vectors])
    for number in range(3):
        expected = torch.tensor(graph.mixing(size, number), dtype=torch.float64) @ expected

    def work(rank: int, rounds: Rounds) -> None:
        for number in range(3):
            mix(graph, rounds, rank, vectors[rank], number)

    with workers(size, lambda peers: Rounds(peers, vectors[0], 10.0), **fields) as found:
        together(work, [(peers.rank, rounds) for peers, rounds in found])
    assert torch.allclose(torch.stack([flats[0] for flats in vectors]), expected, rtol=1e-12, atol=1e-12)


@settings(max_examples=15, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    size=st.integers(2, 5), topology=st.sampled_from(["ring", "torus", "exponential", "complete", "pairs"]),
    seed=st.integers(0, 1000),
)  # fmt: skip
def test_workers_rest_at_any_time_and_the_mean_stays(size: int, topology: str, seed: int) -> None:
    graph, drawn = Graph(topology, seed), random.Random(seed)
    glances = [[drawn.random() < 0.4 for _ in range(size)] for _ in range(2)]
    lengths = [[drawn.randint(0, 6) for _ in range(size)] for _ in range(2)]
    vectors = [vector(rank) for rank in range(size)]
    before = torch.stack([flats[0] for flats in vectors]).mean(0)
    meeting = Meeting(size)

    def work(rank: int, rounds: Rounds) -> None:
        for number, turns in enumerate(lengths):
            rounds.begin_pass(number)
            if glances[number][rank]:  # it rests, and comes back
                rounds.rest(for_good=False)
                mix(graph, rounds, rank, vectors[rank], 0)  # alone
                rounds.begin_pass(number)
            for turn in range(turns[rank]):
                mix(graph, rounds, rank, vectors[rank], turn)
            rounds.rest(for_good=True)
            mix(graph, rounds, rank, vectors[rank], 7)  # alone
            meeting.gather(rank)("", b"")

    with workers(size, lambda peers: Rounds(peers, vectors[0], 10.0)) as found:
        together(work, [(peers.rank, rounds) for peers, rounds in found])
    assert torch.allclose(torch.stack([flats[0] for flats in vectors]).mean(0), before, rtol=1e-12, atol=1e-12)


def test_who_rests_is_part_of_the_rounds_before() -> None:
    vectors = [vector(rank) for rank in range(3)]
    with workers(3, lambda peers: Rounds(peers, vectors[0], 10.0)) as found:
        (_, ahead), (_, beside), (_, behind) = found

        def work(rounds: Rounds, others: list[int], turns: int) -> None:
            for _ in range(turns):
                rounds.start(vectors[0], {other: {"weight": 0.3} for other in others}, others)
                rounds.finish()

        together(work, [(ahead, [1], 2), (beside, [0], 2)])
        ahead.rest(for_good=True)
        deadline = time.monotonic() + 10
        while not behind._resting:
            assert time.monotonic() < deadline
            time.sleep(0.001)
        for turn in range(3):
            assert behind.members == ([0, 1, 2] if turn < 2 else [1, 2])
            work(behind, [], 1)


@pytest.mark.parametrize("push_sum", [False, True])
@pytest.mark.parametrize("victim", [0, 2])
def test_the_others_go_on_without_a_lost_worker(victim: int, push_sum: bool) -> None:
    size, graph = 4, Graph("ring")
    vectors = [vector(rank) for rank in range(size)]

    def work(peers: Peers, rounds: Rounds) -> list[int]:
        for number in range(12):
            if peers.rank == victim and number == 3:
                peers.close()
                return []
            if push_sum:
                targets = graph.successors(rounds.members, peers.rank, number)
                rounds.start(
                    vectors[peers.rank], {other: {} for other in targets},
                    graph.predecessors(rounds.members, peers.rank, number),
                )  # fmt: skip
                rounds.finish()
            else:
                mix(graph, rounds, peers.rank, vectors[peers.rank], number)
        return rounds.members

    with workers(size, lambda peers: Rounds(peers, vectors[0], 10.0, pushes=push_sum)) as found:
        left = together(work, found)
    assert [members for members in left if members] == [[rank for rank in range(size) if rank != victim]] * 3


def test_graphs_that_do_not_agree_skip_each_other() -> None:
    vectors = [vector(rank) for rank in range(3)]
    lists = [{1: 0.5}, {2: 0.25, 0: 0.2}, {0: 0.5, 1: 0.5}]  # 0 does not want 2
    got: dict[int, list[int]] = {}

    def work(rank: int, rounds: Rounds) -> None:
        rounds.start(vectors[rank], {other: {"weight": weight} for other, weight in lists[rank].items()}, lists[rank])
        got[rank] = list(rounds.finish())

    with workers(3, lambda peers: Rounds(peers, vectors[0], 10.0)) as found:
        together(work, [(peers.rank, rounds) for peers, rounds in found])
    assert got == {0: [1], 1: [0, 2], 2: [1]}


def test_who_pushes_elsewhere_says_so_when_asked_and_nothing_is_lost() -> None:
    vectors = [vector(rank) for rank in range(2)]
    with workers(2, lambda peers: Rounds(peers, vectors[0], 10.0, pushes=True)) as found:
        (_, first), (_, second) = found

        def wait_for_nothing() -> None:
            first.start(vectors[0], {1: {"mass": 0.5}}, [1])
            assert first.finish() == {}

        def push_elsewhere() -> None:
            second.start(vectors[1], {}, [])
            assert second.finish() == {}

        together(lambda work: work(), [(wait_for_nothing,), (push_elsewhere,)])
        second.start(vectors[1], {}, [])
        second.finish()
        (late,) = second.take_late()
        assert late.head["mass"] == 0.5 and torch.equal(late.flats[0], vectors[0][0])


def test_one_that_does_not_come_is_named() -> None:
    vectors = [vector(rank) for rank in range(2)]
    with workers(2, lambda peers: Rounds(peers, vectors[0], 0.2)) as found:
        rounds = found[0][1]
        rounds.start(vectors[0], {1: {"weight": 0.5}}, [1])
        with pytest.raises(DeadlineExceeded, match=r"rank 1 did not come to round 0 of gossip within 0.2 s"):
            rounds.finish()


@pytest.mark.parametrize("size", [2, 3, 4])
def test_pairs_preserve_the_sum_and_never_deadlock(size: int) -> None:
    vectors = [[flats[0]] for flats in (vector(rank, 20_000) for rank in range(size))]
    before = sum(flats[0].clone() for flats in vectors)
    spread = max(float((flats[0] - before / size).norm()) for flats in vectors)

    def work(peers: Peers, pairs: Pairs) -> int:
        drawn = random.Random(peers.rank)
        pairs.open(0)
        begun = 0
        while begun < 40:
            threading.Event().wait(0.0005)
            begun += pairs.average(drawn.choice([rank for rank in range(size) if rank != peers.rank]))
        return begun

    with workers(size, lambda peers: Pairs(peers, vectors[peers.rank], threading.Condition())) as found:
        together(work, found)
        for _, pairs in found:
            pairs.close(10.0)
        after = sum(flats[0] for flats in vectors)
        assert torch.allclose(after, before, rtol=1e-11, atol=1e-11)
        assert max(float((flats[0] - before / size).norm()) for flats in vectors) < spread / 2
        assert sum(pairs.averages for _, pairs in found) > 0
        assert not found[0][1].average(1)  # it is closed
        found[0][1].open(0)
        assert found[0][1].average(1)  # and so is the other one: nothing happens, and it is answered
        found[0][1].close(10.0)
        assert torch.equal(sum(flats[0] for flats in vectors), after)


def test_an_answer_of_a_link_that_was_lost_meanwhile_changes_nothing() -> None:
    vectors = [[vector(rank)[0]] for rank in range(2)]
    held, go = threading.Event(), threading.Event()

    def make(peers: Peers) -> Pairs:
        pairs = Pairs(peers, vectors[peers.rank], threading.Condition())
        take = peers.handlers[PeerKind.DELTA]

        def hold(*args: Any) -> None:
            held.set()
            assert go.wait(10)
            take(*args)

        peers.handlers[PeerKind.DELTA] = hold
        pairs.open(0)
        return pairs

    with workers(2, make) as found:
        before = vectors[0][0].clone()
        assert found[0][1].average(1) and held.wait(10)
        found[0][1]._lose(1)
        go.set()
        found[0][1].close(10.0)
        assert found[0][1].average(1) is False
        assert torch.equal(vectors[0][0], before) and found[0][0].live == [0, 1]


def test_who_gives_no_snapshot_in_time_is_named(capsys: pytest.CaptureFixture[str]) -> None:
    def make(peers: Peers) -> Snapshots:
        made = Snapshots(peers, lambda: ({"rank": peers.rank}, vector(peers.rank)))
        if peers.rank == 2:
            peers.handlers[PeerKind.ASK] = lambda *_: None
        return made

    with workers(3, make) as found:
        assert [head["rank"] for head, _ in found[0][1].collect(0.5)] == [1]
    assert "hocket: rank 2 has not answered within 0.5 s, and is left out of the mean" in capsys.readouterr().err


def test_snapshots_come_from_the_living() -> None:
    def make(peers: Peers) -> Snapshots:
        return Snapshots(peers, lambda: ({"rank": peers.rank}, vector(peers.rank)))

    with workers(3, make) as found:
        assert [head["rank"] for head, _ in found[1][1].collect(10.0)] == [0, 2]
        found[0][0].close()
        ((head, flats),) = found[1][1].collect(10.0)
        assert head["rank"] == 2 and torch.equal(flats[0], vector(2)[0])


def cut(peers: Any, rank: int, end: str) -> None:
    """Break the wire on which ``peers`` speaks to, or hears, a rank."""
    (peers._out[rank].wire if end == "out" else peers._incoming[rank].wire).close()


@pytest.mark.usefixtures("patient")
@pytest.mark.parametrize("fields", [{}, {"transport": "gloo"}, {"transport": "gloo", "tls": "on"}])
@pytest.mark.parametrize("nbytes", [0, 1 << 20])
def test_every_message_is_heard_once_and_in_order_whatever_breaks(nbytes: int, fields: dict[str, Any]) -> None:
    heard: list[int] = []
    count, body = (400, 30)[nbytes > 0], torch.zeros(nbytes, dtype=torch.uint8)

    def make(peers: Peers) -> None:
        def hear(rank: int, message: Any, wire: Any) -> None:
            wire.receive_into([memoryview(bytearray(message.body))])
            heard.append(message.sequence)

        peers.handlers[PeerKind.DATA] = hear

    with workers(2, make, **fields) as found:
        (first, _), (second, _) = found
        drawn, sending = random.Random(nbytes), Sending(count)
        for number in range(count):
            first.send(1, PeerKind.DATA, {}, as_bytes([body]), sequence=number, sent=sending)
            if number % (count // 10) == 5:
                time.sleep(drawn.uniform(0, 0.01))
                cut(*((first, 1, "out") if drawn.random() < 0.5 else (second, 0, "in")))
        assert sending.wait(20)
        assert heard == list(range(count)) and first.live == second.live == [0, 1]


@pytest.mark.usefixtures("patient")
@pytest.mark.parametrize("noticed", ["out", "in"])
@pytest.mark.parametrize("push_sum", [False, True])
def test_a_link_that_broke_is_made_anew_and_nothing_is_lost(push_sum: bool, noticed: str) -> None:
    size, graph = 3, Graph("ring")
    vectors = [vector(rank) for rank in range(size)]
    expected = torch.stack([flats[0] for flats in vectors])
    for number in range(6):
        matrix = graph.pushing(size, number) if push_sum else graph.mixing(size, number)
        expected = torch.tensor(matrix, dtype=torch.float64) @ expected

    def work(peers: Peers, rounds: Rounds) -> None:
        flats = vectors[peers.rank]
        for number in range(6):
            if number in (1, 3) and peers.rank == 0:
                cut(peers, 1, noticed)
            if not push_sum:
                mix(graph, rounds, peers.rank, flats, number)
                continue
            rounds.start(flats, {(peers.rank + 1) % 3: {}}, [(peers.rank - 1) % 3])
            for arrival in rounds.finish().values():
                for flat, other in zip(flats, arrival.flats, strict=True):
                    flat.add_(other).mul_(0.5)

    with workers(size, lambda peers: Rounds(peers, vectors[0], 10.0, pushes=push_sum)) as found:
        together(work, found)
        assert [peers.live for peers, _ in found] == [[0, 1, 2]] * 3
    assert torch.allclose(torch.stack([flats[0] for flats in vectors]), expected, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("noticed", ["out", "in"])
def test_a_link_that_cannot_be_made_anew_waits_for_the_end_of_the_pass(
    noticed: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """No wire can: links keep what makes another one, so this is set before they are made."""
    size, graph = 3, Graph("complete")
    vectors, meeting = [vector(rank) for rank in range(size)], Meeting(size)
    monkeypatch.setattr(WirePeers, "_renew", lambda *_: None)

    def work(peers: Any, rounds: Rounds) -> list[int]:
        for number in range(2):
            rounds.begin_pass(number)
            if number == 0 and peers.rank == 0:
                cut(peers, 1, noticed)
            for turn in range(4):
                mix(graph, rounds, peers.rank, vectors[peers.rank], turn)
            rounds.rest(for_good=True)
            meeting.gather(peers.rank)("", b"")
            if number == 0:
                assert list(peers.lost) == ([1 - peers.rank] if peers.rank < 2 else [])
                peers.repair([(0, 1)], meeting.gather(peers.rank))
        return peers.live

    with workers(size, lambda peers: Rounds(peers, vectors[0], 10.0)) as found:
        assert together(work, found) == [[0, 1, 2]] * 3
        assert not any(peers.lost for peers, _ in found)
    for flats in vectors:  # all have mixed with all, in the second pass
        assert torch.allclose(flats[0], vectors[0][0], rtol=1e-12, atol=1e-12)
    told = capsys.readouterr().err.splitlines()
    lines = [
        f"hocket: rank {one} has lost its link to rank {other}, and makes a new one" for one, other in [(0, 1), (1, 0)]
    ]
    assert sorted(told) == lines


def test_a_link_that_one_end_has_given_up_is_not_taken_up_by_the_other(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The end that has not noticed makes another wire while the first one waits for a new link."""
    heard: list[int] = []
    meeting, tried, find = Meeting(2), threading.Event(), WirePeers._find

    def make(peers: Peers) -> None:
        peers.handlers[PeerKind.DATA] = lambda rank, message, _: heard.append(message.sequence)

    def find_and_tell(peers: WirePeers, *args: Any, **options: Any) -> Any:
        found = find(peers, *args, **options)
        if peers.rank == 0 and peers._is_connecting:
            tried.set()
        return found

    with workers(2, make) as found:
        (first, _), (second, _) = found
        for number in range(5):
            second.send(0, PeerKind.DATA, {}, sequence=number)
        until(lambda: len(heard) == 5)
        monkeypatch.setattr(WirePeers, "_find", find_and_tell)

        def gather(what: str, data: bytes) -> Mapping[int, bytes]:
            if "lost" in what:
                assert tried.wait(10)
            return meeting.gather(0)(what, data)

        def repair_late() -> None:
            assert tried.wait(10)
            second.repair([(0, 1)], meeting.gather(1))

        together(lambda work: work(), [(lambda: first.repair([(0, 1)], gather),), (repair_late,)])
        sent = Sending(1)
        second.send(0, PeerKind.DATA, {}, sequence=5, sent=sent)
        assert sent.wait(10) and heard == list(range(6)) and first.live == second.live == [0, 1]
    assert all("makes a new one" in line for line in capsys.readouterr().err.splitlines())


@pytest.mark.parametrize("accepts", [True, False])
def test_a_connection_that_one_end_gives_up_is_made_again(accepts: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """On a busy machine: one end has proved the secret, and the other one has no time left for that."""
    prove, given_up = door.prove, []

    def be_late(connection: Any, *args: Any, **options: Any) -> int:
        found = prove(connection, *args, **options)
        if options["accepts"] is accepts and not given_up:
            given_up.append(found)
            raise TimeoutError
        return found

    monkeypatch.setattr(door, "prove", be_late)
    vectors, graph = [vector(rank) for rank in range(2)], Graph("ring")
    with workers(2, lambda peers: Rounds(peers, vectors[0], 10.0)) as found:
        together(lambda peers, rounds: mix(graph, rounds, peers.rank, vectors[peers.rank], 0), found)
        assert given_up and [peers.live for peers, _ in found] == [[0, 1]] * 2
    assert torch.allclose(vectors[0][0], vectors[1][0], rtol=1e-12, atol=1e-12)


def test_a_worker_that_cannot_be_reached_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    reach = wire_peers.reach

    def refuse(config: Config, secret: bytes, name: int, said: dict[str, Any], deadline: float, **more: Any) -> Any:
        if name == 1 and "worker-2" in said["socket"]:
            raise JobError("it is beyond a firewall")
        return reach(config, secret, name, said, deadline, **more)

    monkeypatch.setattr(wire_peers, "reach", refuse)
    with pytest.raises(JobError, match=r"rank 1 cannot reach rank 2.*firewall"), workers(3, lambda peers: None):
        pass


def test_a_newcomer_hears_nobody_whom_it_cannot_answer(monkeypatch: pytest.MonkeyPatch) -> None:
    """A worker may say something as soon as its wire leads back; the newcomer's own wire may not be its own yet."""
    config = Config(size=2, rendezvous=f"hocket-{secrets.token_hex(8)}", timeout=10.0)
    member, newcomer = (WirePeers(dataclasses.replace(config, rank=rank), SECRET) for rank in range(2))
    heard, answered = threading.Event(), threading.Event()

    def answer(rank: int, *_: Any) -> None:
        newcomer.send(rank, PeerKind.DELTA, {})
        heard.set()

    newcomer.handlers[PeerKind.PAIR] = answer
    member.handlers[PeerKind.DELTA] = lambda *_: answered.set()
    reach = newcomer._reach

    def reach_slowly(rank: int, *told: Any) -> Any:
        found = reach(rank, *told)
        until(lambda: member.live == [0, 1])
        member.send(1, PeerKind.PAIR, {})
        heard.wait(0.5)  # it must not be
        return found

    monkeypatch.setattr(newcomer, "_reach", reach_slowly)
    try:
        member._where = {0: member._open()}
        member._is_connecting = False
        newcomer._where = {1: newcomer._open()}
        newcomer.enter(member._where)
        assert answered.wait(10)
    finally:
        member.close()
        newcomer.close()
