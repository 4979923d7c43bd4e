"""Where newcomers could not be told what the others did before they trained, nobody comes, and the others go on."""

import os
import signal
from typing import Any

import torch
from pool import Pool, RemoteError, needs
from products import product
from torch import nn
from torch.utils.data import DataLoader

import hocket
from hocket.comm import kept_answers
from hocket.events import NoSink, Survival
from hocket.job.worker import current
from job.test_newcomers import BATCH, Numbered, build

MANY = "the script exchanges more than 16 MB, or more than 500 times, before its first training loop"
GROUPS = "the script uses groups, or messages between workers, before its first training loop"


class Told(NoSink):
    """Keeps what the launcher is told of newcomers."""

    def __init__(self) -> None:
        self.survivals: list[tuple[bool, str]] = []

    def put(self, record: object) -> None:
        if isinstance(record, Survival) and (record.replaces or record.obstacle):
            self.survivals.append((record.replaces, record.obstacle))


def exchange(what: str) -> None:
    """What newcomers cannot be told."""
    if what == "calls":
        for _ in range(501):
            hocket.barrier()
    elif what == "bytes":
        hocket.allreduce(torch.zeros((kept_answers.MOST >> 2) + 1), "sum")
    elif hocket.rank() in (members := [0, 2]):
        hocket.barrier(group=hocket.group(members))


def train(strategy: str, what: str, *, is_early: bool, dies: bool = False) -> tuple[list[tuple[bool, str]], Any]:
    """Exchange too much, before ``hocket.resume()`` or between that and the loop; rank 1 may die there."""
    told = current().sink = Told()
    model, optimizer, scheduler = build()
    loader = DataLoader(Numbered(), BATCH)
    model, optimizer, loader = hocket.distribute(model, optimizer, loader, strategy=strategy)
    if is_early:
        exchange(what)
    hocket.resume(model=model, optimizer=optimizer, scheduler=scheduler, loader=loader)
    if dies and hocket.rank() == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    if not is_early:
        exchange(what)
    for _, x, y in loader:
        ((model(x) - y) ** 2).mean().backward()
        optimizer.step()
        optimizer.zero_grad()
    parameters: list[float] = nn.utils.parameters_to_vector(model.parameters()).tolist()
    return told.survivals, parameters


@product(strategy=["mirrored", "asynchronous"], what=["calls", "bytes", "groups"], is_early=[True, False])
def test_the_launcher_is_told_that_nobody_can_join(pool: Pool, strategy: str, what: str, is_early: bool) -> None:
    settings = needs(strategy)
    found = pool.run(3, train_named, strategy, what, is_early, on_loss="auto", strategy=strategy, **settings)
    hindered = [(False, GROUPS if what == "groups" else MANY)]
    for rank, (told, _) in enumerate(found):
        knows = what != "groups" or rank != 1
        assert told == (([] if is_early else [(True, "")]) + hindered if knows else [(True, "")]), (rank, told)


def train_named(strategy: str, what: str, is_early: bool) -> tuple[list[tuple[bool, str]], Any]:
    return train(strategy, what, is_early=is_early)


def train_and_die(strategy: str, what: str) -> tuple[list[tuple[bool, str]], Any]:
    return train(strategy, what, is_early=False, dies=True)


@product(strategy=["mirrored", "asynchronous"], what=["calls", "groups"])
def test_a_newcomer_that_cannot_join_ends_and_the_others_go_on(pool: Pool, strategy: str, what: str) -> None:
    """It was called for when nobody knew."""
    settings = {**needs(strategy), "on_loss": "replace", "timeout": 50.0}
    found = pool.outcomes(3, train_and_die, strategy, what, replaced=[1], strategy=strategy, **settings)
    assert not any(isinstance(each, RemoteError) for each in found[::2]), found
    assert isinstance(found[1], RemoteError) and (found[1].kind, found[1].message) == ("Left", "0"), found[1]
