"""``hocket jobs`` and ``hocket resize``, and -n with bounds: with scripts without torch."""

import json
import os
import re
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

import pytest

from hocket.errors import UsageError
from hocket.launch import host_list, job_socket, machine
from hocket.launch.crew import Crew
from hocket.launch.job_socket import JobName, JobSocket
from launch.test_newcomers import REPLACE, run, started
from launch.test_run import HOCKET
from launch.test_served_jobs import read_until

TRAIN = """
join()
signal.signal(signal.SIGTERM, lambda *_: leave())
sink.put(Progress(2, 3, 9, 12))
print("running", flush=True)
until("over")
"""


def hocket(*args: str) -> "subprocess.CompletedProcess[str]":
    return subprocess.run([*HOCKET, *args], capture_output=True, text=True, timeout=60, check=False)


def mine(folder: Path) -> dict[str, object]:
    """The job of this test: others may run beside it."""
    jobs = json.loads(hocket("jobs", "--json").stdout)
    (job,) = [job for job in jobs if job.get("folder") == str(folder)]
    return job


def until_there_are(folder: Path, **wanted: int) -> dict[str, object]:
    deadline = time.monotonic() + 30
    while wanted.items() - (job := mine(folder)).items():
        assert time.monotonic() < deadline, job
    return job


def test_a_job_gets_more_workers_and_fewer(tmp_path: Path) -> None:
    with started(tmp_path, TRAIN, "-n", "2", *REPLACE, "--spares", "1") as job:
        read_until(job.stdout, "running", 2)
        told = until_there_are(tmp_path, workers=2, joining=0, spares=1, epoch=2)
        assert (told["script"], told["generation"], told["pid"], told["step"]) == ("script", 0, job.pid, 3)
        assert re.fullmatch("[0-9a-f]{6}", told["id"])
        line = next(line for line in hocket("jobs").stdout.splitlines() if line.startswith(told["id"]))
        assert re.match(rf"{told['id']} +script +2 \(1 spare\) +0 +epoch 2, 3/9 +", line), line
        assert hocket("resize", told["id"], "-n", "2").stderr == f"hocket: job {told['id']}: it has 2 workers already\n"
        more = hocket("resize", told["id"][:5], "-n", "4")
        assert more.stdout == f"job {told['id']}: 2 new workers join as ranks 2, 3\n", more.stderr
        until_there_are(tmp_path, workers=4, joining=0, spares=1)
        fewer = hocket("resize", told["id"], "-n", "1")
        assert fewer.stdout == f"job {told['id']}: ranks 1, 2, 3 leave\n", fewer.stderr
        until_there_are(tmp_path, workers=1)
        assert hocket("resize", told["id"], "-n", "2").stdout == f"job {told['id']}: a new worker joins as rank 1\n"
        until_there_are(tmp_path, workers=2)
        (tmp_path / "over").touch()
        assert job.stdout is not None
        job.stdout.read()
        assert job.wait(30) == 0
    err = (tmp_path / "err").read_text().splitlines()
    assert "hocket: resized: 2 new workers join as ranks 2, 3." in err
    for rank in (1, 2, 3):
        left = rf"hocket: rank {rank} on \S+ has left after [\d.]+ s; the others go on\."
        assert any(re.fullmatch(left, line) for line in err), err
    assert not any("lost" in line or "place" in line for line in err), err
    assert not [name for name in job_socket.running() if name.id == told["id"]], "nothing is left"


def test_those_who_train_stay_until_a_new_worker_has_joined(tmp_path: Path) -> None:
    text = f"if is_new:\n    until('come')\n{TRAIN}".replace('"running"', '"running", tries')
    text = text.replace(
        'until("over")', 'until("die" if (rank, tries) == (0, 1) else "over")\nif tries == 1 and not rank:\n    die()'
    )
    with started(tmp_path, text, "-n", "2", *REPLACE) as job:
        read_until(job.stdout, "running 1", 2)
        told = until_there_are(tmp_path, workers=2)
        (tmp_path / "die").touch()
        until_there_are(tmp_path, workers=1, joining=1)
        refused = hocket("resize", str(told["id"]), "-n", "1")
        assert refused.returncode == 2 and "that would stay have not all joined yet: try again" in refused.stderr
        (tmp_path / "come").touch()
        read_until(job.stdout, "running 2")
        until_there_are(tmp_path, workers=2, joining=0)
        assert hocket("resize", str(told["id"]), "-n", "1").stdout.endswith(": rank 1 leaves\n")
        (tmp_path / "over").touch()
        assert job.wait(30) == 0


