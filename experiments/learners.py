"""One simulated training on scikit-learn's digits: many learners, one parameter server, a virtual clock."""

from __future__ import annotations

import argparse
import gc
import json
import math
import multiprocessing
import random
from collections.abc import Callable, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import asdict, dataclass, field
from functools import cache, partial
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.nn import functional

from hocket import specs
from hocket.capture.members import Members
from hocket.comm.alone import AloneCommunicator
from hocket.coordinator.dealer_client import Deal
from hocket.server.server_client import Client
from hocket.server.simulated_servers import SimulatedService, connect, serve
from hocket.specs import Served
from hocket.strategies.base import BatchAtWork, Context, Why
from hocket.strategies.building import build
from hocket.strategies.served import ServedTraining
from hocket.transport.simulated import Simulation, Speed

BATCH = 4  # of one learner
NETWORK = Speed(latency=50e-6, bandwidth=1.25e9)  # 10 Gbit/s Ethernet, about
FAILED = 0.2  # an accuracy in the end below which a training has failed; guessing gives 0.1
HERE = Path(__file__).parent
RESULTS = HERE.parent / "docs" / "experiments"


@cache
def load_digits() -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """Images and labels, for training and for the test; always the same split."""
    from sklearn.datasets import load_digits

    digits = load_digits()
    order = torch.randperm(len(digits.data), generator=torch.Generator().manual_seed(0))
    x, y = torch.tensor(digits.data, dtype=torch.float32)[order] / 16, torch.tensor(digits.target)[order]
    return x[360:], y[360:], x[:360], y[:360]


def make_model(seed: int) -> nn.Module:
    """8 × 8 pixels, a hidden layer of 64, ten digits: 4,810 parameters."""
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        return nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 10))


@dataclass(frozen=True)
class Setting:
    """What is simulated.

    Attributes:
        strategy: As on the command line.
        rate: Of SGD.
        passes: Over the data.
        slowness: By which the step times of each learner are multiplied; 1 if there is nothing for it.
        looks: How often in a pass the accuracy is looked at, which takes no virtual time.
        until: An accuracy that is enough; None to go on to the end.
    """

    strategy: str
    learners: int
    rate: float
    passes: int
    seed: int = 0
    batch: int = BATCH
    slowness: tuple[float, ...] = ()
    looks: int = 1
    until: float | None = None


@dataclass
class Outcome:
    """What came of it.

    Attributes:
        curve: Virtual seconds, passes and test accuracy, as it went.
    """

    setting: dict[str, Any]
    curve: list[tuple[float, float, float]] = field(default_factory=list)
    seconds_per_pass: float = 0.0
    updates: int = 0
    staleness: float = 0.0
    waited: float = 0.0

    @property
    def accuracy(self) -> float:
        """In the end."""
        return self.curve[-1][2]

    @property
    def has_failed(self) -> bool:
        return self.accuracy < FAILED

    def reached(self, accuracy: float) -> tuple[float, float] | None:
        """When that was reached first: virtual seconds and passes."""
        return next(((seconds, passes) for seconds, passes, found in self.curve if found >= accuracy), None)

    def as_data(self) -> dict[str, Any]:
        return asdict(self)


def train(setting: Setting) -> Outcome:
    """Simulate it; the same every time."""
    torch.set_num_threads(1)
    simulation = Simulation()
    served = serve(simulation, 1, setting.learners, timeout=1e5)
    training = _Training(setting, simulation, served)
    simulation.run([partial(training.learn, rank) for rank in range(setting.learners)])
    outcome = training.finish()
    del training, served
    gc.collect()  # models and their hooks hold each other, and shared memory
    return outcome


def train_all(settings: Sequence[Setting], jobs: int) -> list[Outcome]:
    """Simulate several, in so many processes."""
    if jobs == 1:
        return [train(setting) for setting in settings]
    with ProcessPoolExecutor(jobs, multiprocessing.get_context("spawn")) as pool:
        return list(pool.map(train, settings))


@dataclass(frozen=True)
class Options:
    """What is said on the command line of an experiment."""

    quick: bool
    jobs: int
    out: Path


def read_options(description: str | None) -> Options:
    """Of this process."""
    parser = argparse.ArgumentParser(description=description, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="a tiny version, to see that it runs")
    parser.add_argument("--jobs", type=int, default=1, help="processes that simulate at the same time")
    parser.add_argument("--out", type=Path, default=RESULTS, help="folder for the results")
    given = parser.parse_args()
    return Options(given.quick, given.jobs, given.out)


