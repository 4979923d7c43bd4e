"""A checkpoint says how workers have come and gone, in this run and in those before."""

import os
import signal
from pathlib import Path
from typing import Any

import pytest
from pool import Pool, needs
from products import rarely
from torch import nn
from torch.utils.data import DataLoader

import hocket
from hocket.events import Facts
from hocket.job.checkpoint.checkpoint_folder import committed, read_manifest
from hocket.job.worker import current
from job.test_regrouping import BATCH, Numbered, build


class Kept:
    """Keeps the facts that a worker tells."""

    def __init__(self) -> None:
        self.facts: dict[str, Any] = {}

    def put(self, record: Any) -> None:
        if isinstance(record, Facts):
            self.facts |= record.values


def train(strategy: str, dies: bool) -> dict[str, Any]:
    """Two epochs, of which each run does one, and rank 1 dies in the first; what this worker has told."""
    sink = current().sink = Kept()
    model, optimizer, loader = hocket.distribute(*build(), DataLoader(Numbered(), BATCH), strategy=strategy)
    mine = hocket.rank()
    place = hocket.resume(model=model, optimizer=optimizer, loader=loader)
    for step, (_, x, y) in enumerate(loader):
        if (mine, step, dies) == (1, 3, True):
            os.kill(os.getpid(), signal.SIGKILL)
        nn.functional.mse_loss(model(x), y).backward()
        optimizer.step()
        optimizer.zero_grad()
    assert place.epoch == (not dies)
    hocket.save(str(current().config.checkpoint), model=model, optimizer=optimizer, loader=loader).wait()
    return sink.facts


@pytest.mark.parametrize("strategy", ["mirrored", "gossip", rarely("asynchronous"), rarely("local_sgd(time=0.01)")])
def test_changes_are_kept_with_those_of_earlier_runs(pool: Pool, tmp_path: Path, strategy: str) -> None:
    settings: dict[str, Any] = {"on_loss": "continue", "timeout": 50.0, **needs(strategy), "strategy": strategy}
    settings |= {"checkpoint": str(tmp_path), "checkpoint_every": 1000}
    found = pool.outcomes_with_death(3, train, 1, strategy, True, **settings)
    assert [isinstance(found[rank], dict) for rank in (0, 2)] == [True, True], found
    first = read_manifest(committed(tmp_path)[-1])
    assert [each["lost"] for each in first["changes"]] == [[1]]
    again = pool.run(2, train, strategy, False, **settings)
    assert again[0]["workers before the checkpoint"] == "1 lost"
    assert read_manifest(committed(tmp_path)[-1])["changes"] == first["changes"]
