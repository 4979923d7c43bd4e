"""A strategy from outside the package is one file: a spec and a class, found through an entry point."""

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from hocket.errors import StrategyError
from hocket.specs import Mirrored
from hocket.strategies.mirrored import MirroredTraining

TOY = '''
"""Gradients are added up over all workers in the step, times a number."""

from dataclasses import dataclass

import torch

from hocket.specs import Spec
from hocket.strategies.base import Strategy


@dataclass(frozen=True)
class Summed(Spec):
    name = "summed"
    implementation = "toy:SummedTraining"

    times: float = 1.0


class SummedTraining(Strategy):
    def __init__(self, context, spec):
        super().__init__(context, spec)
        self.capture_in_place()

    def step(self, original, closure=None, **options):
        for parameter in self.context.members.parameters:
            self.context.communicator.allreduce(parameter.grad, "sum")
            parameter.grad.mul_(self.spec.times)
        return original(**options)
'''

SCRIPT = """
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import hocket

hocket.init()
torch.manual_seed(0)
model = nn.Linear(5, 1).double()
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
x = torch.linspace(-1, 1, 60, dtype=torch.float64).view(12, 5)
loader = DataLoader(TensorDataset(x, x.square().sum(1, keepdim=True)), 2)
model, optimizer, loader = hocket.distribute(model, optimizer, loader)
for x, y in loader:
    optimizer.zero_grad()
    nn.functional.mse_loss(model(x), y).backward()
    optimizer.step()
if hocket.rank() == 0:
    torch.save(model.state_dict(), "found.pt")
"""


def test_its_law_holds_in_a_job(tmp_path: Path) -> None:
    """The sum over P workers with rate η is one process with P times the batch and rate P·η."""
    info = tmp_path / "toys-1.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: toys\nVersion: 1.0\n")
    (info / "entry_points.txt").write_text("[hocket.strategies]\nsummed = toy:Summed\n")
    (tmp_path / "toy.py").write_text(TOY)
    (tmp_path / "train.py").write_text(SCRIPT)
    command = [sys.executable, "-m", "hocket", "run", "-n", "2", "--strategy", "summed(times=1.5)", "train.py"]
    path = os.pathsep.join(filter(None, (str(tmp_path), os.environ.get("PYTHONPATH"))))
    ended = subprocess.run(
        command, cwd=tmp_path, env={**os.environ, "PYTHONPATH": path}, capture_output=True, text=True, timeout=120
    )
    assert ended.returncode == 0, ended.stderr
    torch.manual_seed(0)
    model = nn.Linear(5, 1).double()
    optimizer = torch.optim.SGD(model.parameters(), lr=2 * 1.5 * 0.1)
    data = torch.linspace(-1, 1, 60, dtype=torch.float64).view(12, 5)
    for x in data.split(4):
        optimizer.zero_grad()
        nn.functional.mse_loss(model(x), x.square().sum(1, keepdim=True)).backward()
        optimizer.step()
    found = torch.load(tmp_path / "found.pt")
    for name, value in model.state_dict().items():
        torch.testing.assert_close(found[name], value, rtol=1e-9, atol=1e-9)


def test_captured_of_a_strategy_like_mirrored_is_refused() -> None:
    class Mistaken(MirroredTraining):
        def captured(self) -> None: ...

    context: Any = None
    with pytest.raises(StrategyError, match=r"Mistaken.captured would never be called: .*capture_in_place"):
        Mistaken(context, Mirrored())
