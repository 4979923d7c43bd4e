"""The watch: whoever belongs to the job gets in; who is lost, and who waits where, is told at once and to all."""

import contextlib
import dataclasses
import os
import re
import socket
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import pytest
from server.serving import ADDRESS, SECRET, until

from hocket.config import Config
from hocket.coordinator import liveness
from hocket.coordinator import quiet_connection as watching
from hocket.coordinator.hosting import HostedCoordinator
from hocket.coordinator.liveness_client import Watch
from hocket.errors import DeadlineExceeded, HocketError, JobError, MismatchError, WorkerLost
from hocket.transport.network_group import Among
from hocket.transport.wire import Wire, hang_up

LONG = 3600.0
HOSTS = ["a", "b", "b"]


@dataclass
class Watched:
    """A coordinator in this process, and the watches of all ranks."""

    coordinator: HostedCoordinator
    config: Config
    watches: list[Watch]
    said: list[str]

    def wait(self, rank: int, what: str, lane: str = "collectives") -> "Waiting":
        """Let a rank wait in the next collective of ``lane``, which does not come."""
        self.watches[rank].enter(lane)
        return Waiting(self.watches[rank], what)


class Waiting:
    """A rank waits, in a thread of its own, until it is let go or its watch raises something."""

    def __init__(self, watch: Watch, what: str) -> None:
        self._go = threading.Event()
        self._error: HocketError | None = None
        self._thread = threading.Thread(target=self._run, args=(watch, what))
        self._thread.start()

    def let_go(self) -> None:
        self._go.set()
        self.result()

    def result(self) -> None:
        """Wait for its end; raises what the watch has raised."""
        self._thread.join(20)
        assert not self._thread.is_alive()
        if self._error is not None:
            raise self._error

    def _run(self, watch: Watch, what: str) -> None:
        try:
            watch.wait(self._go.wait, what)
        except HocketError as error:
            self._error = error


@contextmanager
def coordinator(workers: int, timeout: float = 20.0) -> Iterator[tuple[HostedCoordinator, Config]]:
    config = Config(size=workers, timeout=timeout)
    hosted = HostedCoordinator(config, SECRET)
    try:
        yield hosted, dataclasses.replace(config, coordinator_port=hosted.said["port"])
    finally:
        hosted.close()


@contextmanager
def watched(hosts: Sequence[str], *, is_of_rank_0: bool = False) -> Iterator[Watched]:
    """Watches of ranks on ``hosts``, which all are this process, until the end of the block."""
    with coordinator(len(hosts)) as (hosted, config):
        said: list[str] = []
        hosted.service.say = said.append
        with ThreadPoolExecutor(len(hosts)) as threads:
            watches = list(threads.map(lambda rank: open_watch(config, rank, hosts, is_of_rank_0), range(len(hosts))))
        try:
            yield Watched(hosted, config, watches, said)
        finally:
            for watch in watches:
                watch.leave(failed=False)


def open_watch(config: Config, rank: int, hosts: Sequence[str] = HOSTS, is_of_rank_0: bool = False) -> Watch:
    return Watch(dataclasses.replace(config, rank=rank), SECRET, hosts, is_of_rank_0=is_of_rank_0)


