"""Deaths in a job over several hosts: of workers, agents, ssh and the launcher. Nothing is left on any host."""

import base64
import os
import signal
import subprocess
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from hocket.launch import leftovers
from launch.sshd import Sshd

SLEEP = """
import os, subprocess, sys, time
subprocess.Popen(["sleep", "600"], start_new_session=True)  # leaves the worker's session
print("running", flush=True)
time.sleep(600)
"""


class Launched:
    """A job over the hosts a (2 workers) and b (1 worker) that is running, with a child of each worker."""

    def __init__(self, process: subprocess.Popen[str]) -> None:
        self.process = process
        self.stderr = ""
        self.mark = ""
        assert process.stdout is not None
        for _ in range(3):
            assert "running" in process.stdout.readline(), process.communicate()[1]
        for pid in children(process.pid):
            for worker in descendants(pid) | set(session_processes()):
                value = variable(worker, "HOCKET_JOB")
                self.mark = value or self.mark
        assert len(self.workers()) == 3

    def workers(self) -> dict[int, int]:
        """The process id of each rank."""
        marked = [pid for pid in leftovers.find(self.mark) if b"script.py" in cmdline(pid)]
        return {int(variable(pid, "RANK")): pid for pid in marked}

    def agents(self) -> list[int]:
        """The agents, by the number of their host."""
        parents = [parent(pid) for _, pid in sorted(self.workers().items())]
        return list(dict.fromkeys(parents))

    def ssh(self) -> list[int]:
        return [pid for pid in children(self.process.pid) if cmdline(pid).startswith(b"ssh")]

    def finish(self, seconds: float = 5) -> int:
        """Wait for the end; nothing of the job may be left then."""
        try:
            self.stderr = self.process.communicate(timeout=20)[1]
        finally:
            self.process.kill()
        self.wait_until_gone(seconds)
        return self.process.returncode

    def wait_until_gone(self, seconds: float) -> None:
        deadline = time.monotonic() + seconds
        while alive := leftovers.find(self.mark):
            assert time.monotonic() < deadline, f"still there: {[cmdline(pid) for pid in alive]}"
            time.sleep(0.02)


def cmdline(pid: int) -> bytes:
    try:
        return Path(f"/proc/{pid}/cmdline").read_bytes()
    except OSError:
        return b""


def variable(pid: int, name: str) -> str:
    try:
        values = Path(f"/proc/{pid}/environ").read_bytes().split(b"\0")
    except OSError:
        return ""
    return next((v.partition(b"=")[2].decode() for v in values if v.startswith(f"{name}=".encode())), "")


def parent(pid: int) -> int:
    return int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[1])


def children(pid: int) -> list[int]:
    """The children of a process; none if it has ended meanwhile."""
    try:
        return [int(child) for child in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]
    except OSError:
        return []


def descendants(pid: int) -> set[int]:
    found = set(children(pid))
    return found.union(*map(descendants, found))


def session_processes() -> list[int]:
    own = os.environ["HOCKET_TEST_SESSION"]
    pids = [int(entry.name) for entry in Path("/proc").glob("[0-9]*")]
    return [pid for pid in pids if variable(pid, "HOCKET_TEST_SESSION") == own and pid != os.getpid()]


@contextmanager
def launched(sshd: Sshd, folder: Path, hosts: str = "a:2,b:1", text: str = SLEEP, *flags: str) -> Iterator[Launched]:
    process = subprocess.Popen(
        sshd.command(hosts, folder, text, *flags), cwd=folder, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE,
        stderr=subprocess.PIPE, text=True, start_new_session=True,
    )  # fmt: skip
    try:
        yield Launched(process)
    finally:
        process.kill()
        process.communicate()


@pytest.mark.few(2)
@pytest.mark.parametrize("hosts", ["a:2,b:1", "localhost:2,b:1"])
@pytest.mark.parametrize(("number", "status"), [(signal.SIGINT, 130), (signal.SIGTERM, 143), (signal.SIGHUP, 129)])
def test_a_signal_to_the_launcher_ends_everything(
    sshd: Sshd, tmp_path: Path, hosts: str, number: signal.Signals, status: int
) -> None:
    with launched(sshd, tmp_path, hosts) as job:
        job.process.send_signal(number)
        assert job.finish(0.1) == status
        assert f"hocket: ended by {number.name}" in job.stderr


@pytest.mark.parametrize("hosts", ["a:2,b:1", "localhost:2,b:1"])
def test_the_launchers_own_death_leaves_nothing(sshd: Sshd, tmp_path: Path, hosts: str) -> None:
    with launched(sshd, tmp_path, hosts) as job:
        job.process.kill()
        job.wait_until_gone(5)


@pytest.mark.few(2)
@pytest.mark.parametrize("hosts", ["a:2,b:1", "localhost:2,b:1"])
@pytest.mark.parametrize("number", [0, 1])
def test_an_agent_that_is_killed_ends_the_job(sshd: Sshd, tmp_path: Path, hosts: str, number: int) -> None:
    with launched(sshd, tmp_path, hosts) as job:
        os.kill(job.agents()[number], signal.SIGKILL)
        assert job.finish() == 1
        name, who = (hosts[: hosts.index(":")], "ranks 0, 1, the coordinator") if number == 0 else ("b", "rank 2")
        assert f"hocket: host {name} ({who}) was lost after " in job.stderr.splitlines()[-1]


