"""Functions for the tests of ``hocket.launch()``, in a module that workers can import."""

import os
import signal
import sys
import time
from pathlib import Path

import numpy as np
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import hocket


def everything(extra: object, *, more: object = None) -> dict[object, object]:
    return {
        "extra": extra, "more": more, "who": (hocket.rank(), hocket.size()),
        3: [None, True, 1.5, float("inf"), b"\x00"],
        "tensor": torch.arange(6).reshape(2, 3).t(), "array": np.arange(3.0), "set": {1, 2}, "complex": 1 + 2j,
        "parameter": nn.Parameter(torch.ones(2)), "half": torch.ones(2, dtype=torch.bfloat16),
    }  # fmt: skip


def total(x: torch.Tensor) -> float:
    return float(hocket.allreduce(x * (hocket.rank() + 1), "sum").sum())


def train(steps: int) -> dict[str, torch.Tensor]:
    torch.manual_seed(0)
    model = nn.Linear(4, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    data = TensorDataset(torch.randn(8 * steps, 4))
    model, optimizer, loader = hocket.distribute(model, optimizer, DataLoader(data, 8 // hocket.size()))
    for (x,) in loader:
        optimizer.zero_grad()
        model(x).square().mean().backward()
        optimizer.step()
    return model.state_dict()


def environment() -> dict[str, str]:
    return {name: os.environ.get(name, "") for name in ("HOCKET_STRATEGY", "HOCKET_TIMEOUT", "HOCKET_ON_NAN")}


def end(how: str) -> None:
    print("about to end", flush=True)
    hocket.barrier()
    if hocket.rank() == 1:
        if how == "raise":
            raise ValueError("this rank is broken")
        os.kill(os.getpid(), getattr(signal, how))
    hocket.barrier()


def exit_well() -> None:
    sys.exit(0)


def give(what: str) -> object:
    return {"model": nn.Linear(1, 1), "path": {"at": Path("x")}, "function": give}[what]


def launch_again() -> None:
    hocket.launch(exit_well, n=1)


def sleep(seconds: float) -> None:
    print("sleeping", flush=True)
    time.sleep(seconds)


def timeout(timeout: float) -> float:
    return timeout