def test_workers_that_do_not_leave_in_time_are_killed(tmp_path: Path) -> None:
    text = TRAIN.replace("lambda *_: leave()", "signal.SIG_IGN")
    with started(tmp_path, text, "-n", "2", *REPLACE, "--notice", "0.1", "--max-losses", "0") as job:
        read_until(job.stdout, "running", 2)
        told = until_there_are(tmp_path, workers=2)
        assert hocket("resize", str(told["id"]), "-n", "1").returncode == 0
        read_until_file(tmp_path / "err", "has left after")
        (tmp_path / "over").touch()
        assert job.wait(30) == 0


def read_until_file(path: Path, text: str) -> None:
    deadline = time.monotonic() + 30
    while text not in path.read_text():
        assert time.monotonic() < deadline, path.read_text()
        time.sleep(0.01)


@pytest.mark.few(3)
@pytest.mark.parametrize(
    ("flags", "count", "said"),
    [
        (("-n", "2", *REPLACE), "0", "-n 0: must be a whole number of workers from 1"),
        (("-n", "2", *REPLACE), "many", "-n many: must be a whole number of workers from 1"),
        (("-n", "2", *REPLACE), "99999", "99997 workers need about"),
        (("-n", "2", *REPLACE, "--min-workers", "2"), "1", "it may not have fewer than 2 workers"),
        (("-n", "2..3", *REPLACE), "1", "it may not have fewer than 2 workers"),
        (("-n", "2..3", *REPLACE), "4", "it was started with -n 2..3: use at most -n 3"),
        (("-n", "2", *REPLACE, "--max-part", "1"), "1", "more than 1 times its first batch (--max-part): use at least"),
    ],
)
def test_what_cannot_be_is_one_line(tmp_path: Path, flags: tuple[str, ...], count: str, said: str) -> None:
    with started(tmp_path, TRAIN, *flags) as job:
        read_until(job.stdout, "running", 2)
        told = until_there_are(tmp_path, workers=2)
        done = hocket("resize", str(told["id"]), "-n", count)
        assert done.returncode == 2 and said in done.stderr and done.stderr.count("\n") == 1, done.stderr
        job.send_signal(signal.SIGINT)
        assert job.wait(30) == 130


@pytest.mark.few(1)
@pytest.mark.parametrize(
    ("joins", "count", "said"),
    [
        ("join(survives=False, replaces=False)", "3", "it takes no more workers: new workers can join only after"),
        ("join(survives=False, replaces=False)", "1", "it cannot go on with fewer workers: start it with --on-loss"),
        ("", "3", "its workers have not all joined yet: try again"),
    ],
)
def test_a_job_that_cannot_change_says_so(tmp_path: Path, joins: str, count: str, said: str) -> None:
    with started(tmp_path, TRAIN.replace("join()", joins), "-n", "2") as job:
        read_until(job.stdout, "running", 2)
        done = hocket("resize", str(mine(tmp_path)["id"]), "-n", count)
        assert done.returncode == 2 and said in done.stderr and done.stderr.count("\n") == 1, done.stderr
        job.send_signal(signal.SIGTERM)
        assert job.wait(30) == 143


def test_unknown_jobs_are_one_line(monkeypatch: pytest.MonkeyPatch) -> None:
    done = hocket("resize", "nothing", "-n", "2")
    assert (done.returncode, done.stderr) == (
        2, "hocket: no job 'nothing' runs on this machine: hocket jobs lists those that do\n"
    )  # fmt: skip
    names = [JobName(os.geteuid(), "abc1"), JobName(os.geteuid(), "abc2"), JobName(os.geteuid() + 1, "dd")]
    monkeypatch.setattr(job_socket, "running", lambda: names)
    with pytest.raises(UsageError, match="2 jobs have an id that begins with 'abc': abc1, abc2"):
        job_socket.find("abc")
    with pytest.raises(UsageError, match=rf"job dd is of another user \({os.geteuid() + 1}\), who alone can change it"):
        job_socket.find("d")
    with pytest.raises(UsageError, match="job abc1 has just ended"):
        job_socket.ask(names[0], "describe")