def test_a_host_whose_worker_dies_first_is_lost(sshd: Sshd, tmp_path: Path) -> None:
    with launched(sshd, tmp_path) as job:
        worker, agent = job.workers()[2], job.agents()[1]
        os.kill(worker, signal.SIGKILL)
        while Path(f"/proc/{worker}").exists():  # until its agent has noticed
            pass
        os.kill(agent, signal.SIGKILL)
        assert job.finish() == 1
        lines = job.stderr.splitlines()
        assert "hocket: host b (rank 2) was lost after " in lines[-1]
        assert lines[-2] == "hocket: the other 2 workers were stopped."


@pytest.mark.few(1)
@pytest.mark.parametrize("number", [0, 1])
def test_an_ssh_that_is_killed_ends_the_job(sshd: Sshd, tmp_path: Path, number: int) -> None:
    with launched(sshd, tmp_path) as job:
        os.kill(job.ssh()[number], signal.SIGKILL)
        assert job.finish() == 1
        assert "was lost after" in job.stderr.splitlines()[-1]
        assert ("a (ranks 0, 1, the coordinator)", "b (rank 2)")[number] in job.stderr.splitlines()[-1]


def test_a_worker_that_is_killed_ends_the_job(sshd: Sshd, tmp_path: Path) -> None:
    with launched(sshd, tmp_path) as job:
        os.kill(job.workers()[2], signal.SIGKILL)
        assert job.finish(0.1) == 137
        assert "hocket: rank 2 on b was killed by SIGKILL" in job.stderr


KEEP = """
import os, time
with open("secret", "wb") as file:
    file.write(os.read(int(os.environ["HOCKET_SECRET_FD"]), 100))
print("running", flush=True)
time.sleep(600)
"""


def test_the_secret_is_in_no_argument_list_and_no_environment(sshd: Sshd, tmp_path: Path) -> None:
    with launched(sshd, tmp_path, "a:2,b:1", KEEP, "--log-dir", "logs") as job:
        secret = (tmp_path / "secret").read_bytes()
        assert len(secret) == 32
        seen = 0
        for entry in Path("/proc").glob("[0-9]*"):
            text = cmdline(int(entry.name))
            try:
                text += (entry / "environ").read_bytes()
            except OSError:
                continue
            seen += 1
            for form in (secret, secret.hex().encode(), base64.b64encode(secret)[:40], repr(secret).encode()):
                assert form not in text
        assert seen > 8
        job.process.send_signal(signal.SIGTERM)
        assert job.finish() == 143
        for path in (tmp_path / "logs").iterdir():
            assert secret.hex() not in path.read_text()


def test_an_agent_that_is_asked_to_end_says_so(sshd: Sshd, tmp_path: Path) -> None:
    with launched(sshd, tmp_path) as job:
        os.kill(job.agents()[1], signal.SIGTERM)
        assert job.finish() == 1
        assert "host b (rank 2) was lost" in job.stderr and "its agent was ended by SIGTERM" in job.stderr


@pytest.mark.all_combinations
def test_an_agent_that_stands_still_is_lost_after_ten_seconds(sshd: Sshd, tmp_path: Path) -> None:
    with launched(sshd, tmp_path) as job:
        agent = job.agents()[1]
        os.kill(agent, signal.SIGSTOP)
        try:
            assert job.process.wait(20) == 1
        finally:
            os.kill(agent, signal.SIGCONT)
        job.wait_until_gone(5)


@pytest.mark.all_combinations
def test_a_launcher_that_stands_still_is_lost_after_ten_seconds(sshd: Sshd, tmp_path: Path) -> None:
    with launched(sshd, tmp_path, "a:2,localhost:1") as job:
        os.kill(job.process.pid, signal.SIGSTOP)
        try:
            job.wait_until_gone(15)
        finally:
            os.kill(job.process.pid, signal.SIGCONT)


STUBBORN = """
import os, signal, time
for number in (signal.SIGINT, signal.SIGTERM):
    signal.signal(number, lambda n, _: print("got", n, flush=True))
print("running", flush=True)
while True:
    time.sleep(600)
"""


def test_workers_that_do_not_listen_are_killed(sshd: Sshd, tmp_path: Path) -> None:
    process = subprocess.Popen(
        sshd.command("a:1,b:1", tmp_path, STUBBORN), cwd=tmp_path, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE,
        text=True, stderr=subprocess.PIPE,
    )  # fmt: skip
    assert process.stdout is not None
    for _ in range(2):
        assert "running" in process.stdout.readline()
    process.send_signal(signal.SIGINT)
    out, err = process.communicate(timeout=20)
    assert process.returncode == 130, err
    assert sorted(out.splitlines()) == ["[0] got 2", "[1] got 2"]
