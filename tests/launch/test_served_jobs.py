"""Real jobs with real servers, from the command to the report: killed workers, killed servers, resumptions."""

import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path

import pytest
from products import rarely

HOCKET = [sys.executable, "-m", "hocket.launch.cli"]
TRAIN = """
import os, sys, time, torch, hocket
hocket.init()
torch.manual_seed(0)
model = torch.nn.Sequential(torch.nn.Linear(4, 30), torch.nn.Tanh(), torch.nn.Linear(30, 1))
optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
x = torch.randn(240, 4)
loader = torch.utils.data.DataLoader(torch.utils.data.TensorDataset(x, x.sum(1, keepdim=True)), 4)
model, optimizer, loader = hocket.distribute(model, optimizer, loader)
position = hocket.resume(model=model, optimizer=optimizer, loader=loader)
steps = 0
for epoch in range(position.epoch, 2):
    for a, b in loader:
        ((model(a) - b) ** 2).mean().backward()
        optimizer.step()
        optimizer.zero_grad()
        steps += 1
        if steps == 12:
            print("running", flush=True)
        while steps >= 12 and os.path.exists("wait") or steps >= 20 and os.path.exists("wait later"):
            time.sleep(0.01)
print("batches", int(hocket.total(steps)), flush=True)
"""


@contextmanager
def started(folder: Path, *flags: str, script: str = TRAIN) -> Iterator["subprocess.Popen[str]"]:
    (folder / "train.py").write_text(script)
    env = {**os.environ, "OMP_NUM_THREADS": "1", "HOCKET_RUN_DIR": str(folder / "runs")}
    job = subprocess.Popen(
        [*HOCKET, "run", *flags, "train.py"], cwd=folder, env=env, text=True, stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE, stderr=subprocess.PIPE,
    )  # fmt: skip
    try:
        yield job
    finally:
        job.kill()
        job.communicate()


def find(folder: Path, variable: str) -> int:
    """The process of this job that has ``variable`` in its environment."""
    for entry in Path("/proc").glob("[0-9]*"):
        try:
            told = (entry / "environ").read_bytes().split(b"\0")
            here = entry.joinpath("cwd").readlink() == folder
        except OSError:
            continue
        if here and variable.encode() in told:
            return int(entry.name)
    raise AssertionError(f"nobody has {variable}")


def read_until(pipe: object, text: str, count: int = 1) -> str:
    heard, deadline = "", time.monotonic() + 60
    while heard.count(text) < count:
        assert time.monotonic() < deadline, heard
        line = pipe.readline()  # type: ignore[attr-defined]
        assert line, heard
        heard += line
    return heard


def finish(job: "subprocess.Popen[str]", seconds: float = 90) -> tuple[str, str]:
    """Wait for the end of a job; the rest of its output and of its errors.

    ``communicate`` would lose what ``readline`` has read ahead.
    """
    with ThreadPoolExecutor(2) as readers:
        assert job.stdout is not None and job.stderr is not None
        rest = [readers.submit(pipe.read) for pipe in (job.stdout, job.stderr)]
        try:
            job.wait(seconds)
        except subprocess.TimeoutExpired:
            job.kill()
            raise AssertionError(f"still running after {seconds} s: {[text.result() for text in rest]}") from None
        return rest[0].result(), rest[1].result()


FLAGS = ("-n", "3", "--servers", "2", "--checkpoint", "saved", "--checkpoint-every", "4")


@pytest.mark.few(1)
@pytest.mark.parametrize("strategy", ["asynchronous", rarely("ssp(staleness=20)"), "bsp"])
def test_the_others_go_on_without_a_killed_worker(tmp_path: Path, strategy: str) -> None:
    (tmp_path / "wait").touch()
    with started(tmp_path, *FLAGS, "--on-loss", "continue", "--strategy", strategy) as job:
        read_until(job.stdout, "running", 3)
        os.kill(find(tmp_path, "RANK=1"), signal.SIGKILL)
        heard = read_until(job.stderr, "rank 1")
        (tmp_path / "wait").unlink()
        out, err = finish(job)
        err = heard + err
        assert job.returncode == 0, err
        assert re.search(r"hocket: rank 1 on \S+ was killed by SIGKILL after [\d.]+ s; the others go on", err)
        assert "lost on the way: rank 1" in err
        counts = set(re.findall(r"batches (\d+)", out))
        assert len(counts) == 1 and 120 - 12 <= int(counts.pop()) <= 120, out  # the lost one had done 12, or 11
        if strategy == "bsp":
            assert "ends without it" in err


def test_a_killed_server_ends_the_job_and_the_same_command_goes_on(tmp_path: Path) -> None:
    (tmp_path / "wait").touch()
    flags = (*FLAGS, "--strategy", "bsp")
    with started(tmp_path, *flags) as job:
        read_until(job.stdout, "running", 3)
        os.kill(find(tmp_path, "HOCKET_SERVER=1"), signal.SIGKILL)
        _, err = finish(job)
        assert job.returncode == 128 + signal.SIGKILL
        assert re.search(r"hocket: server 1 on \S+ was killed by SIGKILL", err), err
        assert re.search(r"the last checkpoint is \S+; the same command continues from it", err), err
    (tmp_path / "wait").unlink()
    with started(tmp_path, *flags) as job:
        out, err = job.communicate(timeout=60)
        assert job.returncode == 0, err
        assert "going on from" in err
        saved = int(re.findall(r"going on from \S*step-(\d+)", err)[0])
        assert set(re.findall(r"batches (\d+)", out)) == {str(120 - 3 * saved)}, err


@pytest.mark.parametrize(
    "strategy",
    [
        "asynchronous",
        pytest.param("bsp", marks=pytest.mark.all_combinations),
        pytest.param("gossip", marks=pytest.mark.all_combinations),
        pytest.param("hogwild", marks=pytest.mark.all_combinations),
    ],
)
def test_notice_to_all_is_a_checkpoint_of_all_that_is_done(tmp_path: Path, strategy: str) -> None:
    (tmp_path / "wait").touch()
    servers = ("--servers", "1") if strategy in ("asynchronous", "bsp") else ()
    flags = ("-n", "3", *servers, "--checkpoint", "saved", "--checkpoint-every", "1000", "--strategy", strategy)
    with started(tmp_path, *flags) as job:
        read_until(job.stdout, "running", 3)
        job.send_signal(signal.SIGTERM)
        read_until(job.stderr, "to finish their batch and end")
        (tmp_path / "wait").unlink()
        _, err = finish(job)
        assert job.returncode == 128 + signal.SIGTERM, err
        assert re.search(r"the last checkpoint is \S+; the same command continues from it", err), err
    with started(tmp_path, *flags) as job:
        out, err = finish(job)
        assert job.returncode == 0, err
        assert set(re.findall(r"batches (\d+)", out)) == {str(120 - 3 * 12)}, err


def test_the_record_has_staleness_and_load(tmp_path: Path) -> None:
    with started(tmp_path, "-n", "2", "--servers", "1", "--strategy", "asynchronous") as job:
        _, err = job.communicate(timeout=60)
    assert re.search(r"hocket: staleness \(updates .*\): mean [\d.]+, most \d+", err), err
    env = {**os.environ, "HOCKET_RUN_DIR": str(tmp_path / "runs")}
    shown = subprocess.run(
        [*HOCKET, "runs", "show", "last"], env=env, capture_output=True, text=True, check=True
    ).stdout
    assert "server 0" in shown and "staleness" in shown
