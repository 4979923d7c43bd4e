"""Tasks that mpirun, or a person with a cluster file, has started become one job under hocket run."""

import json
import os
import re
import shutil
import socket
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from hocket.launch.local_crew import reserve_port
from launch import law
from launch.test_slurm import HOCKET, lawful, part_of


@pytest.fixture
def mpirun() -> list[str]:
    found = shutil.which("mpirun")
    if found is None or "Open MPI" not in subprocess.run([found, "--version"], capture_output=True, text=True).stdout:
        pytest.skip("Open MPI is not installed (openmpi-bin)")
    return [found, "--allow-run-as-root", "--oversubscribe"]


def run(words: list[str], **more: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        words, env={**os.environ, **more}, capture_output=True, text=True, timeout=300, check=False
    )  # fmt: skip


@pytest.mark.parametrize(
    "flags",
    [["--servers", "1", "--strategy", "bsp"], pytest.param([], marks=pytest.mark.all_combinations)],
    ids=["bsp", "mirrored"],
)
def test_what_mpirun_starts_is_one_job(mpirun: list[str], tmp_path: Path, flags: list[str]) -> None:
    out = tmp_path / "out.json"
    done = run([*mpirun, "-np", "2", *HOCKET, *flags, str(law.SCRIPT), str(out), part_of(2)])
    assert done.returncode == 0, done.stderr
    assert done.stderr.count("hocket: OMPI_COMM_WORLD_SIZE=2: 2 tasks are one job, launched by this one") == 1
    lawful(out, tmp_path)


def test_all_return_the_status_of_the_job(mpirun: list[str], tmp_path: Path) -> None:
    (tmp_path / "script.py").write_text("import sys; print('was here'); sys.exit(3)")
    done = run([*mpirun, "-np", "2", *HOCKET, str(tmp_path / "script.py")])
    assert done.returncode == 3 and "ended with exit code 3" in done.stderr, done.stderr


def test_flags_count_more_than_what_mpirun_says(mpirun: list[str], tmp_path: Path) -> None:
    (tmp_path / "script.py").write_text("import os; print('of', os.environ['WORLD_SIZE'])")
    done = run([*mpirun, "-np", "2", *HOCKET, "-n", "1", str(tmp_path / "script.py")])
    assert done.returncode == 0 and done.stdout.count("of 1") == 2, done.stderr
    assert done.stderr.count("-n is given, so OMPI_COMM_WORLD_SIZE=2 does not count") == 1


def test_the_variables_of_mpich(tmp_path: Path) -> None:
    """Its mpiexec is not needed: two processes of one parent, with what it sets."""
    told = {"PMI_SIZE": "2", "MPI_LOCALNRANKS": "2"}
    words = [*HOCKET, str(law.SCRIPT), str(tmp_path / "out.json"), part_of(2)]
    started = [
        subprocess.Popen(
            words, env={**os.environ, **told, "PMI_RANK": number, "MPI_LOCALRANKID": number},
            stderr=subprocess.PIPE, text=True,
        )
        for number in ("1", "0")
    ]  # fmt: skip
    said = [process.communicate(timeout=300)[1] for process in started]
    assert [process.returncode for process in started] == [0, 0], said
    assert "PMI_SIZE=2: 2 tasks are one job" in said[1] and not said[0]
    lawful(tmp_path / "out.json", tmp_path)