class Waiting(Crew):
    """Only watches descriptors."""

    def __init__(self) -> None:
        self.watched: dict[int, object] = {}

    def watch(self, descriptor: int, action: object) -> None:
        self.watched[descriptor] = action

    def unwatch(self, descriptor: int) -> None:
        del self.watched[descriptor]

    def look(self) -> None:
        for action in list(self.watched.values()):
            action()  # type: ignore[operator]

    read = signal = end = close = None  # type: ignore[assignment]


def test_the_socket_survives_what_is_sent_to_it() -> None:
    Waiting.__abstractmethods__ = frozenset()  # type: ignore[misc]
    crew = Waiting()
    desk = JobSocket("f" * 32, crew, {"double": lambda head: {"twice": 2 * head["number"]}})
    assert desk.name is not None
    other = JobSocket("f" * 32, crew, {})
    assert other.name is not None and other.name.id != desk.name.id, "two jobs with the same beginning"
    other.close()
    for data in (b"", b"x" * 1000, b"HOCK" + b"\xff" * 100):
        with socket.socket(socket.AF_UNIX) as connection:
            connection.connect(desk.name.address)
            connection.sendall(data)
            crew.look()
            connection.shutdown(socket.SHUT_WR)
            for _ in range(3):
                crew.look()
            assert connection.recv(10) == b""
        assert len(crew.watched) == 1
    silent = [socket.socket(socket.AF_UNIX) for _ in range(12)]
    for connection in silent:
        connection.connect(desk.name.address)
        crew.look()
    assert len(crew.watched) <= 9
    for connection in silent:
        connection.close()
    asking = subprocess.Popen(
        [
            sys.executable, "-c", "import sys; from hocket.launch.job_socket import JobName, ask\n"
            f"print(ask(JobName({desk.name.user}, '{desk.name.id}'), 'double', number=21)['twice'])\n"
            f"ask(JobName({desk.name.user}, '{desk.name.id}'), 'nonsense')",
        ],
        stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
    )  # fmt: skip
    while asking.poll() is None:
        crew.look()
        time.sleep(0.001)
    out, err = asking.communicate()
    assert out == "42\n" and "does not know this command" in err.splitlines()[-1]
    desk.close()
    assert not crew.watched


def test_bounds_are_kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(machine, "free_memory", lambda: 1 << 40)
    for cores, count in ((1, 2), (4, 4), (64, 8)):
        monkeypatch.setattr(machine, "cores", lambda cores=cores: cores)
        assert machine.choose_workers((2, 8)) == count
    monkeypatch.setattr(machine, "free_memory", lambda: 3 * (300 << 20))
    assert machine.choose_workers((2, 8)) == 3 and machine.choose_workers((2, 8), 1) == 2
    assert host_list.deal([1, 1, 4], 5, 2) == [1, 1, 3] and host_list.deal([1, 1], 5, 2) == [1, 1]
    with pytest.raises(UsageError, match="-n 3, but the hosts have 2 slots"):
        host_list.deal([1, 1], 5, 3)
    status, err, _ = run(tmp_path, "join()\nif rank == 1: die()\nuntil('never')", "-n", "2..2", *REPLACE)
    assert status == 137 and "hocket: workers that are left: 1, and --min-workers is 2." in err


@pytest.mark.few(3)
@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("8..2", "-n 8..2: the fewest workers come first, for example -n 2..8"),
        ("0..2", "-n 0..2: must be the fewest and the most workers, from 1, for example -n 2..8"),
        ("2..", "-n 2..: must be the fewest and the most workers"),
        ("2...8", "-n 2...8: must be the fewest and the most workers"),
    ],
)
@pytest.mark.parametrize("hosts", [(), ("-H", "a:4")])
def test_wrong_bounds_are_one_line(tmp_path: Path, text: str, said: str, hosts: tuple[str, ...]) -> None:
    (tmp_path / "script.py").touch()
    done = hocket("run", "-n", text, *hosts, str(tmp_path / "script.py"))
    assert done.returncode == 2 and said in done.stderr and done.stderr.count("\n") == 1, done.stderr
