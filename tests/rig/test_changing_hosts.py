"""Workers and hosts that are lost, replaced and added on a rig: every sample counts once, and replicas are equal."""

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import load
import pytest
from conftest import Rigs
from rig import jobs
from rig.jobs import Jobs, Running

from fuzz import churn_check
from hocket.lab.rig import Rig

TESTS = Path(__file__).parents[1]
SCRIPT = TESTS / "fuzz" / "churn_script.py"
START = os.pathsep.join(filter(None, (str(TESTS / "start"), os.environ.get("PYTHONPATH"))))  # processes start sooner
HOCKET = [sys.executable, "-m", "hocket.launch.cli"]
SOON = 14.0  # seconds in which a silent link is noticed and its end agreed on
STRATEGIES = ("mirrored", "local_sgd(period=4)", "diloco(period=4)", "easgd(period=4)")
ROBUST = ["--transport", "tcp", "--on-loss", "replace", "--check-replicas", "1", "--log-dir", "logs"]


def begin(started: Jobs, hosts: str, strategy: str, *flags: str) -> Running:
    """A job on hosts, which trains until there is the file ``over``."""
    marks = "lines" if strategy.startswith("easgd") else "marks"
    command = [*HOCKET, "run", "-H", hosts, *ROBUST, "--strategy", strategy, *flags, str(SCRIPT), "0", marks]
    return started.start("h1", command, HOCKET_RUN_DIR="runs", PYTHONPATH=START)