class ByHand:
    """Starts the tasks of a cluster, as people do who log in to each machine."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.started: list[subprocess.Popen[str]] = []
        self._reserved: list[socket.socket] = []

    def address(self) -> str:
        self._reserved.append(reserve_port("127.0.0.1"))
        return f"127.0.0.1:{self._reserved[-1].getsockname()[1]}"

    def write(self, **roles: list[str]) -> Path:
        path = self.folder / "cluster.json"
        path.write_text(json.dumps(roles))
        return path

    def start(self, task: str, *more: str, **environment: str) -> subprocess.Popen[str]:
        cluster = [] if "TF_CONFIG" in environment else ["--cluster", str(self.folder / "cluster.json"), "--task", task]
        words = [*HOCKET, *cluster, *more]
        process = subprocess.Popen(
            words, env={**os.environ, **environment}, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
        )
        self.started.append(process)
        return process

    def end(self) -> None:
        for process in self.started:
            process.terminate()
            process.communicate()
        for each in self._reserved:
            each.close()


@pytest.fixture
def by_hand(tmp_path: Path) -> Iterator[ByHand]:
    made = ByHand(tmp_path)
    yield made
    made.end()


def finish(*processes: subprocess.Popen[str]) -> list[tuple[int, str]]:
    said = [process.communicate(timeout=300)[0] for process in processes]
    return [(process.returncode, text) for process, text in zip(processes, said, strict=True)]


def test_a_cluster_file_with_a_server_in_any_order(by_hand: ByHand, tmp_path: Path) -> None:
    by_hand.write(chief=[by_hand.address()], worker=[by_hand.address()], ps=[by_hand.address()])
    secret = tmp_path / "secret"
    secret.write_text("of this test, and long enough")
    secret.chmod(0o600)
    out = tmp_path / "out.json"
    words = ["--secret-file", str(secret), "--strategy", "bsp", str(law.SCRIPT), str(out), part_of(2)]
    ended = finish(*[by_hand.start(task, *words) for task in ("ps:0", "worker:0", "chief")])
    assert [status for status, _ in ended] == [0, 0, 0], ended
    assert "3 tasks are one job, launched by this one" in ended[2][1] and "is open" not in ended[2][1]
    lawful(out, tmp_path)


@pytest.mark.all_combinations
def test_tf_config(by_hand: ByHand, tmp_path: Path) -> None:
    cluster = {"worker": [by_hand.address(), by_hand.address()]}
    out = tmp_path / "out.json"
    started = []
    for index in (1, 0):
        told = json.dumps({"cluster": cluster, "task": {"type": "worker", "index": index}})
        started.append(by_hand.start("", str(law.SCRIPT), str(out), part_of(2), TF_CONFIG=told))
    ended = finish(*started)
    assert [status for status, _ in ended] == [0, 0], ended
    assert "it is open: whoever reaches this host can join it" in ended[1][1]
    lawful(out, tmp_path)


def test_a_machine_that_never_comes_is_named(by_hand: ByHand, tmp_path: Path) -> None:
    (tmp_path / "script.py").write_text("")
    addresses = [by_hand.address() for _ in range(3)]
    by_hand.write(worker=addresses)
    flags = ["--start-timeout", "5", str(tmp_path / "script.py")]
    (first, said), (second, _) = finish(by_hand.start("worker:0", *flags), by_hand.start("worker:1", *flags))
    assert first == 2 and second in (1, 2), "on a busy machine the second comes too late, too"
    assert f"of 3 tasks (--cluster {tmp_path / 'cluster.json'}" in said
    assert re.search(rf"did not come within 5 s \(--start-timeout\): .*worker:2 \({addresses[2]}\)", said)


def test_a_wrong_port_and_another_secret(by_hand: ByHand, tmp_path: Path) -> None:
    (tmp_path / "script.py").write_text("")
    addresses = [by_hand.address(), by_hand.address()]
    by_hand.write(worker=addresses)
    lost = by_hand.start("worker:1", "--start-timeout", "1", str(tmp_path / "script.py"))
    [(status, said)] = finish(lost)
    assert status == 2 and "does not reach task 0 within 1 s: the server at" in said and addresses[0] in said
    for number, text in enumerate(("the first of two secrets", "the second of two secrets")):
        (tmp_path / str(number)).write_text(text)
        (tmp_path / str(number)).chmod(0o600)
    flags = ["--start-timeout", "300", str(tmp_path / "script.py")]
    by_hand.start("worker:0", "--secret-file", str(tmp_path / "0"), *flags)  # goes on to wait for the right one
    [(status, said)] = finish(by_hand.start("worker:1", "--secret-file", str(tmp_path / "1"), *flags))
    assert status == 2 and "secret" in said


def test_a_task_that_is_started_twice(by_hand: ByHand, tmp_path: Path) -> None:
    (tmp_path / "script.py").write_text("")
    by_hand.write(worker=[by_hand.address() for _ in range(3)])
    tasks = ("worker:0", "worker:1", "worker:1")
    ended = finish(*[by_hand.start(task, "--start-timeout", "300", str(tmp_path / "script.py")) for task in tasks])
    assert ended[0][0] == 2 and "task worker:1" in ended[0][1] and "was started twice" in ended[0][1]
    assert all(status for status, _ in ended)


@pytest.mark.parametrize(
    ("roles", "flags", "message"),
    [
        ({"worker": ["a:1", "b:1"]}, ["--task", "worker:2"], "--task worker:2: "),
        ({"worker": ["a:1", "b:1"]}, [], "which of its tasks is this? add for example --task worker:1"),
        ({"worker": ["a:1", "b:1"]}, ["--task", "worker:1", "-n", "2"], "-n and --cluster both say where"),
        ({"worker": ["a:1"], "ps": ["b:1"]}, ["--task", "ps:0", "--servers", "2"], "--servers 2, but"),
        ({"worker": ["a:1", "a:1"]}, ["--task", "worker:1"], "a:1 is there twice"),
        ({"worker": ["a:1", "b:1"]}, ["--task", "worker:1", "--secret-file", "/nowhere"], "No such file or directory"),
        ({"worker": ["a:1", "b:1"]}, ["--task", "worker:1", "--secret-file", "open"], "chmod 600"),
        ({"worker": ["a:1", "b:1"]}, ["--task", "worker:1", "--secret-file", "short"], "5 bytes are too few"),
    ],
)  # fmt: skip
def test_bad_input_is_one_line(tmp_path: Path, roles: dict[str, list[str]], flags: list[str], message: str) -> None:
    (tmp_path / "script.py").write_text("")
    (tmp_path / "cluster.json").write_text(json.dumps(roles))
    for name, mode in (("open", 0o644), ("short", 0o600)):
        (tmp_path / name).write_text("short")
        (tmp_path / name).chmod(mode)
    done = subprocess.run(
        [*HOCKET, "--cluster", "cluster.json", *flags, "script.py"],
        cwd=tmp_path, capture_output=True, text=True, timeout=60, check=False,
    )  # fmt: skip
    assert done.returncode == 2 and message in done.stderr, done.stderr
    assert done.stderr.count("\n") == 1
