"""Real jobs of gossip, from the command to the report: killed workers, and what is said in the end."""

import os
import re
import signal
import subprocess
from pathlib import Path

import pytest

from launch.test_served_jobs import HOCKET, find, finish, read_until, started


@pytest.mark.few(1)
@pytest.mark.parametrize(
    ("strategy", "victim"),
    [
        ("gossip", 0),
        ("gossip(topology='exponential', push_sum=True)", 2),
        ("gossip(topology='pairs', asynchronous=True)", 0),
    ],
)
def test_the_others_go_on_without_a_killed_worker(tmp_path: Path, strategy: str, victim: int) -> None:
    (tmp_path / "wait").touch()
    with started(tmp_path, "-n", "3", "--on-loss", "continue", "--strategy", strategy) as job:
        read_until(job.stdout, "running", 3)
        os.kill(find(tmp_path, f"RANK={victim}"), signal.SIGKILL)
        heard = read_until(job.stderr, "killed by SIGKILL")
        (tmp_path / "wait").unlink()
        out, err = finish(job)
        err = heard + err
        assert job.returncode == 0, err
        assert re.search(rf"hocket: rank {victim} on \S+ was killed by SIGKILL after [\d.]+ s; the others go on", err)
        assert f"lost on the way: rank {victim}" in err
        counts = set(re.findall(r"batches (\d+)", out))
        assert len(counts) == 1 and 120 - 12 <= int(counts.pop()) <= 120, out  # the lost one had done 12, or 11
        said = r"hocket: gossip on \S.* of 3 \(spectral gap [\d.]+\), then \S.* of 2 \(spectral gap [\d.]+\); distance"
        assert re.search(said, err), err
        assert "update" not in err  # of a server that holds nothing
    env = {**os.environ, "HOCKET_RUN_DIR": str(tmp_path / "runs")}
    command = [*HOCKET, "runs", "show", "last"]
    shown = subprocess.run(command, env=env, capture_output=True, text=True, check=True).stdout
    assert "spectral gap" in shown and "distance from consensus" in shown, shown


@pytest.mark.few(2)
@pytest.mark.parametrize(
    ("flags", "line"),
    [
        (("-n", "3", "--strategy", "gossip(topology='torus')"), "a product of two, such as 4, 6, 8 or 9"),
        (("-n", "3", "--servers", "2", "--strategy", "gossip"), "'gossip' uses no servers"),
        (("-n", "2", "--strategy", "gossip(topology='star')"), "the choices are ring, torus, exponential, complete"),
        (("-n", "2", "--strategy", "gossip(period=0)"), "period=0: must be 1 or more"),
    ],
)
def test_bad_input_gets_a_line(tmp_path: Path, flags: tuple[str, ...], line: str) -> None:
    with started(tmp_path, *flags) as job:
        _, err = job.communicate(timeout=60)
        assert job.returncode and line in err, err
        assert "Traceback" not in err