def wait_for(job: Running, condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + jobs.PATIENCE
    while not condition():
        assert time.monotonic() < deadline and job.process.poll() is None, job
        time.sleep(0.05)


def at_work(folder: Path, host: str = "") -> list[Path]:
    """The files of workers that have begun to train on a host, or on all, and have not ended by themselves."""
    texts = {path: path.read_text() for path in folder.glob(f"{host}*.log")}
    return sorted(path for path, text in texts.items() if " batch " in text and " end " not in text)


def kill_worker(made: Rig, host: str, log: Path) -> None:
    """SIGKILL to the process that writes ``log``, whose number is that inside of its host."""
    number = log.stem.split("-")[1]
    for pid in made.processes(host):
        if numbers(pid)[-1:] == [number]:
            os.kill(pid, signal.SIGKILL)


def numbers(pid: int) -> list[str]:
    """The numbers of a process, in the namespaces of processes in which it is."""
    try:
        lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    except OSError:
        return []
    return next(line.split()[1:] for line in lines if line.startswith("NSpid:"))


def finish(folder: Path, job: Running, strategy: str) -> None:
    (folder / "over").touch()
    assert job.finish() == 0, job
    (folder / "err").write_text(str(job))
    churn_check.check_job(folder, strategy)


@pytest.mark.all_combinations
@pytest.mark.parametrize(("strategy", "spares"), [("mirrored", "2"), *((strategy, "0") for strategy in STRATEGIES)])
def test_a_worker_and_a_host_are_replaced(rig: Rigs, tmp_path: Path, strategy: str, spares: str) -> None:
    made = rig(3)
    with jobs.on(made, tmp_path) as started:
        job = begin(started, "h1:1,h2:1,h3:2", strategy, "-n", "3", "--spares", spares)
        wait_for(job, lambda: len(at_work(tmp_path)) == 3)
        kill_worker(made, "h2", at_work(tmp_path, "h2")[0])
        job.time_of(r"rank 1 on h2 was killed .* takes its place\.")
        job.time_of("the new rank 1 on h2 has joined")
        wait_for(job, lambda: len(at_work(tmp_path, "h2")) == 2)
        made.kill("h2")
        job.time_of(r"host h2 \(rank 1\) was lost .*; the others go on, and .* on h3 takes its place\.")
        job.time_of("the new rank 1 on h3 has joined")
        wait_for(job, lambda: len(at_work(tmp_path, "h3")) == 2)
        finish(tmp_path, job, strategy)
        started.wait_until_empty()


def resize(started: Jobs, *flags: str) -> None:
    """Resize the job that was started in h1, from another terminal there."""
    listed = started.start("h1", [*HOCKET, "jobs", "--json"])
    assert listed.finish() == 0, listed
    (job,) = json.loads(str(listed))
    asked = started.start("h1", [*HOCKET, "resize", job["id"], *flags])
    assert asked.finish() == 0, asked


@pytest.mark.all_combinations
@pytest.mark.parametrize(
    "strategy", ["mirrored", *(pytest.param(each, marks=pytest.mark.all_combinations) for each in STRATEGIES[1:])]
)
def test_a_host_dies_and_comes_back_and_another_is_added(rig: Rigs, tmp_path: Path, strategy: str) -> None:
    made = rig(3)
    with jobs.on(made, tmp_path) as started:
        job = begin(started, "h1:1,h2:2", strategy)
        wait_for(job, lambda: len(at_work(tmp_path)) == 3)
        made.kill("h2")
        job.time_of(r"host h2 \(ranks 1, 2\) was lost .*; the others go on without it: no host of the job has a free")
        resize(started, "-H", "h1:1,h2:2,h3:1")
        job.time_of("has joined", count=3)
        wait_for(job, lambda: len(at_work(tmp_path)) == 6)
        resize(started, "-H", "h1:1,h3:1")
        job.time_of(r"rank \d on h2 has left", count=2)
        finish(tmp_path, job, strategy)
        started.wait_until_empty()


@pytest.mark.all_combinations
def test_two_hosts_that_see_the_coordinator_but_not_each_other(rig: Rigs, tmp_path: Path) -> None:
    """One of them goes, and its worker comes back where there is room."""
    made = rig(3)
    with jobs.on(made, tmp_path) as started:
        job = begin(started, "h1:2,h2:1,h3:1", "mirrored", "-n", "4")
        wait_for(job, lambda: len(at_work(tmp_path)) == 4)
        made.cut_between("h2", "h3")
        then = time.monotonic()
        said = job.time_of(
            r"rank 3 on h3 was cut off after .* s \(h2 and h3 do not reach each other, though all reach the "
            r"coordinator: rank 3 cannot stay\); the others go on without it: no host of the job has a free slot\."
        )
        assert said - then < SOON + jobs_slack()
        made.restore_between("h2", "h3")
        counted = sum(len(path.read_text()) for path in tmp_path.glob("*.log"))
        wait_for(job, lambda: sum(len(path.read_text()) for path in tmp_path.glob("*.log")) > counted + 1000)
        finish(tmp_path, job, "mirrored")
        started.wait_until_empty()


@pytest.mark.all_combinations
@pytest.mark.parametrize("seconds", [4, 60])
def test_a_link_that_is_cut_for_a_while(rig: Rigs, tmp_path: Path, seconds: int) -> None:
    """Four seconds are no loss; sixty are that of the host, whose processes end by themselves."""
    made = rig(3)
    with jobs.on(made, tmp_path) as started:
        job = begin(started, "h1:1,h2:1,h3:1", "mirrored")
        wait_for(job, lambda: len(at_work(tmp_path)) == 3)
        made.cut("h3")
        then = time.monotonic()
        if seconds > SOON:
            said = job.time_of(r"host h3 \(rank 2\) was lost .*: nothing was heard of it for 10 s")
            assert said - then < SOON + jobs_slack()
            started.wait_until_empty("h3", seconds=SOON + jobs_slack())
        time.sleep(max(0.0, seconds - (time.monotonic() - then)))  # so long the cable is out
        made.restore("h3")
        before = {path: len(path.read_text()) for path in at_work(tmp_path)}
        wait_for(job, lambda: all(len(p.read_text()) > before[p] + 500 for p in before if "h3" not in p.stem))
        finish(tmp_path, job, "mirrored")
        assert ("was lost" in str(job)) == (seconds > SOON), job
        started.wait_until_empty()


@pytest.mark.all_combinations
def test_a_host_that_the_launcher_reaches_and_the_coordinator_does_not(rig: Rigs, tmp_path: Path) -> None:
    """Its workers end by themselves, and others take their places."""
    made = rig(3)
    shell = tmp_path / "shell"
    made.write_shell(shell)
    with jobs.on(made, tmp_path) as started:
        flags = ["--ssh", str(shell), "-n", "2", "-x", "CHURN_SEES_ALL=1"]
        command = [*HOCKET, "run", "-H", "h1:1,h2:1,h3:1", *ROBUST, *flags, str(SCRIPT), "0", "marks"]
        process = subprocess.Popen(
            command, cwd=tmp_path, env={**os.environ, "HOCKET_RUN_DIR": "runs", "PYTHONPATH": START}, text=True,
            stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
        )  # fmt: skip
        started.running.append(job := Running(process))
        wait_for(job, lambda: len(at_work(tmp_path)) == 2)
        made.cut("h2")
        job.time_of(r"rank 1 on h2 was cut off after .* asked for some: h3")
        job.time_of("the new rank 1 on h3 has joined")
        made.restore("h2")
        wait_for(job, lambda: len(at_work(tmp_path)) == 3)
        finish(tmp_path, job, "mirrored")
        started.wait_until_empty()


def jobs_slack() -> float:
    """Seconds that this machine may take for what should take none; more where others use it too."""
    return 3.0 * load.share()