@pytest.fixture
def no_beat(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nobody asks again after a while: what is told must come by itself."""
    monkeypatch.setattr(watching, "_BEAT", LONG)


def fails(watch: Watch) -> Callable[[], bool]:
    def look() -> bool:
        try:
            watch.check("x")
        except HocketError:
            return True
        return False

    return look


def test_strangers_hold_nobody_up() -> None:
    with coordinator(3) as (hosted, config):
        port = hosted.said["port"]
        strangers = [socket.create_connection((ADDRESS, port)) for _ in range(300)]
        for number, stranger in enumerate(strangers):
            stranger.sendall((b"", b"\0", b"GET / HTTP/1.0\r\n\r\n", b"\xff" * 128)[number % 4])
        with pytest.raises(JobError, match=r"did not know this job's secret|closed its connection"):
            Watch(dataclasses.replace(config, rank=1), bytes(32), HOSTS)
        with ThreadPoolExecutor(3) as threads:
            for watch in threads.map(lambda rank: open_watch(config, rank), (2, 0, 1)):
                watch.leave(failed=False)
        for stranger in strangers:
            stranger.close()


def test_who_does_not_come_is_named() -> None:
    with (
        coordinator(3, timeout=0.1) as (_, config),
        pytest.raises(JobError, match=r"ranks 1, 2 did not reach hocket.init\(\) within 0.1 s"),
    ):
        open_watch(config, 0)


def test_a_coordinator_that_cannot_be_reached_is_named() -> None:
    with coordinator(3, timeout=0.1) as (_, config):
        pass
    with pytest.raises(
        JobError, match=r"^rank 1 on b cannot reach the coordinator, beside rank 0 on a \(.*\): open the"
    ):
        open_watch(config, 1)


def test_a_connection_that_ends_is_a_loss_at_once(no_beat: None) -> None:
    with watched(HOSTS) as job:
        called = threading.Event()
        job.watches[0].on_loss = called.set
        waits = job.wait(0, "a sum")
        hang_up(job.watches[2]._wire.connection)
        with pytest.raises(WorkerLost, match=r"^rank 0 waits in a sum, but rank 2 on b ended$"):
            waits.result()
        assert called.wait(20)
        until(fails(job.watches[1]))


def test_how_a_rank_ended_is_told_before_it_is_gone(no_beat: None) -> None:
    with watched(HOSTS) as job:
        job.watches[1].leave(failed=False)
        until(lambda: job.watches[0]._news.finished == [1])
        job.watches[0].check("a sum")  # one that has finished may not be needed any more
        error = job.watches[0].explain(RuntimeError("reset by peer"), "a sum")
        assert re.match("rank 0 waits in a sum, but rank 1 finished the script: every rank must take", str(error))
        job.watches[2].leave(failed=True)
        until(fails(job.watches[0]))
        assert job.coordinator.service.ledger.gone == {1: "", 2: "failed"}


@pytest.mark.few(1)
@pytest.mark.parametrize("is_full", [False, True])
def test_a_busy_coordinator_hears_the_last_word_later(monkeypatch: pytest.MonkeyPatch, is_full: bool) -> None:
    """Rank 0 hosts it and lets no thread run for long; another rank, with many questions or one, ends meanwhile."""
    with watched(HOSTS) as job:
        until(lambda: len(job.coordinator.service.liveness._wires) == 3)
        monkeypatch.setattr(liveness, "LOST_AFTER", 1.9)  # less than the coordinator is busy for
        with job.coordinator.service.liveness._changed:
            if is_full:
                monkeypatch.setattr(watching, "_MOST", 1)
            job.watches[1].leave(failed=False)
        until(lambda: job.coordinator.service.ledger.gone == {1: ""})
        until(lambda: all(watch._news.finished == [1] for watch in (job.watches[0], job.watches[2])))
        assert job.said == [], "their hosts were not silent"


def test_a_rank_that_failed_is_the_cause(no_beat: None) -> None:
    with watched(HOSTS) as job:
        waits = job.wait(0, "a sum")
        job.watches[2].leave(failed=True)
        with pytest.raises(WorkerLost, match=r"^rank 0 waits in a sum, but rank 2 on b ended before arriving there$"):
            waits.result()


def test_ranks_that_wait_for_each_other_in_vain_are_told(no_beat: None) -> None:
    with watched(HOSTS) as job:
        waits = [job.wait(0, "a sum"), job.wait(1, "a mean", "exchange 1"), job.wait(2, "a mean", "exchange 1")]
        for found in waits:
            with pytest.raises(MismatchError, match=r"^the ranks do not do the same: rank 0: a sum; ranks? .*: a mean"):
                found.result()


def test_who_waits_no_longer_is_not_named(no_beat: None) -> None:
    with watched(HOSTS) as job:
        waits = [job.wait(rank, "a sum") for rank in range(3)]
        until(lambda: all(sorted(watch.waits()) == [0, 1, 2] for watch in job.watches))
        assert job.watches[0]._waiting("a sum") == "ranks 0, 1, 2 wait in a sum"
        waits[1].let_go()
        until(lambda: all(watch._not_waiting() == [1] for watch in job.watches))
        for found in waits:
            found.let_go()
        until(lambda: all(watch._not_waiting() == [0, 1, 2] for watch in job.watches))


def test_who_does_not_arrive_is_named_with_all_stacks(no_beat: None, capfd: pytest.CaptureFixture[str]) -> None:
    with watched(HOSTS) as job:
        job.watches[0]._timeout = 1.0
        with pytest.raises(DeadlineExceeded, match=r"^rank 0 waits in a sum, for 1 s, for ranks 1, 2 on b: the stacks"):
            job.wait(0, "a sum").result()
        told: list[str] = []

        def all_have_told() -> bool:
            told.append(capfd.readouterr().err)
            return "".join(told).count("(most recent call first)") >= 3

        until(all_have_told)


def test_who_is_not_in_a_group_is_not_named(no_beat: None) -> None:
    with watched(HOSTS) as job:
        job.watches[0]._timeout = 1.0
        over = Among(job.watches[0], [0, 2])
        with pytest.raises(DeadlineExceeded, match=r"^rank 0 waits in a sum, for 1 s, for rank 2 on b: the stacks"):
            over.wait(threading.Event().wait, "a sum")


def test_who_is_not_in_a_group_is_named_where_all_members_wait(no_beat: None) -> None:
    """Rank 0 waits for rank 1 before it takes part."""
    with watched(HOSTS) as job:
        waits = job.wait(0, "a sum")
        until(lambda: 0 in job.watches[2].waits())
        job.watches[2]._timeout = 1.0
        over = Among(job.watches[2], [0, 2])
        over.enter("collectives")
        with pytest.raises(DeadlineExceeded, match=r"^ranks 0, 2 wait in a sum, for 1 s, for rank 1 on b: the stacks"):
            over.wait(threading.Event().wait, "a sum")
        waits.let_go()


@pytest.mark.parametrize("is_of_rank_0", [False, True])
def test_the_end_of_the_coordinator_is_a_loss(is_of_rank_0: bool) -> None:
    """As a thread of rank 0 it ends with that rank, else alone."""
    with watched(HOSTS, is_of_rank_0=is_of_rank_0) as job:
        waits = job.wait(1, "a sum")
        job.coordinator.close()
        who = "rank 0 on a" + ("" if is_of_rank_0 else " or the coordinator beside it")
        with pytest.raises(WorkerLost, match=f"^rank 1 waits in a sum, but {who} ended$"):
            waits.result()


def test_a_coordinator_in_rank_0_ends_when_all_know_why() -> None:
    with watched(HOSTS, is_of_rank_0=True) as job:
        job.watches[0]._hosted = job.coordinator
        job.watches[0].leave(failed=False)
        for watch in job.watches[1:]:
            watch._thread.join(20)
            watch.check("x")
            assert watch._news.finished == [0]


def test_silence_is_said_then_given_up(monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]) -> None:
    """What the kernel knows of a silent host is in place of the host: see tests/rig for real ones."""
    silences: dict[int, float] = {}
    monkeypatch.setattr(Wire, "silence", lambda wire: silences.get(id(wire), 0.0))
    with watched(HOSTS, is_of_rank_0=True) as job:
        until(lambda: len(job.coordinator.service.liveness._wires) == 3)
        of = {rank: id(wire) for rank, wire in job.coordinator.service.liveness._wires.items()}
        begun = time.monotonic()
        silences[of[1]] = 5.0  # another rank of that host answers
        silences[of[2]] = 2.0
        until(lambda: job.said != [])
        silences.clear()
        until(lambda: len(job.said) == 2)
        assert re.match(r"hocket: b \(ranks 1, 2\) does not answer: it is down .*; giving up after 10 s", job.said[0])
        again = re.match(r"hocket: b \(ranks 1, 2\) answers again after (\d+\.\d) s", job.said[1])
        assert again is not None and 2.0 <= float(again[1]) < 2.1 + time.monotonic() - begun
        silences |= {of[1]: 11.0, of[2]: 12.0}
        waits = job.wait(0, "a sum")
        with pytest.raises(WorkerLost, match="but ranks 1, 2 on b did not answer for 10 s"):
            waits.result()
    assert "does not answer" not in capfd.readouterr().err


def test_a_silent_coordinator_is_its_host(monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]) -> None:
    silences: dict[int, float] = {}
    monkeypatch.setattr(Wire, "silence", lambda wire: silences.get(id(wire), 0.0))
    with watched(["a", "a", "b", "b"]) as job:
        silences |= {id(watch._wire): 11.0 for watch in job.watches[2:]}
        until(lambda: all(0 in watch._news.lost for watch in job.watches[2:]))
        with pytest.raises(WorkerLost, match=r"^rank 2 waits in a sum, but .*ranks 0, 1 on a did not answer for 10 s"):
            job.watches[2].check("a sum")
    assert capfd.readouterr().err.count("hocket: a (ranks 0, 1) does not answer: ") == 1, "once for a host"


def test_a_forked_child_keeps_nothing_open() -> None:
    with watched(HOSTS, is_of_rank_0=True) as job:
        child = os.fork()
        if not child:
            time.sleep(LONG)
            os._exit(0)
        try:
            mine = {os.fstat(wire.connection.fileno()).st_ino for wire in wires(job)}
            assert len(mine) == 6
            until(lambda: not mine & {int(number) for number in re.findall(r"socket:\[(\d+)", descriptors(child))})
        finally:
            os.kill(child, 9)
            os.waitpid(child, 0)


def descriptors(pid: int) -> str:
    """What a process has open."""
    found = []
    for link in Path(f"/proc/{pid}/fd").iterdir():
        with contextlib.suppress(FileNotFoundError):  # it was closed since
            found.append(str(link.readlink()))
    return " ".join(found)


def wires(job: Watched) -> list[Wire]:
    """All connections of a job, both ends of each."""
    until(lambda: len(job.coordinator.service.liveness._wires) == len(job.watches))
    return [*(watch._wire for watch in job.watches), *job.coordinator.service.liveness._wires.values()]
