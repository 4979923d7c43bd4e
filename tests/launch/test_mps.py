"""MPS under ``--share-gpus``, with a program that stands for NVIDIA's: who starts it, who is told, and who ends it."""

import os
import signal
import subprocess
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from launch.test_run import HOCKET

# A daemon lives as long as the file with its number. It takes orders from the standard input of the same program.
CONTROL = """#!/bin/sh
folder="${CUDA_MPS_PIPE_DIRECTORY:-HOME}"
file="$folder/nvidia-cuda-mps-control.pid"
if [ "$1" = -d ]; then
    echo "start ${CUDA_VISIBLE_DEVICES-all}" >> HOME/log
    [ -e HOME/broken ] && echo "no such device" && exit 1
    setsid sh -c 'echo $$ > "$1"; while [ -e "$1" ]; do sleep 0.05; done' sh "$file" < /dev/null &
    exit 0
fi
if [ ! -s "$file" ] || ! kill -0 "$(cat "$file")"; then
    echo "Cannot find MPS control daemon process"
    exit 1
fi
read order
echo "$order" >> HOME/log
[ "$order" = quit ] && rm "$file"
exit 0
"""
SCRIPT = """
import os, signal, sys, time
print(os.environ.get("CUDA_MPS_PIPE_DIRECTORY"), os.environ.get("CUDA_MPS_LOG_DIRECTORY"), flush=True)
if sys.argv[1:] == ["wait"]:
    signal.pause()
sys.exit(int(sys.argv[1]) if sys.argv[1:] else 0)
"""


class Fake:
    """The program on a PATH of its own, and what it was told."""

    def __init__(self, home: Path) -> None:
        self.home = home
        self.place = tempfile.TemporaryDirectory(prefix="hocket-", dir="/tmp")  # a socket's path has to be short
        (home / "bin").mkdir()
        (home / "log").touch()
        (home / "script.py").write_text(SCRIPT)
        self.program = home / "bin" / "nvidia-cuda-mps-control"
        self.program.write_text(CONTROL.replace("HOME", str(home)))
        self.program.chmod(0o755)
        self.env = {**os.environ, "PATH": f"{home / 'bin'}:{os.environ['PATH']}", "TMPDIR": self.place.name}

    @property
    def log(self) -> list[str]:
        return (self.home / "log").read_text().splitlines()

    def order(self, words: str) -> None:
        subprocess.run([self.program], input=words, text=True, env=self.env, timeout=20, check=False)

    def run(self, *args: str, **env: str) -> subprocess.CompletedProcess[str]:
        command = [*HOCKET, "run", "-n", "2", "--no-record", *args]
        return subprocess.run(
            command, capture_output=True, text=True, cwd=self.home, env={**self.env, **env}, timeout=60, check=False
        )

    @contextmanager
    def waiting(self) -> Iterator[subprocess.Popen[Any]]:
        """A job whose workers have found the daemon."""
        command = [*HOCKET, "run", "-n", "2", "--no-record", "--share-gpus", "script.py", "wait"]
        job = subprocess.Popen(command, cwd=self.home, env=self.env, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL)
        assert job.stdout is not None
        try:
            assert b"hocket-mps-" in job.stdout.readline() + job.stdout.readline()
            assert self.log == ["start all", "get_server_list"] and len(self.folders()) == 1
            yield job
        finally:
            job.kill()
            job.wait()
            job.stdout.close()

    def folders(self) -> list[Path]:
        return list(Path(self.place.name).glob("hocket-mps-*"))


@pytest.fixture
def fake(tmp_path: Path) -> Iterator[Fake]:
    made = Fake(tmp_path)
    yield made
    if made.program.exists():
        made.order("quit")
    made.place.cleanup()


