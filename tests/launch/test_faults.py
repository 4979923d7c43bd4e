"""Deaths at every phase of a step, signals to the launcher, and what is left behind: nothing.

These are the tests in which a time is part of the promise.
"""

import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import load
import pytest
from products import product

from hocket.launch import leftovers
from launch.test_run import HOCKET, SCRIPT

PHASES = ["import", "before distribute", "forward", "backward", "between", "step", "after", "end"]
STATUS = {"raise": 1, "exit": 7, "hard exit": 9, "SIGKILL": 137, "SIGSEGV": 139}


def run(strategy: str, *args: str, **env: str) -> subprocess.CompletedProcess[str]:
    on_loss = "end" if any(arg.startswith("SIG") for arg in args) else "auto"
    return subprocess.run(
        [*HOCKET, "run", "-n", "2", "--strategy", strategy, "--on-loss", on_loss, SCRIPT, "train", *args],
        capture_output=True, text=True,
        timeout=60, env={**os.environ, **env}, check=False,
    )  # fmt: skip


def check_report(done: subprocess.CompletedProcess[str], how: str) -> None:
    assert done.returncode == STATUS[how], done.stderr
    assert "hocket: rank 1 on " in done.stderr
    report = done.stderr[done.stderr.rindex("hocket: rank 1 on ") :]
    if how == "raise":
        assert done.stderr.splitlines()[-1] == "ValueError: this rank is broken"
        assert "ended with exit code 1" in report and "Traceback (most recent call last)" in report
        assert "WorkerLost" not in done.stderr, "what others suffer hides the cause"
    elif how.startswith("SIG"):
        assert f"was killed by {how}" in report
    else:
        assert f"ended with exit code {STATUS[how]}" in report


@pytest.mark.few(4)
@product(phase=PHASES, strategy=["mirrored", "central(fused=True)"])
def test_a_rank_killed_in_any_phase_is_reported(phase: str, strategy: str) -> None:
    check_report(run(strategy, phase, "SIGKILL"), "SIGKILL")


@pytest.mark.few(1)
@pytest.mark.parametrize("how", ["SIGKILL", "raise"])
def test_a_rank_that_ends_while_others_join_is_reported(how: str) -> None:
    check_report(run("mirrored", "while others join", how), how)


@pytest.mark.few(2)
@product(how=["raise", "exit", "hard exit", "SIGSEGV"], phase=["before distribute", "backward", "step"])
def test_every_way_to_end_is_reported(phase: str, how: str) -> None:
    check_report(run("central", phase, how), how)


def test_a_rank_that_raises_with_closed_streams_is_the_cause() -> None:
    done = run("mirrored", "after", "closed streams")
    check_report(done, "raise")


def test_a_fatal_signal_shows_the_python_stack() -> None:
    done = run("mirrored", "between", "SIGSEGV")
    assert "Fatal Python error: Segmentation fault" in done.stderr and "scripts.py" in done.stderr.partition("Fatal")[2]


@contextmanager
def launched(**env: str) -> Iterator[tuple[subprocess.Popen[bytes], str]]:
    """A job in the middle of its steps, with data-loader processes, and its mark."""
    job = subprocess.Popen(
        [*HOCKET, "run", "-n", "2", SCRIPT, "train", "slow", "", "200"],
        stdout=subprocess.PIPE, stderr=subprocess.DEVNULL,
        env={**os.environ, "TEST_PROCESSES": "2", **env}, start_new_session=True,
    )  # fmt: skip
    try:
        assert job.stdout is not None
        for line in job.stdout:
            if b"step 3" in line:
                break
        yield job, mark_of(job.pid)
    finally:
        with_stdout = job.stdout
        assert with_stdout is not None
        with_stdout.close()
        if job.poll() is None:
            job.kill()
        job.wait()


def mark_of(launcher: int) -> str:
    for entry in Path("/proc").glob("[0-9]*"):
        try:
            parent = int((entry / "stat").read_text().rpartition(")")[2].split()[1])
            values = (entry / "environ").read_bytes().split(b"\0")
        except OSError:
            continue
        for value in values:
            if parent == launcher and value.startswith(b"HOCKET_JOB="):
                return value.partition(b"=")[2].decode()
    raise AssertionError("no worker found")


def wait_until_gone(mark: str, seconds: float) -> None:
    deadline = time.monotonic() + seconds
    while alive := leftovers.find(mark):
        assert time.monotonic() < deadline, f"still there: {alive}"
        time.sleep(0.02)


def test_a_failure_ends_the_job_within_two_seconds() -> None:
    with launched(HOCKET_ON_LOSS="end") as (job, mark):
        started = time.monotonic()
        os.kill(workers(mark)[1], signal.SIGKILL)
        job.wait(timeout=60)
        assert time.monotonic() - started < 2 * load.share()
        assert job.returncode == 137
        assert not leftovers.find(mark)


def workers(mark: str) -> list[int]:
    return [pid for pid in leftovers.find(mark) if os.getsid(pid) == pid]


