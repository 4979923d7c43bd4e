"""Samples that kill whoever gets them: the job ends, and names them."""

import subprocess
import sys
from pathlib import Path

import pytest
from products import rarely

SCRIPT = """
import os, signal
import torch
from torch.utils.data import DataLoader, Dataset
import hocket

class Samples(Dataset):
    def __len__(self):
        return 60

    def __getitem__(self, index):
        return index, torch.ones(2)

hocket.init()
torch.manual_seed(0)
model = torch.nn.Linear(2, 1)
optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
model, optimizer, loader = hocket.distribute(model, optimizer, DataLoader(Samples(), 2, shuffle=True))
hocket.resume(model=model, optimizer=optimizer, loader=loader)
for epoch in range(3):
    for numbers, x in loader:
        if epoch == 1 and 17 in numbers.tolist():
            os.kill(os.getpid(), signal.SIGKILL)
        model(x).mean().backward()
        optimizer.step()
        optimizer.zero_grad()
"""


@pytest.mark.parametrize(
    "options",
    [
        "--on-loss continue",
        rarely("--on-loss replace"),
        "--servers 1 --strategy asynchronous",
        *map(rarely, ("--strategy gossip", "--strategy hogwild", "--servers 1 --strategy bsp --on-loss replace")),
    ],
)
def test_samples_on_which_two_workers_die_in_a_row_end_the_job(tmp_path: Path, options: str) -> None:
    (tmp_path / "train.py").write_text(SCRIPT)
    command = [sys.executable, "-m", "hocket.launch.cli", "run", "-n", "3", *options.split(), "train.py"]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 1, done.stderr
    said = done.stderr.splitlines()[-1]
    assert "two workers in a row have died with the same samples of the data set (numbers" in said, done.stderr
    assert "17" in said.partition("numbers")[2].partition(")")[0].replace(",", "").split()