@pytest.mark.parametrize("status", [0, 3])
def test_mps_is_started_for_a_job_and_ended_with_it(fake: Fake, status: int) -> None:
    done = fake.run("--share-gpus", "script.py", str(status), CUDA_VISIBLE_DEVICES="0")
    assert done.returncode == status, done.stderr
    assert fake.log == ["start all", "get_server_list", "quit"], (
        "a daemon sees all GPUs, or workers would count wrongly"
    )
    first, second = (line.split()[1:] for line in done.stdout.splitlines())
    assert first == second and "hocket-mps-" in first[0] and first[0] == first[1]
    lines = [line for line in done.stderr.splitlines() if "--share-gpus" in line]
    assert len(lines) == 1 and "trials and tests" in lines[0] and "MPS was started for this job" in lines[0]
    assert not fake.folders()


def test_without_the_flag_nobody_is_asked(fake: Fake) -> None:
    done = fake.run("script.py")
    assert done.returncode == 0 and "None None" in done.stdout and "MPS" not in done.stderr
    assert not fake.log


@pytest.mark.parametrize("elsewhere", [False, True])
def test_a_daemon_that_runs_already_is_used_and_left_alone(fake: Fake, elsewhere: bool) -> None:
    if elsewhere:
        fake.env["CUDA_MPS_PIPE_DIRECTORY"] = str(fake.home / "mine")
        (fake.home / "mine").mkdir()
    subprocess.run([fake.program, "-d"], env=fake.env, timeout=20, check=True)
    file = (fake.home / "mine" if elsewhere else fake.home) / "nvidia-cuda-mps-control.pid"
    while not file.exists() or not file.read_text():
        pass
    done = fake.run("--share-gpus", "script.py")
    assert done.returncode == 0 and "MPS runs already" in done.stderr
    assert (f"{fake.home / 'mine'} None" if elsewhere else "None None") in done.stdout
    assert fake.log == ["start all", "get_server_list"]
    assert Path(f"/proc/{file.read_text().strip()}").exists()


@pytest.mark.parametrize("broken", [False, True])
def test_what_no_mps_means_is_said(fake: Fake, broken: bool) -> None:
    if broken:
        (fake.home / "broken").touch()
    else:
        fake.program.unlink()
    done = fake.run("--share-gpus", "script.py")
    assert done.returncode == 0 and "None None" in done.stdout
    why = "nvidia-cuda-mps-control -d: no such device" if broken else "there is no nvidia-cuda-mps-control on the PATH"
    assert f"does not run ({why}): they take turns" in done.stderr
    assert not fake.folders()


def test_mps_ends_with_a_job_that_is_interrupted(fake: Fake) -> None:
    with fake.waiting() as job:
        job.send_signal(signal.SIGINT)
        assert job.wait(30) == 130
    assert fake.log[2:] == ["quit"] and not fake.folders()


def test_the_guardian_ends_mps_when_the_launcher_is_killed(fake: Fake) -> None:
    with fake.waiting() as job:
        job.kill()
        job.wait()
        deadline = time.monotonic() + 20
        while fake.folders() and time.monotonic() < deadline:
            time.sleep(0.02)
    assert fake.log[2:] == ["quit"] and not fake.folders()


def test_a_daemon_that_does_not_listen_is_killed(fake: Fake) -> None:
    with fake.waiting() as job:
        os.rename(fake.program, fake.home / "gone")  # noqa: PTH104
        job.send_signal(signal.SIGINT)
        assert job.wait(30) == 130
    (fake.home / "gone").rename(fake.program)
    assert fake.log[2:] == [] and not fake.folders()


def test_the_agent_of_a_host_does_the_same(fake: Fake) -> None:
    command = [*HOCKET, "run", "-H", "localhost:2", "--no-record", "--share-gpus", "script.py"]
    done = subprocess.run(command, capture_output=True, text=True, cwd=fake.home, env=fake.env, timeout=60, check=False)
    assert done.returncode == 0 and done.stdout.count("hocket-mps-") == 4, done.stderr
    lines = [line for line in done.stderr.splitlines() if "--share-gpus" in line]
    assert len(lines) == 1 and lines[0].startswith("hocket: localhost: ") and "was started for this job" in lines[0]
    assert fake.log == ["start all", "get_server_list", "quit"] and not fake.folders()
