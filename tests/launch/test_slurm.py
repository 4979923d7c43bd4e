"""Jobs in a real Slurm of two nodes: srun of hocket run and of the script, lost workers, a node that is gone."""

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from launch import law
from launch.slurm import Slurm

HOCKET = (sys.executable, "-m", "hocket", "run", "--no-record")


def lawful(path: Path, tmp_path: Path, part: int = law.BATCH) -> None:
    """Compare with what one process does."""
    alone = tmp_path / "alone.json"
    subprocess.run([sys.executable, str(law.SCRIPT), str(alone), str(part)], check=True, timeout=300)
    assert json.loads(path.read_text()) == pytest.approx(json.loads(alone.read_text()), rel=1e-9, abs=1e-12)


def part_of(workers: int) -> str:
    return str(law.BATCH // workers)


@pytest.mark.parametrize(
    "flags",
    [[], pytest.param(["--servers", "1", "--strategy", "bsp"], marks=pytest.mark.all_combinations)],
    ids=["mirrored", "bsp"],
)
def test_the_tasks_of_a_step_are_one_job(slurm: Slurm, tmp_path: Path, flags: list[str]) -> None:
    done = slurm.command(
        "srun", "-N2", "-n4", *HOCKET, *flags, str(law.SCRIPT), str(tmp_path / "out.json"), part_of(4)
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert "hocket: SLURM_NTASKS=4: 4 tasks are one job, launched by this one" in done.stderr
    assert "is open" not in done.stderr
    lawful(tmp_path / "out.json", tmp_path)
    assert not list((slurm.folder / "home").glob(".hocket/*")), "the secret is removed"


@pytest.mark.all_combinations
def test_a_step_of_scripts_is_one_job_without_a_launcher(slurm: Slurm, tmp_path: Path) -> None:
    done = slurm.command("srun", "-N2", "-n3", sys.executable, str(law.SCRIPT), str(tmp_path / "out.json"), part_of(3))
    assert done.returncode == 0, done.stderr
    assert "hocket: SLURM_NTASKS=3: 3 workers of one job, which meet at 127.0.0.1:" in done.stderr
    lawful(tmp_path / "out.json", tmp_path)


STOPS = """
import os, sys, time, torch, hocket
from pathlib import Path
hocket.init()
here = Path(sys.argv[1])
model = torch.nn.Linear(2, 1)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
data = torch.utils.data.TensorDataset(torch.ones(40, 2), torch.ones(40, 1))
model, optimizer, loader = hocket.distribute(model, optimizer, torch.utils.data.DataLoader(data, batch_size=2))
for number, (x, y) in enumerate(loader):
    torch.nn.functional.mse_loss(model(x), y).backward()
    optimizer.step()
    optimizer.zero_grad()
    if number == 2:
        (here / f"rank{hocket.rank()}").write_text(str(os.getpid()))
        while not (here / "go on").exists():
            time.sleep(0.01)
print("finished", hocket.rank())
"""


def begin(slurm: Slurm, folder: Path, *flags: str, before: tuple[str, ...] = ()) -> subprocess.Popen[str]:
    """Start two workers on two nodes, and wait until each is in its third step."""
    (folder / "script.py").write_text(STOPS)
    words = ["srun", "-N2", "-n2", *before, *HOCKET, *flags, str(folder / "script.py"), str(folder)]
    job = subprocess.Popen(
        words, env=slurm.environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, cwd=folder
    )
    deadline = time.monotonic() + 300
    while not all((folder / f"rank{rank}").exists() for rank in range(2)):
        assert time.monotonic() < deadline and job.poll() is None, job.communicate(timeout=60)[0]
        time.sleep(0.05)
    return job


def test_a_killed_worker_ends_the_job_and_is_named(slurm: Slurm, tmp_path: Path) -> None:
    job = begin(slurm, tmp_path, "--on-loss", "end")
    os.kill(int((tmp_path / "rank1").read_text()), signal.SIGKILL)
    (tmp_path / "go on").touch()
    out, _ = job.communicate(timeout=300)
    assert job.returncode == 137 and "rank 1 on n2 was killed by SIGKILL" in out, out


@pytest.mark.all_combinations
@pytest.mark.keeps_ports  # the node's daemon is another one afterwards
def test_the_others_go_on_without_a_node_that_is_gone(slurm: Slurm, tmp_path: Path) -> None:
    job = begin(slurm, tmp_path, "--transport", "tcp", before=("--no-kill", "--kill-on-bad-exit=0"))
    try:
        slurm.kill_node("n2")
        slurm.command("scontrol", "update", "nodename=n2", "state=down", "reason=gone")  # what a time-out finds out
        (tmp_path / "go on").touch()
        out, _ = job.communicate(timeout=300)
        assert "lost on the way: host n2 (rank 1) was lost" in out, out
        assert "finished 0" in out and "finished 1" not in out, out
    finally:
        job.kill()
        job.wait()
        slurm.start_node("n2")
