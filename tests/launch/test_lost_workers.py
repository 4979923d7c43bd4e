"""Real jobs of mirrored that go on without a killed worker, from the command to the record."""

import os
import re
import signal
import sqlite3
import subprocess
import time
from pathlib import Path

import load
import pytest
from products import rarely

from hocket.launch import leftovers
from hocket.observe.reader import read
from hocket.observe.show import details
from launch.test_faults import cmdline, mark_of
from launch.test_served_jobs import HOCKET, TRAIN, find, finish, read_until, started

GOES_ON = ("-n", "3", "--on-loss", "continue", "--check-replicas", "1")
FLAGS = (*GOES_ON, "--checkpoint", "saved", "--checkpoint-every", "4")


def saved_step(folder: Path) -> int:
    """The step of the last checkpoint."""
    return max((int(path.name.rpartition("-")[2]) for path in (folder / "saved").glob("[0-9]*-step-*")), default=0)


@pytest.mark.few(1)
@pytest.mark.parametrize("victim", [0, 2])
def test_the_others_go_on_without_a_killed_worker(tmp_path: Path, victim: int) -> None:
    (tmp_path / "wait").touch()
    with started(tmp_path, *FLAGS) as job:
        read_until(job.stdout, "running", 3)
        os.kill(find(tmp_path, f"RANK={victim}"), signal.SIGKILL)
        heard = read_until(job.stderr, "go on without it")
        (tmp_path / "wait").unlink()
        out, err = finish(job)
        err = heard + err
        assert job.returncode == 0, err
        assert re.search(rf"hocket: rank {victim} on \S+ was killed by SIGKILL after [\d.]+ s; the others go on", err)
        assert f"lost on the way: rank {victim}" in err
        assert "Traceback" not in err
        # 20 steps an epoch, with 12 samples each, and perhaps one more for what the lost worker had in hand.
        assert {int(count) for count in re.findall(r"batches (\d+)", out)} <= {80, 82}, out
    assert saved_step(tmp_path) >= 12, "nothing was saved by those who went on"
    (database,) = (tmp_path / "runs").glob("*/*.sqlite")
    with sqlite3.connect(database) as record:
        events = [name for (name,) in record.execute("SELECT name FROM events")]
        assert "worker lost" in events and "workers changed" in events
        assert record.execute("SELECT max(seen) FROM steps").fetchone()[0] == 480
    shown = "\n".join(details(read(database.parent)))
    assert "every sample counted once in 2 epochs: 240 in each of them" in shown, shown
    assert "3 at the start, 1 lost, 2 in the last of 2 generations" in shown, shown


def test_a_run_without_some_of_its_workers_is_resumed(tmp_path: Path) -> None:
    (tmp_path / "wait").touch()
    (tmp_path / "wait later").touch()  # so that it is not over before it is killed
    with started(tmp_path, *FLAGS) as job:
        read_until(job.stdout, "running", 3)
        os.kill(find(tmp_path, "RANK=1"), signal.SIGKILL)
        read_until(job.stderr, "go on without it")
        (tmp_path / "wait").unlink()
        deadline = time.monotonic() + 60
        while saved_step(tmp_path) < 12:  # by two workers
            assert time.monotonic() < deadline
            time.sleep(0.002)
        job.send_signal(signal.SIGKILL)
    (tmp_path / "wait later").unlink()
    with started(tmp_path, *FLAGS) as job:
        out, err = finish(job)
        assert job.returncode == 0, err
        assert "batches" in out
    databases = sorted((tmp_path / "runs").glob("*/*.sqlite"), key=lambda path: path.stat().st_mtime)
    with sqlite3.connect(databases[-1]) as record:
        assert record.execute("SELECT max(seen) FROM steps").fetchone()[0] == 480


@pytest.mark.few(1)
@pytest.mark.parametrize(
    ("limit", "line"),
    [
        (("--min-workers", "3"), "workers that are left: 2, and --min-workers is 3"),
        (("--max-losses", "0"), "workers lost within an hour: 1, and --max-losses is 0"),
    ],
)
@pytest.mark.parametrize("flags", [FLAGS, rarely(("-n", "3", "--servers", "1", "--strategy", "asynchronous"))])
def test_a_limit_ends_the_job(tmp_path: Path, flags: tuple[str, ...], limit: tuple[str, str], line: str) -> None:
    (tmp_path / "wait").touch()
    with started(tmp_path, *flags, *limit) as job:
        read_until(job.stdout, "running", 3)
        os.kill(find(tmp_path, "RANK=1"), signal.SIGKILL)
        _, err = finish(job)
        assert job.returncode == 128 + signal.SIGKILL, err
        assert f"hocket: {line}.\n" in err and "rank 1" in err, err
        assert "hocket: the other 2 workers were stopped." in err


