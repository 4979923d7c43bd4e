"""Several workers in one process: each has its own models, loaders and counts, and they do not see each other."""

from __future__ import annotations

import contextvars
import threading
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import hocket
from hocket.comm.alone import AloneCommunicator
from hocket.config import Config
from hocket.errors import UsageError
from hocket.events import Metrics, Sink
from hocket.job import worker
from hocket.job.worker import Worker, acting_as, current


class Kept(Sink):
    def __init__(self) -> None:
        self.events: list[Any] = []

    def put(self, record: Any) -> None:
        self.events.append(record)

    def has_room(self) -> bool:
        return True


@pytest.fixture(autouse=True)
def nobody() -> Iterator[None]:
    """The process itself is no worker."""
    before, worker._of_process = worker._of_process, None
    yield
    worker._of_process = before


def make() -> tuple[Worker, Kept]:
    sink = Kept()
    return Worker(Config(), AloneCommunicator(), sink), sink


def train(samples: int, pause: Callable[[], None]) -> list[float]:
    """A script, which lets another one run after every batch; the weights of its model afterwards."""
    torch.manual_seed(samples)
    x = torch.randn(samples, 3)
    model = nn.Linear(3, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    loader = DataLoader(TensorDataset(x), batch_size=2)
    model, optimizer, loader = hocket.distribute(model, optimizer, loader, on_nan="raise")
    for (batch,) in loader:
        model(batch).square().mean().backward()
        pause()
        optimizer.step()
        optimizer.zero_grad()
        hocket.report(step=current().training.counts.step)
        pause()
    return [value for parameter in model.parameters() for value in parameter.flatten().tolist()]


def in_turn(scripts: list[Callable[[Callable[[], None]], Any]], workers: list[Worker]) -> list[Any]:
    """Run each script in a thread of its own, as its worker; one of them runs at a time, each until it pauses."""
    results: list[Any] = [None] * len(scripts)
    turns = [threading.Semaphore(0) for _ in scripts]
    over = [False] * len(scripts)

    def hand_on(number: int) -> None:
        others = [(number + step) % len(scripts) for step in range(1, len(scripts) + 1)]
        turns[next((other for other in others if not over[other]), number)].release()

    def run(number: int) -> None:
        def pause() -> None:
            hand_on(number)
            turns[number].acquire()

        turns[number].acquire()
        try:
            with acting_as(workers[number]):
                results[number] = scripts[number](pause)
        except BaseException as error:
            results[number] = error
        over[number] = True
        hand_on(number)

    threads = [threading.Thread(target=run, args=(number,)) for number in range(len(scripts))]
    for thread in threads:
        thread.start()
    turns[0].release()
    for thread in threads:
        thread.join()
    for result in results:
        if isinstance(result, BaseException):
            raise result
    return results


def test_two_workers_live_in_one_process() -> None:
    alone = []
    for samples in (8, 12):
        with acting_as(make()[0]):
            alone.append(train(samples, lambda: None))
    (one, told_one), (other, told_other) = make(), make()
    together = in_turn([lambda pause: train(8, pause), lambda pause: train(12, pause)], [one, other])
    assert together == alone
    for each, sink, samples in ((one, told_one, 8), (other, told_other, 12)):
        training = each.training
        assert training.counts.samples == training.counts.tally.own == samples
        assert training.counts.step == training.backward.count == samples // 2
        assert training.loaders == len(training.models) == len(training.strategies) == 1
        steps = [event.values["step"] for event in sink.events if isinstance(event, Metrics)]
        assert steps == list(range(1, samples // 2 + 1))
    assert not {*one.training.parameters} & {*other.training.parameters}


def test_a_worker_looks_at_its_own_models_only() -> None:
    (one, _), (other, _) = make(), make()
    model = nn.Linear(2, 1)
    replaced, successor = (torch.optim.SGD(model.parameters(), lr=0.1) for _ in range(2))
    with acting_as(one):
        hocket.distribute(model, replaced, on_nan="raise")
        hocket.distribute(model, successor, on_nan="raise")
    model(torch.ones(1, 2)).sum().backward()
    with acting_as(other):
        replaced.step()
    assert not other.training.guard.optimizers and other.training.backward.count == 0
    with acting_as(one), pytest.raises(UsageError, match="was replaced"):
        replaced.step()


def test_a_new_thread_sees_the_worker_of_the_process() -> None:
    (one, _), (of_process, _) = make(), make()
    seen: list[Worker | None] = []
    with acting_as(one):
        thread = threading.Thread(target=lambda: seen.append(worker.find()))
        thread.start()
        thread.join()
        worker.become(of_process)
        thread = threading.Thread(target=lambda: seen.append(worker.find()))
        thread.start()
        thread.join()
        seen.append(contextvars.copy_context().run(worker.find))
        seen.append(current())
    assert seen == [None, of_process, one, one] and current() is of_process
    worker.become(None)
    with pytest.raises(UsageError, match="not initialised"):
        hocket.rank()
