"""What a worker tells the launcher: every sample that it has trained on, once, the last ones included."""

import os
from itertools import islice
from typing import Any

import pytest
import torch
from pool import Pool, needs
from strategies.training import Case, make

import hocket
from hocket.events import PipeSink, Progress, RecordDecoder
from hocket.job.counts import Tally
from hocket.job.worker import current

EPOCHS = 2


def train(strategy: str, most: int | None) -> tuple[int, int, int]:
    """Samples that this worker has trained on, those that it has told last, and those of all as far as it knows."""
    worker = current()
    reader, writer = os.pipe()
    worker.sink = PipeSink(writer)
    model, optimizer, loader = hocket.distribute(*make(Case(), 1), strategy=strategy)
    next(iter(loader))  # a look at the data
    own = 0
    for _ in range(EPOCHS):
        for x, y in islice(loader, most):
            ((model(x) - y) ** 2).mean().backward()
            optimizer.step()
            optimizer.zero_grad()
            own += len(x) if loader.weight else 0
    worker.teller.tell_again()  # as at the end of a script
    os.close(writer)
    with os.fdopen(reader, "rb") as pipe:
        told = [record for record in RecordDecoder().feed(pipe.read()) if isinstance(record, Progress)]
    return own, told[-1].own, worker.training.counts.samples


@pytest.mark.parametrize("strategy", ["asynchronous", "downpour(push=5, fetch=3)", "hogwild", "gossip"])
def test_batches_of_a_queue(pool: Pool, strategy: str) -> None:
    found = pool.run(3, train, strategy, None, **needs(strategy))
    assert sum(told for _, told, _ in found) == EPOCHS * Case().samples
    for own, told, _ in found:
        assert told == own
    assert {known for _, _, known in found} == {EPOCHS * Case().samples}


@pytest.mark.parametrize(
    ("workers", "strategy", "most"), [(2, "mirrored", None), (1, "mirrored", 3), (2, "central", 3)]
)
def test_batches_that_are_divided(pool: Pool, workers: int, strategy: str, most: int | None) -> None:
    found = pool.run(workers, train, strategy, most)
    assert all(told == own for own, told, _ in found)
    if most is None:
        assert {sum(told for _, told, _ in found), *(known for *_, known in found)} == {EPOCHS * Case().samples}


def test_what_is_given_counts_when_there_was_training() -> None:
    steps = 0
    tally = Tally(lambda: steps)
    first, second, looked = object(), object(), object()
    tally.give(looked, 100)
    tally.close(looked)
    tally.give(first, 3)
    tally.give(second, 4)  # zip()
    assert tally.own == 0
    steps += 1
    assert tally.own == 7
    tally.give(first, 5)
    tally.give(first, 6)  # their losses are added up
    tally.close(first)
    assert tally.own == 7
    steps += 1
    assert tally.own == 18
    tally.give(second, 9)
    tally.drop()
    steps += 1
    assert tally.own == 18
    tally.restart(1000)
    assert (tally.own, tally.before) == (0, 1000)


def look_and_train() -> Any:
    """``next(iter(loader))`` to train on: the loop is over before the batch is used."""
    model, optimizer, loader = hocket.distribute(*make(Case(), 1), strategy="mirrored")
    for _ in range(3):
        x, y = next(iter(loader))
        torch.nn.functional.mse_loss(model(x), y).backward()
        optimizer.step()
    return current().training.counts.tally.own


def test_single_batches(pool: Pool) -> None:
    assert pool.run(2, look_and_train) == [9, 9]
