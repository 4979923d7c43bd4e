"""What would end well with a useless result is told in one line, as early as it can be known."""

from __future__ import annotations

import contextlib
import io
import sys
from typing import Any

import pytest
import torch
from pool import Pool
from torch import nn
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

import hocket
from hocket import config
from hocket.job import forgotten, worker

DATA = TensorDataset(torch.randn(12, 3))


def step(model: nn.Module, optimizer: torch.optim.Optimizer, x: torch.Tensor) -> None:
    optimizer.zero_grad()
    model(x).sum().backward()
    optimizer.step()


def script(what: str) -> list[str]:
    model = nn.Linear(3, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    loader: Any = DataLoader(DATA, 2)
    said = io.StringIO()
    with contextlib.redirect_stderr(said):
        if what == "nothing":
            step(model, optimizer, torch.ones(2, 3))
            step(model, optimizer, torch.ones(2, 3))
        elif what == "by hand":
            for parameter in model.parameters():
                hocket.broadcast(parameter.data)
            step(model, optimizer, torch.ones(2, 3))
        else:
            hocket.distribute(model, optimizer)
            if what == "sampler":
                loader = DataLoader(DATA, 2, sampler=DistributedSampler(DATA, hocket.size(), hocket.rank()))
            if what == "good":
                loader = hocket.distribute(loader=loader)
                hocket.resume(model=model, optimizer=optimizer, loader=loader)
            for (x,) in loader:
                step(model, optimizer, x)
    return said.getvalue().splitlines()


@pytest.mark.parametrize(
    ("what", "message"),
    [
        ("nothing", "optimizer.step() before any hocket.distribute(), on 2 workers: each trains a model of its own"),
        ("no loader", "the script takes its batches from a DataLoader that was not given to hocket.distribute()"),
        ("sampler", ""), ("by hand", ""), ("good", ""),
    ],
)  # fmt: skip
def test_what_was_forgotten_is_told_once_on_rank_0(pool: Pool, what: str, message: str) -> None:
    first, second = pool.run(2, script, what)
    assert len(first) == bool(message) and message in "".join(first) and second == []


def test_checkpoints_without_resume_are_told_of_at_the_first_step(pool: Pool, tmp_path: Any) -> None:
    folder = str(tmp_path / "kept")
    (first,) = pool.run(1, script, "no loader", checkpoint=folder)
    assert len(first) == 1 and "hocket.resume() was not called before the first step" in first[0]
    (first,) = pool.run(1, script, "good", checkpoint=folder)
    assert first == []


def wrong(what: str) -> None:
    model = nn.Linear(3, 1)
    optimizer: Any = torch.optim.SGD(model.parameters(), lr=0.1)
    if what == "swapped":
        hocket.distribute(optimizer, model)
    elif what == "loader":
        hocket.distribute(model, DataLoader(DATA), optimizer)
    elif what == "other":
        hocket.distribute(nn.Linear(3, 1), optimizer)
    elif what == "class":
        optimizer = torch.optim.Adam(model.parameters()) if hocket.rank() else optimizer
        hocket.distribute(model, optimizer)
    else:
        hocket.distribute(model, torch.optim.LBFGS(model.parameters()), strategy="hogwild")


@pytest.mark.parametrize(
    ("what", "kind", "message"),
    [
        ("swapped", "UsageError", "the model is a SGD, not an nn.Module; give them in this order"),
        ("loader", "UsageError", "the optimizer is a DataLoader, not an optimizer or a list of them"),
        ("other", "UsageError", "the optimizer trains other parameters than those of this Linear"),
        ("class", "MismatchError", "the optimizers differ: SGD on rank 0 and Adam on rank 1"),
        ("hogwild", "StrategyError", "LBFGS searches along a line"),
    ],
)
def test_what_is_certainly_wrong_raises(pool: Pool, what: str, kind: str, message: str) -> None:
    for outcome in pool.outcomes(2, wrong, what, coordinated=what == "hogwild"):
        assert outcome.kind == kind and message in outcome.message


def test_one_line_says_that_there_are_copies(monkeypatch: Any, capsys: Any) -> None:
    monkeypatch.setattr(sys, "argv", ["/somewhere/train.py", "--epochs", "3"])
    forgotten.warn_of_copies({"PMIX_RANK": "1"})
    said = capsys.readouterr().err
    assert said.count("\n") == 1 and "one of several copies of the script" in said
    assert "each of them trains alone" in said and "'hocket run -n 2 train.py'" in said


@pytest.mark.parametrize("environ", [{}, {"PMIX_RANK": "0"}, {"PMIX_RANK": "2"}])
def test_a_script_that_is_alone_hears_nothing(environ: dict[str, str], capsys: Any) -> None:
    forgotten.warn_of_copies(environ)
    assert capsys.readouterr().err == ""


@pytest.mark.parametrize("launched", [False, True])
def test_only_who_is_no_worker_of_a_job_is_told(launched: bool, monkeypatch: Any, capsys: Any) -> None:
    monkeypatch.setattr(worker, "_of_process", None)
    monkeypatch.setattr(config, "environment", lambda: {"PMIX_RANK": "1"})
    monkeypatch.setattr(config, "read", lambda: config.Config(launched=launched))
    worker.init()
    assert ("one of several copies" in capsys.readouterr().err) is not launched