class _Training:
    """What the learners of one simulated job have in common."""

    def __init__(self, setting: Setting, simulation: Simulation, served: SimulatedService) -> None:
        self._setting, self._simulation, self._served = setting, simulation, served
        self._service = served.servers[0]
        self._x, self._y, self._test_x, self._test_y = load_digits()
        self._batches = -(-len(self._x) // setting.batch)
        self._times = json.loads((HERE / "step_times.json").read_text())["seconds"]
        self._done = 0
        self._is_over = False
        self._outcome = Outcome(asdict(setting))
        self._look: Callable[[], float] = lambda: 0.0

    def learn(self, rank: int) -> None:
        """What one learner does, as in a real job with servers."""
        setting, simulation = self._setting, self._simulation
        client = connect(simulation, self._served, rank, setting.learners, NETWORK)
        # The coordinator, which deals out batches, is as far away as the server.
        model = make_model(setting.seed)
        optimizer = torch.optim.SGD(model.parameters(), lr=setting.rate)
        strategy = _build(client, model, optimizer, setting)
        if rank == 0:
            self._look = self._make_look(model, strategy)
        draw = random.Random(f"{setting.seed} {rank}")
        factor = setting.slowness[rank] if setting.slowness else 1.0
        deal = Deal(client)

        def draw_seconds() -> float:
            return factor * draw.choice(self._times)

        for epoch in range(setting.passes):
            order = torch.randperm(len(self._x), generator=torch.Generator().manual_seed(setting.seed * 1000 + epoch))
            self._pass(epoch, client, deal, model, optimizer, strategy, order, draw_seconds)
            if self._is_over:
                return

    def _pass(
        self,
        epoch: int,
        client: Client,
        deal: Deal,
        model: nn.Module,
        optimizer: torch.optim.Optimizer,
        strategy: ServedTraining,
        order: torch.Tensor,
        draw: Callable[[], float],
    ) -> None:
        setting, given = self._setting, []

        def settle(why: Why) -> None:
            strategy.settle(why)
            deal.finish(given)
            given.clear()

        def take() -> int | None:
            """The next batch, also one that comes back when all seem to be dealt."""
            number = deal.take(epoch, self._batches)
            if number is not None:
                return number
            settle(Why.IDLE)
            return deal.take(epoch, self._batches) if client.await_batch(deal, epoch) else None

        while not self._is_over and (number := take()) is not None:
            rows = order[number * setting.batch : (number + 1) * setting.batch]
            name = deal.number, deal.epoch, number
            strategy.begin_batch(BatchAtWork(len(rows), epoch=epoch, weight=float(len(rows)), name=name))
            given.append(number)
            self._simulation.sleep(draw())
            functional.cross_entropy(model(self._x[rows]), self._y[rows]).backward()
            optimizer.step()
            optimizer.zero_grad()
            if not strategy.holds:
                deal.finish(given)
                given.clear()
            self._count()
        settle(Why.LAST_BATCH)
        deal.give_back([])  # tells what is finished, also if this was left because it is enough
        client.leave_epoch(epoch)
        strategy.settle(Why.REFRESH)

    def _count(self) -> None:
        """A batch is done."""
        self._done += 1
        if self._done * self._setting.looks % self._batches < self._setting.looks:
            passes, accuracy = self._done / self._batches, self._look()
            self._outcome.curve.append((self._simulation.now(), passes, accuracy))
            until = self._setting.until
            self._is_over = until is not None and accuracy >= until

    def _make_look(self, model: nn.Module, strategy: ServedTraining) -> Callable[[], float]:
        """Look at what is on the server, which nobody notices."""
        names = {id(parameter): name for name, parameter in model.named_parameters()}
        members = [names[id(parameter)] for parameter in strategy.collector.parameters]
        shard: Any = self._service.tables[0].shard
        views = dict(zip(members, strategy.placement.layout.views(shard.flats), strict=True))

        @torch.no_grad()
        def look() -> float:
            hidden = functional.relu(functional.linear(self._test_x, views["0.weight"], views["0.bias"]))
            found = functional.linear(hidden, views["2.weight"], views["2.bias"])
            if not found.isfinite().all():
                return 0.0
            return float((found.argmax(1) == self._test_y).double().mean())

        return look

    def finish(self) -> Outcome:
        outcome, report = self._outcome, self._service.report()
        outcome.curve.append((self._simulation.now(), self._done / self._batches, self._look()))
        outcome.seconds_per_pass = self._simulation.now() / (self._done / self._batches)
        outcome.updates = report.updates
        ages = [(int(age), count) for each in report.workers.values() for age, count in each["staleness"].items()]
        outcome.staleness = sum(age * count for age, count in ages) / max(1, sum(count for _, count in ages))
        outcome.waited = sum(each["waited"] for each in report.workers.values()) / len(report.workers)
        return outcome


def _build(client: Client, model: nn.Module, optimizer: torch.optim.Optimizer, setting: Setting) -> ServedTraining:
    choice = specs.parse(setting.strategy)
    assert isinstance(choice, Served)
    context = Context(model, optimizer, Members(model, optimizer), AloneCommunicator(), client, on_nan="ignore")
    strategy = build(context, choice)
    assert isinstance(strategy, ServedTraining)
    return strategy


def save(name: str, found: dict[str, Any], folder: Path) -> None:
    """Write results as JSON, numbers rounded."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / f"{name}.json").write_text(json.dumps(_rounded(found)) + "\n")


def _rounded(value: Any) -> Any:
    if isinstance(value, float):
        return float(f"{value:.5g}") if math.isfinite(value) else None
    if isinstance(value, dict):
        return {key: _rounded(each) for key, each in value.items()}
    return [_rounded(each) for each in value] if isinstance(value, list | tuple) else value
