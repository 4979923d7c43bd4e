"""Scripts that have batches which they have not trained on yet: every batch counts what it is, whichever is at work."""

import itertools
import json
import os
import queue
import threading
from collections import deque
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from pool import Pool, needs
from products import product
from server.serving import until
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import hocket
from hocket.job.simulated_job import SimulatedJob
from hocket.job.worker import current

WORKERS, SAMPLES, BATCH, EPOCHS = 2, 21, 4, 2  # the last batch of both together has 5 samples: 3 and 2
STRATEGIES = ["mirrored", "central", "local_sgd(period=1)", "bsp"]


class Script:
    """A training script; ``change`` is what it does to inputs before the model gets them."""

    def __init__(self, change: Callable[[torch.Tensor], torch.Tensor], workers: int = 1, batch: int = BATCH) -> None:
        torch.manual_seed(0)
        self.change, self.epochs = change, EPOCHS
        self.meet: Callable[[], Any] = lambda: None
        self.model: nn.Module = nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 1)).double()
        self.optimizer: Any = torch.optim.SGD(self.model.parameters(), lr=0.2)
        x = torch.randn(SAMPLES, 6, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
        self.data = TensorDataset(x, torch.sin(3 * x.sum(1, keepdim=True)))
        order = torch.Generator().manual_seed(2)
        self.loader: Any = DataLoader(self.data, batch * workers, shuffle=True, generator=order)
        self.evaluation: Any = DataLoader(self.data, BATCH)

    def changed(self, batch: Any) -> Any:
        return None if batch is None else (self.change(batch[0]), batch[1])

    def loss(self, batch: Any) -> torch.Tensor:
        x, y = batch
        loss: torch.Tensor = ((self.model(x) - y) ** 2).mean()
        return loss

    def learn(self, loss: torch.Tensor) -> None:
        self.optimizer.zero_grad()
        loss.backward()
        self.optimizer.step()

    def train(self, batch: Any) -> None:
        self.learn(self.loss(batch))

    def evaluate(self) -> None:
        """An evaluation in the middle, and a meeting of all ranks."""
        with torch.no_grad():
            for batch in self.evaluation:
                self.loss(batch)
        self.meet()


def between(script: Script) -> None:
    """The next batch is asked for between forward and backward pass, as in nanoGPT."""
    for _ in range(script.epochs):
        batches = iter(script.loader)
        batch = script.changed(next(batches, None))
        while batch is not None:
            loss = script.loss(batch)
            batch = script.changed(next(batches, None))
            script.learn(loss)


def before_the_step(script: Script) -> None:
    for _ in range(script.epochs):
        batches = iter(script.loader)
        batch = script.changed(next(batches, None))
        while batch is not None:
            script.optimizer.zero_grad()
            script.loss(batch).backward()
            batch = script.changed(next(batches, None))
            script.optimizer.step()


def fetched(script: Script, depth: int = 1, loader: Any = None) -> Iterator[Any]:
    """The batches of an epoch, of which ``depth`` more have been fetched and changed, as by apex's data_prefetcher."""
    batches = iter(script.loader if loader is None else loader)
    ahead = deque(map(script.changed, itertools.islice(batches, depth)))
    while ahead:
        if (following := next(batches, None)) is not None:
            ahead.append(script.changed(following))
        yield ahead.popleft()


def prefetcher(script: Script) -> None:
    for _ in range(script.epochs):
        for batch in fetched(script):
            script.train(batch)


def deep_prefetcher(script: Script) -> None:
    for _ in range(script.epochs):
        for batch in fetched(script, 3):
            script.train(batch)


def endless_prefetcher(script: Script) -> None:
    """One epoch begins when the last batch of the one before is not trained on."""
    epochs = itertools.chain.from_iterable(script.loader for _ in range(script.epochs))
    for batch in fetched(script, loader=epochs):
        script.train(batch)


def accumulating_prefetcher(script: Script) -> None:
    for _ in range(script.epochs):
        for number, batch in enumerate(fetched(script), start=1):
            script.loss(batch).backward()
            if number % 3 == 0:
                script.optimizer.step()
                script.optimizer.zero_grad()


def accumulating_between(script: Script) -> None:
    for _ in range(script.epochs):
        batches = iter(script.loader)
        batch = script.changed(next(batches))
        for number in range(1, len(script.loader) + 1):
            loss = script.loss(batch)
            batch = script.changed(next(batches, None))
            loss.backward()
            if number % 3 == 0:
                script.optimizer.step()
                script.optimizer.zero_grad()


def evaluating_prefetcher(script: Script) -> None:
    """An evaluation and a meeting come when the last batch is not trained on."""
    for _ in range(script.epochs):
        for number, batch in enumerate(fetched(script), start=1):
            if number in (1, len(script.loader)):
                script.evaluate()
            script.train(batch)


def evaluating_between(script: Script) -> None:
    for _ in range(script.epochs):
        batches = iter(script.loader)
        batch = script.changed(next(batches, None))
        while batch is not None:
            loss = script.loss(batch)
            batch = script.changed(next(batches, None))
            if batch is None:
                script.evaluate()
            script.learn(loss)


def skipping(script: Script) -> None:
    """The loss of some batches is not good enough."""
    for epoch in range(script.epochs):
        for number, batch in enumerate(map(script.changed, script.loader)):
            loss = script.loss(batch)
            if number == epoch + 1:
                continue
            script.learn(loss)


def skipping_between(script: Script) -> None:
    for epoch in range(script.epochs):
        batches = iter(script.loader)
        batch = script.changed(next(batches, None))
        for number in itertools.count():
            if batch is None:
                break
            loss = script.loss(batch)
            batch = script.changed(next(batches, None))
            if number != epoch:
                script.learn(loss)


def skipping_prefetcher(script: Script) -> None:
    for epoch in range(script.epochs):
        for number, batch in enumerate(fetched(script)):
            loss = script.loss(batch)
            if number == epoch:
                continue
            script.learn(loss)


def glancing(script: Script) -> None:
    for _ in range(script.epochs):
        batches = iter(script.loader)
        next(batches)  # this one is not trained on
        for batch in map(script.changed, batches):
            script.train(batch)


def breaking(script: Script) -> None:
    for _ in range(script.epochs):
        for number, batch in enumerate(fetched(script), start=1):
            script.train(batch)
            if number == len(script.loader) - 1:
                break


def whole_epochs(script: Script) -> None:
    """All batches of an epoch are fetched, and trained on in another order."""
    for _ in range(script.epochs):
        for batch in [*script.loader][::-1]:
            script.train(script.changed(batch))


def two_steps(script: Script) -> None:
    for _ in range(script.epochs):
        for batch in fetched(script):
            script.train(batch)
            script.train(batch)


def pairs(script: Script) -> None:
    """The last batch is never trained on."""
    for _ in range(script.epochs):
        for batch, _ in itertools.pairwise(map(script.changed, script.loader)):
            script.train(batch)
        script.evaluate()


def leaving_out_the_first(script: Script) -> None:
    for _ in range(script.epochs):
        for number, batch in enumerate(map(script.changed, script.loader)):
            if number:
                script.train(batch)


PATTERNS = {
    each.__name__: each
    for each in (
        between, before_the_step, prefetcher, deep_prefetcher, endless_prefetcher, accumulating_prefetcher,
        accumulating_between, evaluating_prefetcher, evaluating_between, skipping, skipping_between,
        skipping_prefetcher, glancing, breaking, whole_epochs, two_steps, pairs, leaving_out_the_first,
    )
}  # fmt: skip
CHANGES: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {"as they are": lambda x: x, "changed": lambda x: x * 1.0}


ACCUMULATING = ["accumulating_prefetcher", "accumulating_between", "two_steps"]  # a batch is not a step


def distributed(change: str, batch: int = BATCH) -> Script:
    script = Script(CHANGES[change], batch=batch)
    given = hocket.distribute(script.model, script.optimizer, script.loader)
    script.model, script.optimizer, script.loader = given
    script.evaluation = hocket.distribute(loader=script.evaluation, training=False)
    script.meet = hocket.barrier
    return script


def train(pattern: str, change: str) -> list[torch.Tensor]:
    script = distributed(change)
    PATTERNS[pattern](script)
    hocket.settle()
    return [parameter.detach().clone() for parameter in script.model.parameters()]


def check(pattern: str, change: str, strategy: str, workers: int = WORKERS) -> None:
    alone = Script(CHANGES[change], workers)
    PATTERNS[pattern](alone)
    if pattern in ACCUMULATING and strategy in ("bsp", "local_sgd(period=1)"):
        strategy = "mirrored"  # these exchange what one step, or one batch, has
    job = SimulatedJob(workers, strategy, servers=int(strategy == "bsp"))
    for parameters in job.run(lambda: train(pattern, change)):
        for mine, theirs in zip(parameters, alone.model.parameters(), strict=True):
            assert torch.allclose(mine, theirs, rtol=1e-9, atol=1e-9), (mine - theirs).abs().max()


@product("change", pattern=list(PATTERNS), change=list(CHANGES), strategy=STRATEGIES)
def test_every_batch_counts_what_it_is(pattern: str, change: str, strategy: str) -> None:
    check(pattern, change, strategy)


def test_what_only_the_order_tells_is_said(capfd: pytest.CaptureFixture[str]) -> None:
    check("prefetcher", "changed", "mirrored")
    check("pairs", "as they are", "mirrored")
    assert capfd.readouterr().err == ""
    check("pairs", "changed", "mirrored")
    assert capfd.readouterr().err.count("it is taken to ask for batches ahead of time") == 1


def cycled() -> None:
    script = distributed("changed")
    for _, batch in zip(range(7), itertools.cycle(script.loader), strict=False):
        script.train(script.changed(batch))


def test_a_changed_batch_that_is_repeated_is_said(capfd: pytest.CaptureFixture[str]) -> None:
    SimulatedJob(2, "mirrored").run(cycled)
    assert capfd.readouterr().err.count("was kept, as by itertools.cycle") == 1


UNEVEN = [("gossip", 0), ("gossip(asynchronous=True)", 0), ("hogwild", 0), ("asynchronous", 1), ("ssp(staleness=1)", 1),
          ("easgd(period=2)", 1), ("downpour(fetch=2, push=2)", 1), ("local_sgd(time=0.5)", 0)]  # fmt: skip


def leave_ahead(job: SimulatedJob, depth: int) -> list[float]:
    """What a worker trains on; rank 1 leaves the loop when it has more batches."""
    script, learned = distributed("changed", batch=1), list[float]()
    for number, batch in enumerate(fetched(script, depth), start=1):
        job.compute(0.1)
        script.train(batch)
        learned += batch[0][:, 0].tolist()
        if hocket.rank() == 1 and number == 2:
            break
    return learned


def everything() -> list[float]:
    found: list[float] = Script(CHANGES["changed"]).data.tensors[0][:, 0].tolist()
    return sorted(found)


@pytest.mark.few(6)
@pytest.mark.parametrize("depth", [1, 2])
@pytest.mark.parametrize(("strategy", "servers"), UNEVEN)
def test_what_a_worker_has_not_trained_on_when_it_leaves_is_for_others(strategy: str, servers: int, depth: int) -> None:
    job = SimulatedJob(2, strategy, servers=servers)
    found = job.run(lambda: leave_ahead(job, depth))
    assert sorted(found[0] + found[1]) == everything()


def live() -> list[int]:
    client = current().client
    assert client is not None
    return client.live()


def die_ahead(strategy: str, between: bool, folder: Path) -> list[float]:
    """What a worker trains on; rank 1 dies when it has trained on one batch, and has more."""
    script, learned = distributed("changed", batch=1), list[float]()
    batches = iter(script.loader)
    batch = script.changed(next(batches, None))
    following = script.changed(next(batches, None)) if not between else None
    while batch is not None:
        if hocket.rank() == 0:  # or it could have trained on all batches before
            until((folder / "died").exists, 50)
            until(lambda: live() == [0], 30)
        loss = script.loss(batch)
        if between:
            following = script.changed(next(batches, None))
        if hocket.rank() == 1 and learned:
            (folder / "learned").write_text(json.dumps(learned))
            (folder / "died").touch()
            os._exit(1)
        script.learn(loss)
        learned += batch[0][:, 0].tolist()
        batch = following
        if not between:
            following = script.changed(next(batches, None))
    return learned


@pytest.mark.few(3)
@pytest.mark.parametrize("between", [False, True])
@pytest.mark.parametrize("strategy", ["asynchronous", "gossip(asynchronous=True)", "hogwild"])
def test_what_a_worker_has_not_trained_on_when_it_dies_is_dealt_again(
    pool: Pool, tmp_path: Path, strategy: str, between: bool
) -> None:
    outcomes = pool.outcomes_with_death(
        2, die_ahead, 1, strategy, between, tmp_path, strategy=strategy, **needs(strategy)
    )
    assert sorted(outcomes[0] + json.loads((tmp_path / "learned").read_text())) == everything()


def in_thread(script: Script) -> None:
    for _ in range(script.epochs):
        ready: queue.Queue[Any] = queue.Queue(2)

        def fill(ready: queue.Queue[Any] = ready) -> None:
            for batch in script.loader:
                ready.put(script.changed(batch))
            ready.put(None)

        thread = threading.Thread(target=fill)
        thread.start()
        for batch in iter(ready.get, None):
            script.train(batch)
        thread.join()


@pytest.mark.few(3)
@pytest.mark.parametrize("on_loss", ["end", "auto"])  # auto is what a user has, and gives up what a thread cannot do
@pytest.mark.parametrize("change", list(CHANGES))
def test_a_thread_may_change_what_it_reads_ahead(pool: Pool, change: str, on_loss: str) -> None:
    alone = Script(CHANGES[change], WORKERS)
    in_thread(alone)
    for parameters in pool.run(WORKERS, train_in_thread, change, on_loss=on_loss):
        for mine, theirs in zip(parameters, alone.model.parameters(), strict=True):
            assert torch.allclose(mine, theirs, rtol=1e-9, atol=1e-9)


def train_in_thread(change: str) -> list[torch.Tensor]:
    script = distributed(change)
    in_thread(script)
    return [parameter.detach().clone() for parameter in script.model.parameters()]
