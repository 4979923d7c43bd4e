"""Real Hogwild jobs, from the command to the report: a killed worker, and a resumption."""

import os
import re
import signal
import subprocess
from pathlib import Path

import pytest

from launch.test_served_jobs import HOCKET, find, finish, read_until, started

RAISES = """
import torch, hocket
hocket.init()
model = torch.nn.Linear(1, 1)
loader = torch.utils.data.DataLoader(torch.utils.data.TensorDataset(torch.zeros(40, 1)), 2)
model, optimizer, loader = hocket.distribute(model, torch.optim.SGD(model.parameters(), lr=0.1), loader)
batches = iter(loader)  # the loop is closed when Python clears the module, and this worker has said goodbye
for step, (x,) in enumerate(batches):
    model(x).sum().backward()
    optimizer.step()
    if step == 2 and hocket.rank() == 1:
        raise ValueError("of the script")
"""
FLAGS = ("-n", "3", "--checkpoint", "saved", "--checkpoint-every", "4")


@pytest.mark.few(1)
@pytest.mark.parametrize(("strategy", "rank"), [("hogwild", 0), ("hogwild(locked=True)", 1)])
def test_the_others_go_on_without_a_killed_worker(tmp_path: Path, strategy: str, rank: int) -> None:
    (tmp_path / "wait").touch()
    with started(tmp_path, *FLAGS, "--on-loss", "continue", "--strategy", strategy) as job:
        read_until(job.stdout, "running", 3)
        os.kill(find(tmp_path, f"RANK={rank}"), signal.SIGKILL)
        heard = read_until(job.stderr, "; the others go on")
        (tmp_path / "wait").unlink()
        out, err = finish(job)
        err = heard + err
        assert job.returncode == 0, err
        assert re.search(rf"hocket: rank {rank} on \S+ was killed by SIGKILL after [\d.]+ s; the others go on", err)
        counts = set(re.findall(r"batches (\d+)", out))
        assert len(counts) == 1 and 120 - 12 <= int(counts.pop()) <= 120, out


@pytest.mark.all_combinations
def test_the_same_command_goes_on_from_a_checkpoint(tmp_path: Path) -> None:
    (tmp_path / "wait").touch()
    with started(tmp_path, *FLAGS, "--strategy", "hogwild") as job:
        read_until(job.stdout, "running", 3)
        os.kill(find(tmp_path, "HOCKET_COORDINATOR=1"), signal.SIGKILL)  # without which nothing goes on
        _, err = finish(job)
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


def test_a_scripts_own_error_is_the_last_that_is_printed(tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text(RAISES)
    done = subprocess.run(
        [*HOCKET, "run", "--no-record", "-n", "2", "--strategy", "hogwild", "train.py"], cwd=tmp_path,
        capture_output=True, text=True, timeout=60, check=False, env={**os.environ, "OMP_NUM_THREADS": "1"},
    )  # fmt: skip
    assert done.returncode == 1 and done.stderr.splitlines()[-1] == "ValueError: of the script", done.stderr
    assert "Exception ignored" not in done.stderr, done.stderr
