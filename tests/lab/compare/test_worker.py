"""What comparisons need of real workers: seeds, the beginning of training, bytes, and the whole way to a report."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

from hocket.lab.compare import comparison_folder
from hocket.observe import reader, run_records

HOCKET = [sys.executable, "-m", "hocket.launch.cli"]
SCRIPT = """
import json, random, sys
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset
import hocket

hocket.init()
drawn = [torch.rand(()).item(), random.random()]
model = nn.Linear(4, 1, bias=False)
optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
loader = DataLoader(TensorDataset(torch.randn(50, 4)), 5)
model, optimizer, loader = hocket.distribute(model, optimizer, loader)
for epoch in range(3):
    for (x,) in loader:
        loss = (model(x) ** 2).mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    hocket.report(loss=loss)
if hocket.rank() == 0:
    print(json.dumps(drawn))
"""


@pytest.fixture
def script(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("HOCKET_RUN_DIR")
    path = tmp_path / "train.py"
    path.write_text(SCRIPT)
    return path


def test_a_seed_makes_runs_alike_and_the_record_says_when_training_began(script: Path) -> None:
    drawn = []
    for workers in ("1", "2"):
        command = [*HOCKET, "run", "-n", workers, "--seed", "7", str(script)]
        done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=True)
        drawn.append(json.loads(done.stdout.removeprefix("[0] ")))
    assert drawn[0] == drawn[1]
    folder = run_records.all_in(Path("hocket-runs"))[-1]
    run, found = reader.read(folder), reader.read_curves(folder)
    assert found.pass_samples == 50 and found.seen == 150 and found.began is not None and found.first is not None
    assert run.fact("run", "started") < found.began <= found.metrics["loss"][0][0]
    assert found.last is not None and found.first <= found.last <= run.fact("run", "started") + run.seconds
    assert run.facts["sent"] == {"rank 0": 15 * 16, "rank 1": 15 * 16}  # 4 parameters in each of 15 steps
    assert set(run.facts["began"]) == {"rank 0", "rank 1"} and run.fact("told", "optimizer") == "SGD"


def test_from_a_script_to_a_report(script: Path) -> None:
    command = [*HOCKET, "compare", "-n", "2", "--strategies", "asynchronous", "--until", "loss<=100", "--out", "out"]
    done = subprocess.run([*command, str(script)], capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines()[-1] == "Report: out/report.html" and Path("out/report.html").is_file()
    alone, served = comparison_folder.load(Path("out")).entries
    assert alone.passes == 1.0 and alone.shares == {"compute": 1.0, "communication": 0.0, "waiting": 0.0}
    (result,) = served.good
    assert result.servers == 1 and result.sent > 0 and sum(result.staleness.values()) > 0
    assert result.told["threads"] >= 1 and sum(result.shares.values()) == pytest.approx(1)
    found = reader.read_curves(
        run_records.all_in(Path("out/runs"))[-1]
    )  # rank 0 may have had a single batch, if it was slow
    assert (result.speed is None) == (found.first == found.last)
