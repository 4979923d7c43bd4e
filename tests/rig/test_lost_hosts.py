"""A host that dies or falls silent in the middle of an exchange: who is missing, and where, is said soon."""

import re
import time
from pathlib import Path

import load
import pytest
from conftest import Rigs
from products import rarely
from rig import jobs
from rig.jobs import Jobs, Running

SLOW = "20mbit"  # at which an exchange of the job below takes 10 s
BIG = ("big", "24", "100000")
SOON, LOST = 2.0, 10.0  # seconds after which a silent host is named, and given up


def slack() -> float:
    """Seconds that this machine may take for what should take none; more where others use it too."""
    return 3.0 * load.share()


def begin_exchange(started: Jobs, *workers: Running) -> None:
    """Wait until the jobs train, then until they are in the middle of an exchange."""
    for worker in workers:
        worker.time_of("ready")
    for host in started.rig.hosts:
        started.rig.set_rate(host, SLOW)
    (started.folder / "go").touch()
    started.wait_until_sent("h2", 1 << 20)


@pytest.mark.few(1)
@pytest.mark.parametrize(
    ("dead", "alive", "gone", "transport"),
    [
        rarely("h2", "h1", "1, 2", "gloo"),
        ("h1", "h2", "0", "gloo"),
        ("h2", "h1", "1, 2", "auto"),
    ],
)
def test_killed(
    rig: Rigs, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, dead: str, alive: str, gone: str, transport: str
) -> None:
    """Two jobs at once, under hocket run and without a launcher."""
    monkeypatch.setenv("HOCKET_TRANSPORT", transport)
    monkeypatch.setenv("HOCKET_ON_LOSS", "end")
    made = rig(2)
    with jobs.on(made, tmp_path) as started:
        job = started.launch("h1:1,h2:2", *BIG, at=alive)
        plain = started.plain(["h1", "h2", "h2"], *BIG)
        left = [worker for rank, worker in enumerate(plain) if str(rank) not in gone]
        begin_exchange(started, job, *plain)
        made.kill(dead)
        then = time.monotonic()
        for worker in left:  # it names those of whom it knows by then: one process ends after the other
            said = worker.time_of(rf"WorkerLost: ranks? .* waits? in .*, but ranks? [{gone}]+ on {dead} ended")
            assert said - then < SOON + slack()
            assert worker.finish() == 1
        assert job.finish() == 1
        assert time.monotonic() - then < 5 + slack()
        who = f"rank{'s' if ',' in gone else ''} {gone}" + (", the coordinator" if dead == "h1" else "")
        assert f"hocket: host {dead} ({who}) was lost after " in job.lines[-1]
        started.wait_until_empty()


def test_killed_between_exchanges(rig: Rigs, tmp_path: Path) -> None:
    """When Gloo connects the ranks, nothing of its own would tell it that one has died."""
    made = rig(2)
    with jobs.on(made, tmp_path) as started:
        left, dead = started.plain(["h1", "h2"], "stuck", "1")
        dead.time_of("ready")
        made.kill("h2")
        left.time_of("WorkerLost: rank 0 waits in the start of a group of workers, but rank 1 on h2 ended")
        assert left.finish() == 1


def test_killed_before_all_have_come(rig: Rigs, tmp_path: Path) -> None:
    made = rig(3)
    with jobs.on(made, tmp_path) as started:
        _, left = started.plain(["h1", "h2", "h3"], *BIG, port=29400, only=[0, 1])
        wait_until_connected(started, "h2", 29400)
        made.kill("h1")
        left.time_of(r"WorkerLost: rank 1 waits in hocket.init\(\), but the store at MASTER_ADDR=h1, .* is gone: see")
        assert left.finish() == 1


def wait_until_connected(started: Jobs, host: str, port: int) -> None:
    """Until a process in ``host`` has told the store at ``port`` that it is there."""
    deadline = time.monotonic() + jobs.PATIENCE
    while f":{port:04X} 01 " not in started.sockets(host):
        assert time.monotonic() < deadline
        time.sleep(0.02)


@pytest.mark.all_combinations
def test_silent_for_a_while(rig: Rigs, tmp_path: Path) -> None:
    """A cable that is plugged in again after four seconds: it is said, and training goes on."""
    made = rig(2)
    with jobs.on(made, tmp_path) as started:
        job, plain = started.launch("h1:1,h2:1", "big", "24", "6"), started.plain(["h1", "h2"], "big", "24", "6")
        begin_exchange(started, job, *plain)
        made.cut("h2")
        then = time.monotonic()
        for running, other, rank in ((job, "h2", 1), (plain[0], "h2", 1), (plain[1], "h1", 0)):
            said = running.time_of(rf"hocket: {other} \(rank {rank}\) does not answer: .* giving up after 10 s")
            assert said - then < SOON + slack()
        while time.monotonic() - then < 4:
            time.sleep(0.1)
        made.restore("h2")
        job.time_of(r"hocket: h2 \(rank 1\) answers again after")
        plain[0].time_of(r"hocket: h2 \(rank 1\) answers again after")
        plain[1].time_of(r"hocket: h1 \(rank 0\) answers again after")
        for host in made.hosts:
            made.set_rate(host, None)
        for running in (job, *plain):
            assert running.finish() == 0, running
        results = re.findall(r"done \d \[(.*)\]", f"{job}\n{plain[0]}\n{plain[1]}")
        assert [float(result) for result in results] == [pytest.approx(-0.01 * 6 * 1.5)] * 4


@pytest.mark.few(1)
@pytest.mark.parametrize(("dead", "alive", "gone", "power"), [("h2", "h1", "1, 2", False), ("h1", "h2", "0", True)])
def test_silent_for_good(rig: Rigs, tmp_path: Path, dead: str, alive: str, gone: str, power: bool) -> None:
    """A host that is cut off, and one that has no power any more either."""
    made = rig(2)
    names = f"ranks? {gone}"
    with jobs.on(made, tmp_path) as started:
        job = started.launch("h1:1,h2:2", *BIG, at=alive, flags=["--on-loss", "end"])
        plain = started.plain(["h1", "h2", "h2"], *BIG)
        left = [worker for rank, worker in enumerate(plain) if str(rank) not in gone]
        begin_exchange(started, job, *plain)
        made.cut(dead)
        then = time.monotonic()
        if power:
            made.kill(dead)
        for worker in (left[0], job):
            said = worker.time_of(rf"hocket: {dead} \({names}\) does not answer: .* giving up after 10 s")
            assert said - then < SOON + slack()
        for worker in left:
            said = worker.time_of(rf"WorkerLost: ranks? .* waits? in .*, but {names} on {dead} did not answer for 10 s")
            assert LOST - 1 < said - then < LOST + SOON + slack()
            assert worker.finish() == 1
        assert job.finish() == 1
        assert time.monotonic() - then < LOST + 5 + slack()
        how = rf"(, the coordinator)?\) was lost .*: nothing was heard of it| on {dead} did not answer"
        assert re.search(rf"{names}({how}) for 10 s", job.lines[-1])
        started.wait_until_empty(alive)
        if not power:  # on the host that was cut off, all goes away by itself, except for sshd's end of the connection
            for worker in plain:
                assert worker.finish() == 1
            started.wait_until_empty(dead, seconds=10)
