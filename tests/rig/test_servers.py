"""Real trainings with parameter servers between hosts of a rig: encrypted, on hosts of their own, and with losses."""

import subprocess
import sys
from pathlib import Path

import pytest
from conftest import Rigs

from hocket.lab.rig import Rig
from launch.test_served_jobs import finish, read_until

HOCKET = [sys.executable, "-m", "hocket.launch.cli", "run", "--no-record"]
TRAIN = """
import os, time, torch, hocket
hocket.init()
torch.manual_seed(0)
model = torch.nn.Linear(4, 1).double()
optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.5)
x = torch.randn(96, 4).double()
data = torch.utils.data.TensorDataset(x, x.sum(1, keepdim=True))
loader = torch.utils.data.DataLoader(data, 4)
model, optimizer, loader = hocket.distribute(model, optimizer, loader)
seen = 0
for epoch in range(2):
    for a, b in loader:
        ((model(a) - b) ** 2).mean().backward()
        optimizer.step()
        optimizer.zero_grad()
        seen += len(a)
        if seen == 8:
            print("running", flush=True)
        while os.path.exists("wait") and seen >= 8:
            time.sleep(0.01)
loss = ((model(x) - x.sum(1, keepdim=True)) ** 2).mean().item()
print("seen", int(hocket.total(seen)), "loss", round(hocket.mean(loss), 6), flush=True)
"""


def start(made: Rig, folder: Path, *flags: str) -> "subprocess.Popen[str]":
    (folder / "train.py").write_text(TRAIN)
    return made.start(
        "h1", [*HOCKET, *flags, "train.py"], cwd=folder, text=True, stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE, stderr=subprocess.PIPE,
    )  # fmt: skip


@pytest.mark.few(1)
@pytest.mark.parametrize("flags", [("--server-hosts", "h3"), ("--tls", "off"), ("--transport", "gloo")])
def test_a_training_between_hosts(rig: Rigs, tmp_path: Path, flags: tuple[str, ...]) -> None:
    made = rig(3)
    job = start(made, tmp_path, "-H", "h1:2,h2:1", "--servers", "2", "--strategy", "bsp", *flags)
    out, err = job.communicate(timeout=90)
    assert job.returncode == 0, err
    lines = {line.partition("] ")[2] for line in out.splitlines() if "seen" in line}
    assert len(lines) == 1 and next(iter(lines)).startswith("seen 192 loss 0.0"), out
    hosts = ("h3", "h3") if flags[0] == "--server-hosts" else ("h1", "h2")
    for number, host in enumerate(hosts):
        assert f"server {number} on {host}: busy" in err


@pytest.mark.few(1)
@pytest.mark.parametrize("strategy", ["asynchronous", "bsp"])
def test_a_host_with_a_worker_alone_may_be_lost(rig: Rigs, tmp_path: Path, strategy: str) -> None:
    made = rig(2)
    (tmp_path / "wait").touch()
    flags = ("-H", "h1:2,h2:1", "--servers", "1", "--server-hosts", "h1", "--strategy", strategy)
    job = start(made, tmp_path, *flags)
    try:
        assert job.stdout is not None
        for _ in range(3):
            assert "running" in job.stdout.readline()
        assert made.kill("h2") > 0
        heard = read_until(job.stderr, "rank 2")  # its loss has been noticed
        (tmp_path / "wait").unlink()
        out, err = finish(job)
        assert job.returncode == 0, heard + err
        assert "lost on the way: " in err
        totals = {int(line.split()[2]) for line in out.splitlines() if "seen" in line}
        assert len(totals) == 1 and 192 - 2 * 4 <= totals.pop() <= 192, out  # without what the lost one had done
    finally:
        job.kill()
        job.communicate()
