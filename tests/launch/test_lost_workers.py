"""Real jobs of mirrored that go on without a killed worker, from the command to the record."""

import os
import re
import signal
import sqlite3
import subprocess
import time
from pathlib import Path

import pytest

from launch.test_served_jobs import HOCKET, find, finish, read_until, started

GOES_ON = ("-n", "3", "--on-loss", "continue", "--check-replicas", "1")
FLAGS = (*GOES_ON, "--checkpoint", "saved", "--checkpoint-every", "4")


def saved_step(folder: Path) -> int:
    """The step of the last checkpoint."""
    return max((int(path.name.rpartition("-")[2]) for path in (folder / "saved").glob("[0-9]*-step-*")), default=0)


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


def test_a_run_without_some_of_its_workers_is_resumed(tmp_path: Path) -> None:
    (tmp_path / "wait").touch()
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
    with started(tmp_path, *FLAGS) as job:
        out, err = finish(job)
        assert job.returncode == 0, err
        assert "batches" in out
    databases = sorted((tmp_path / "runs").glob("*/*.sqlite"), key=lambda path: path.stat().st_mtime)
    with sqlite3.connect(databases[-1]) as record:
        assert record.execute("SELECT max(seen) FROM steps").fetchone()[0] == 480


@pytest.mark.parametrize(
    ("flags", "line"),
    [
        (("-n", "2", "--on-loss", "continue", "--strategy", "central"), "'central' cannot go on without a worker"),
        (("-n", "2", "--on-loss", "continue", "--transport", "gloo"), "--on-loss continue needs hocket run"),
        (("-n", "2", "--on-loss", "perhaps"), "the choices are end, continue"),
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
