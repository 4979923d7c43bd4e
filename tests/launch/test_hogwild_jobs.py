"""Real Hogwild jobs, from the command to the report: a killed worker, and a resumption."""

import os
import re
import signal
from pathlib import Path

import pytest

from launch.test_served_jobs import find, read_until, started

FLAGS = ("-n", "3", "--checkpoint", "saved", "--checkpoint-every", "4")


@pytest.mark.parametrize(("strategy", "rank"), [("hogwild", 0), ("hogwild(locked=True)", 1)])
def test_the_others_go_on_without_a_killed_worker(tmp_path: Path, strategy: str, rank: int) -> None:
    (tmp_path / "wait").touch()
    with started(tmp_path, *FLAGS, "--strategy", strategy) as job:
        read_until(job.stdout, "running", 3)
        os.kill(find(tmp_path, f"RANK={rank}"), signal.SIGKILL)
        heard = read_until(job.stderr, "; the others go on")
        (tmp_path / "wait").unlink()
        out, err = job.communicate(timeout=60)
        err = heard + err
        assert job.returncode == 0, err
        assert re.search(rf"hocket: rank {rank} on \S+ was killed by SIGKILL after [\d.]+ s; the others go on", err)
        counts = set(re.findall(r"batches (\d+)", out))
        assert len(counts) == 1 and 120 - 12 <= int(counts.pop()) <= 120, out


def test_the_same_command_goes_on_from_a_checkpoint(tmp_path: Path) -> None:
    (tmp_path / "wait").touch()
    with started(tmp_path, *FLAGS, "--strategy", "hogwild") as job:
        read_until(job.stdout, "running", 3)
        os.kill(find(tmp_path, "HOCKET_COORDINATOR=1"), signal.SIGKILL)  # without which nothing goes on
        _, err = job.communicate(timeout=30)
        assert job.returncode == 128 + signal.SIGKILL
        assert re.search(r"the last checkpoint is \S+; the same command continues from it", err), err
    (tmp_path / "wait").unlink()
    with started(tmp_path, *FLAGS, "--strategy", "hogwild") as job:
        out, err = job.communicate(timeout=60)
        assert job.returncode == 0, err
        assert "going on from" in err
        assert "server" not in err, err
        counts = set(re.findall(r"batches (\d+)", out))
        assert len(counts) == 1 and 120 - 3 * 12 <= int(counts.pop()) <= 120 - 4, out