@pytest.mark.parametrize("flags", [("--spares", "1"), rarely(("--servers", "1", "--strategy", "asynchronous"))])
def test_the_coordinators_own_death_ends_the_job_and_the_same_command_continues(
    tmp_path: Path, flags: tuple[str, ...]
) -> None:
    command = ("-n", "2", "--checkpoint", "saved", "--checkpoint-every", "4", *flags)
    (tmp_path / "wait").touch()
    with started(tmp_path, *command) as job:
        read_until(job.stdout, "running", 2)
        mark, deadline = mark_of(job.pid), time.monotonic() + 60
        while not saved_step(tmp_path):
            assert time.monotonic() < deadline
            time.sleep(0.002)
        (coordinator,) = (p for p in leftovers.find(mark) if b"hocket.coordinator" in cmdline(Path(f"/proc/{p}")))
        begin = time.monotonic()
        os.kill(coordinator, signal.SIGKILL)
        _, err = finish(job)
        assert time.monotonic() - begin < 5 * load.share()
        assert not leftovers.find(mark)
        assert job.returncode == 128 + signal.SIGKILL, err
        assert re.search(r"hocket: coordinator on \S+ was killed by SIGKILL", err), err
        assert "the same command continues from it" in err, err
    (tmp_path / "wait").unlink()
    with started(tmp_path, *command) as job:
        _, err = finish(job)
        assert job.returncode == 0 and "hocket: going on from " in err, err


def test_losses_below_a_limit_end_nothing(tmp_path: Path) -> None:
    (tmp_path / "wait").touch()
    with started(tmp_path, *GOES_ON, "--min-workers", "2", "--max-losses", "1") as job:
        read_until(job.stdout, "running", 3)
        os.kill(find(tmp_path, "RANK=1"), signal.SIGKILL)
        read_until(job.stderr, "go on without it")
        (tmp_path / "wait").unlink()
        _, err = finish(job)
        assert job.returncode == 0, err


@pytest.mark.few(1)
@pytest.mark.parametrize("flags", [(), ("--servers", "1", "--strategy", "asynchronous")])
def test_a_signal_to_all_processes_of_a_job_is_a_notice(tmp_path: Path, flags: tuple[str, ...]) -> None:
    (tmp_path / "wait").touch()
    with started(tmp_path, "-n", "2", "--checkpoint", "saved", *flags) as job:
        read_until(job.stdout, "running", 2)
        for pid in (*leftovers.find(mark_of(job.pid)), job.pid):  # as systemd and Slurm send it
            os.kill(pid, signal.SIGTERM)
        heard = read_until(job.stderr, "SIGTERM: the workers have 30 s")
        (tmp_path / "wait").unlink()
        _, err = finish(job)
        assert job.returncode == 143, heard + err
        assert "the same command continues from it" in err, heard + err
        assert "failed" not in err and "was lost" not in err, err
    assert flags or saved_step(tmp_path) >= 12


@pytest.mark.few(1)
@pytest.mark.parametrize(
    "flags",
    [
        ("-n", "1"),
        ("-n", "2", "--strategy", "central"),
        rarely(("-n", "2", "--strategy", "delayed")),
    ],
)
def test_a_job_that_cannot_go_on_is_saved_before_it_ends(tmp_path: Path, flags: tuple[str, ...]) -> None:
    (tmp_path / "wait").touch()
    with started(tmp_path, "--checkpoint", "saved", "--checkpoint-every", "1000", *flags) as job:
        read_until(job.stdout, "running", int(flags[1]))
        job.send_signal(signal.SIGTERM)
        heard = read_until(job.stderr, "SIGTERM: the workers have 30 s")
        (tmp_path / "wait").unlink()
        _, err = finish(job)
        assert job.returncode == 143, heard + err
        assert "the same command continues from it" in err, heard + err
    assert saved_step(tmp_path) >= 2


AFTER_TRAINING = (
    TRAIN
    + """
print("trained", flush=True)
while os.path.exists("wait for notice"):
    time.sleep(0.01)
"""
)


def test_a_script_that_comes_to_its_end_in_spite_of_notice_has_finished(tmp_path: Path) -> None:
    (tmp_path / "wait for notice").touch()
    with started(tmp_path, "-n", "2", script=AFTER_TRAINING) as job:
        read_until(job.stdout, "trained", 2)
        job.send_signal(signal.SIGTERM)
        heard = read_until(job.stderr, "SIGTERM: the workers have 30 s")
        (tmp_path / "wait for notice").unlink()
        _, err = finish(job)
        assert job.returncode == 0 and "ended by" not in err, heard + err


@pytest.mark.few(2)
@pytest.mark.parametrize(
    ("flags", "line"),
    [
        (("-n", "2", "--on-loss", "continue", "--transport", "gloo"), "--on-loss continue needs hocket run"),
        (("-n", "2", "--on-loss", "perhaps"), "the choices are auto, end, continue, replace"),
        (("-n", "2", "--min-workers", "3"), "--min-workers 3, and the job has 2: name fewer"),
        (("-n", "2", "--max-losses", "few"), "--max-losses few: must be a whole number from 0"),
    ],
)
def test_bad_input_gets_a_line(tmp_path: Path, flags: tuple[str, ...], line: str) -> None:
    with started(tmp_path, *flags) as job:
        _, err = job.communicate(timeout=60)
        assert job.returncode and line in err, err


def test_strategies_that_go_on_by_themselves_need_no_flag(tmp_path: Path) -> None:
    with started(tmp_path, "-n", "2", "--on-loss", "continue", "--servers", "1", "--strategy", "asynchronous") as job:
        _, err = job.communicate(timeout=60)
        assert job.returncode == 0, err
    shown = subprocess.run([*HOCKET, "run", "--help"], capture_output=True, text=True, check=True).stdout
    assert "--on-loss" in shown