@pytest.mark.few(2)
@pytest.mark.parametrize(("number", "status"), [(signal.SIGINT, 130), (signal.SIGTERM, 143), (signal.SIGHUP, 129)])
def test_a_signal_to_the_launcher_ends_everything(number: signal.Signals, status: int) -> None:
    with launched() as (job, mark):
        assert len(leftovers.find(mark)) == 7, "a coordinator, two workers with two data-loader processes each"
        job.send_signal(number)
        assert job.wait(timeout=10) == status
        assert not leftovers.find(mark)


def test_the_launchers_own_death_leaves_nothing() -> None:
    with launched() as (job, mark):
        job.kill()
        job.wait()
        wait_until_gone(mark, 5)


def test_the_death_of_the_launcher_and_its_guardian_leaves_nothing() -> None:
    with launched() as (job, mark):
        children = Path(f"/proc/{job.pid}/task/{job.pid}/children").read_text().split()
        guardians = [int(pid) for pid in children if int(pid) not in leftovers.find(mark)]
        assert len(guardians) == 1
        os.kill(guardians[0], signal.SIGKILL)
        job.kill()
        job.wait()
        wait_until_gone(mark, 8)  # data-loader processes look for their parent every five seconds


def test_a_process_that_left_the_session_is_found() -> None:
    done = subprocess.run([*HOCKET, "run", "-n", "2", SCRIPT, "daemon"], capture_output=True, timeout=60, check=False)
    assert done.returncode == 0, done.stderr


def test_under_torchrun_a_killed_worker_leaves_nothing() -> None:
    done = subprocess.run(
        [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "2", SCRIPT, "train", "between", "SIGKILL"],
        capture_output=True, text=True, timeout=120, check=False,
    )  # fmt: skip
    assert done.returncode == 1 and "Signal 9" in done.stderr


def test_a_stopped_worker_is_waited_for(tmp_path: Path) -> None:
    """Slow is not dead: a worker that stands still for a second holds the others up and nothing more."""
    (tmp_path / "wait").touch()
    job = subprocess.Popen(
        [*HOCKET, "run", "-n", "2", SCRIPT, "train", "slow", "", "8"], stdout=subprocess.PIPE, stderr=subprocess.PIPE,
        env={**os.environ, "TEST_WAIT": str(tmp_path / "wait")},
    )  # fmt: skip
    assert job.stdout is not None
    for line in job.stdout:
        if b"step 2" in line:
            break
    victim = workers(mark_of(job.pid))[1]
    os.kill(victim, signal.SIGSTOP)
    (tmp_path / "wait").unlink()
    time.sleep(1)  # it is the time itself that is tested
    os.kill(victim, signal.SIGCONT)
    out, err = job.communicate(timeout=30)
    assert job.returncode == 0, err
    assert out.count(b"finished") == 2


def timed(*args: str) -> tuple[subprocess.CompletedProcess[str], float]:
    started = time.monotonic()
    command = [*HOCKET, "run", "-n", "2", SCRIPT, *args]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    return done, time.monotonic() - started


def test_a_worker_that_raised_but_lives_on_ends_the_job() -> None:
    done, seconds = timed("thread")
    assert done.returncode == 1 and seconds < 30, "its thread sleeps for a minute"
    assert done.stderr.splitlines()[-1] == "ValueError: this rank is broken"


def test_a_talkative_worker_does_not_keep_the_job_alive() -> None:
    done, _ = timed("chatter")
    assert done.returncode == 7


def test_a_process_without_the_mark_is_found() -> None:
    seconds = f"600.{os.getpid()}"  # others on this machine may sleep too
    done, _ = timed("orphan", seconds)
    assert done.returncode == 0
    assert not any(seconds.encode() in cmdline(entry) for entry in Path("/proc").glob("[0-9]*"))


def cmdline(process: Path) -> bytes:
    try:
        return (process / "cmdline").read_bytes()
    except OSError:
        return b""


def test_an_interrupt_that_nobody_asked_for_shows_its_traceback() -> None:
    done, _ = timed("interrupt")
    assert done.returncode == 130 and done.stderr.splitlines()[-1] == "KeyboardInterrupt"


def test_readers_that_a_shell_has_made_are_left_alone(tmp_path: Path) -> None:
    """bash makes the reader of ``2> >(…)`` a child of the launcher, which kills only what the job has started."""
    (tmp_path / "script.py").write_text("import os, signal; os.kill(os.getpid(), signal.SIGKILL)")
    hocket = f"{sys.executable} -m hocket run --no-record -n 1 script.py"
    reader = "cat > err; until [ -e over ]; do sleep 0.01; done; touch lived"
    line = f"{hocket} 2> >({reader}); touch over; until [ -e lived ]; do sleep 0.01; done"
    subprocess.run(["bash", "-c", line], cwd=tmp_path, timeout=60, check=True)
    assert "was killed by SIGKILL" in (tmp_path / "err").read_text()
