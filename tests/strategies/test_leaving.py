"""What a script sees when it leaves a training loop, however it does so: the model that its strategy stands for."""

import itertools
import threading
from collections.abc import Iterator
from queue import Queue
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from pool import Pool, RemoteError
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import hocket
from hocket.job.worker import current

STEPS = 5  # no end of a round of 3

IN_STEP = ["mirrored", "central", "local_sgd(period=3)", "diloco(period=3)", "easgd(period=3)"]
LATE = ["delayed", "dmb(extra=2)"]
SERVED = ["bsp", "ssp", "asynchronous", "softsync(n=2)", "downpour(fetch=2, push=2)", "easgd(period=3)"]
DEALT = ["hogwild", "gossip(topology='ring')", "gossip(push_sum=True)", "gossip(asynchronous=True)"]
ALL = [(each, 0) for each in IN_STEP + LATE] + [(each, 1) for each in SERVED] + [(each, 0) for each in DEALT]


def make(strategy: str, samples: int = 24 * 4, batch: int = 4, **options: Any) -> Any:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 1)).double()
    optimizer = torch.optim.SGD(model.parameters(), **({"lr": 0.05} | options))
    x = torch.randn(samples, 6, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    loader = DataLoader(TensorDataset(x, torch.sin(x.sum(1, keepdim=True))), batch)
    return hocket.distribute(model, optimizer, loader, strategy=strategy)


def train(model: nn.Module, optimizer: torch.optim.Optimizer, batch: Any) -> None:
    loss = ((model(batch[0]) - batch[1]) ** 2).mean()
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()


def flat(model: nn.Module) -> torch.Tensor:
    return torch.cat([p.detach().reshape(-1) for p in model.parameters()]).clone()


def by_break(model: nn.Module, optimizer: Any, loader: Any) -> None:
    for number, batch in enumerate(loader, start=1):
        train(model, optimizer, batch)
        if number == STEPS:
            break


def by_islice(model: nn.Module, optimizer: Any, loader: Any) -> None:
    for batch in itertools.islice(loader, STEPS):
        train(model, optimizer, batch)


def by_zip(model: nn.Module, optimizer: Any, loader: Any) -> None:
    for _, batch in zip(range(STEPS), loader, strict=False):
        train(model, optimizer, batch)


def by_return(model: nn.Module, optimizer: Any, loader: Any) -> None:
    iterator = iter(loader)  # is let go when this function returns
    for _ in range(STEPS):
        train(model, optimizer, next(iterator))


def by_attribute(model: nn.Module, optimizer: Any, loader: Any) -> None:
    trainer = SimpleNamespace(batches=iter(loader))
    for _ in range(STEPS):
        train(model, optimizer, next(trainer.batches))
    trainer.batches = None


def by_item(model: nn.Module, optimizer: Any, loader: Any) -> None:
    iterators = {"train": iter(loader)}
    for _ in range(STEPS):
        train(model, optimizer, next(iterators["train"]))
    del iterators["train"]


def by_wrapper(model: nn.Module, optimizer: Any, loader: Any) -> None:
    def watched() -> Iterator[Any]:
        yield from enumerate(loader, start=1)

    for number, batch in watched():
        train(model, optimizer, batch)
        if number == STEPS:
            return


WAYS = {
    each.__name__: each for each in (by_break, by_islice, by_zip, by_return, by_attribute, by_item, by_wrapper)
}  # fmt: skip


def seen(strategy: str, way: str) -> tuple[torch.Tensor, torch.Tensor]:
    """The parameters right after the loop was left, and when all ranks have met."""
    model, optimizer, loader = make(strategy)
    WAYS[way](model, optimizer, loader)
    found = flat(model)
    hocket.barrier()
    return found, flat(model)


@pytest.mark.few(6)
@pytest.mark.parametrize(("strategy", "servers"), ALL)
def test_after_a_break_every_rank_sees_the_model(pool: Pool, strategy: str, servers: int) -> None:
    results = pool.run(2, seen, strategy, "by_break", servers=servers, strategy=strategy)
    for found, later in results:
        assert torch.equal(found, results[0][0])
        assert torch.equal(found, later)


@pytest.mark.few(6)
@pytest.mark.parametrize("way", sorted(set(WAYS) - {"by_break"}))
@pytest.mark.parametrize(("strategy", "servers"), [("local_sgd(period=3)", 0), ("delayed", 0), ("asynchronous", 1)])
def test_however_a_loop_is_left(pool: Pool, strategy: str, servers: int, way: str) -> None:
    results = pool.run(2, seen, strategy, way, servers=servers, strategy=strategy)
    broken = pool.run(2, seen, strategy, "by_break", servers=servers, strategy=strategy)
    for found, later in results:
        assert torch.equal(found, results[0][0])
        assert torch.equal(found, later)
        if not servers:
            assert torch.equal(found, broken[0][0])


def same(model: nn.Module) -> bool:
    mine = flat(model)
    return bool((current().communicator.allgather(mine) == mine).all())


def rounds(strategy: str, take: str) -> list[bool]:
    """Whether ranks are equal right after each step, with an iterator that lives on, and after they have settled."""
    model, optimizer, loader = make(strategy, samples=8 * 8 if take == "cycle" else 8 * 14)
    iterator = iter(loader) if take == "next" else itertools.cycle(loader)
    equal = []
    for _ in range(14):
        train(model, optimizer, next(iterator))
        equal.append(same(model))
    hocket.settle()
    return [*equal, same(model)]


@pytest.mark.parametrize("take", ["next", "cycle"])
@pytest.mark.parametrize("strategy", ["local_sgd(period=4)", "diloco(period=4)"])
def test_rounds_end_in_a_step_while_an_iterator_lives(pool: Pool, strategy: str, take: str) -> None:
    for equal in pool.run(2, rounds, strategy, take):
        assert equal == [(number + 1) % 4 == 0 for number in range(14)] + [True]


def skipping(skipped: int) -> bool:
    """One rank leaves out a step."""
    model, optimizer, loader = make("local_sgd(period=4)")
    for number, batch in enumerate(loader):
        ((model(batch[0]) - batch[1]) ** 2).mean().backward()
        if number != skipped or hocket.rank() == 0:
            optimizer.step()
        optimizer.zero_grad()
        if number == 9:
            break
    return same(model)


@pytest.mark.parametrize("skipped", [0, 3, 9])
def test_a_rank_that_leaves_out_a_step_joins(pool: Pool, skipped: int) -> None:
    assert pool.run(2, skipping, skipped) == [True, True]


def scaled(period: int, every: int, infinite: int | None) -> list[int]:
    """After how many batches ranks are equal: GradScaler, accumulation, and an infinity on one rank."""
    model, optimizer, loader = make(f"local_sgd(period={period})", samples=36 * 4)
    scaler = torch.amp.GradScaler("cpu", init_scale=8.0)
    equal = []
    for number, (x, y) in enumerate(loader, start=1):
        loss = ((model(x) - y) ** 2).mean()
        if number == infinite and hocket.rank() == 1:
            loss = loss * float("inf")
        scaler.scale(loss).backward()
        if number % every == 0:
            scaler.step(optimizer)
            scaler.update()
            optimizer.zero_grad()
        if same(model):
            equal.append(number)
    return equal


def test_an_infinity_on_one_rank_keeps_nobody_waiting(pool: Pool) -> None:
    for equal in pool.run(2, scaled, 3, 1, 6, on_nan="ignore"):
        assert equal == [3, 6, 9, 12, 15, 18]


def test_rounds_with_accumulation_end_in_a_step(pool: Pool) -> None:
    for equal in pool.run(2, scaled, 4, 3, None):
        assert equal == [1, 2, 6, 7, 8, 12, 13, 14, 18]  # in the first step after 4 batches, until the next


def ahead(strategy: str, how: str) -> torch.Tensor:
    """The next batch is asked for before this one's backward pass; the last batch is smaller."""
    model, optimizer, loader = make(strategy, samples=35, batch=4)
    for _ in range(2):
        if how == "plain":
            for batch in loader:
                train(model, optimizer, batch)
        elif how == "thread":
            for batch in prefetched(loader):
                train(model, optimizer, batch)
        else:
            iterator = iter(loader)
            following = next(iterator, None)
            while following is not None:
                batch, following = following, next(iterator, None)
                train(model, optimizer, batch)
    return flat(model)


def prefetched(loader: Any) -> Iterator[Any]:
    queue: Queue[Any] = Queue(2)

    def fill() -> None:
        try:
            for batch in loader:
                queue.put(batch)
            queue.put(None)
        except hocket.HocketError as error:
            queue.put(error)

    thread = threading.Thread(target=fill)
    thread.start()
    for batch in iter(queue.get, None):
        if isinstance(batch, hocket.HocketError):
            raise batch
        yield batch
    thread.join()


@pytest.mark.few(4)
@pytest.mark.parametrize("how", ["ahead", "thread"])
@pytest.mark.parametrize("strategy", ["mirrored", "central", "local_sgd(period=2)", "delayed", "bsp"])
def test_batches_asked_for_ahead_of_time(pool: Pool, strategy: str, how: str) -> None:
    servers = int(strategy == "bsp")
    expected = pool.run(2, ahead, strategy, "plain", servers=servers)
    if servers and how == "thread":
        with pytest.raises(RemoteError, match="iterated in a thread"):
            pool.run(2, ahead, strategy, how, servers=servers)
        return
    for found in pool.run(2, ahead, strategy, how, servers=servers):
        assert torch.allclose(found, expected[0], rtol=0, atol=1e-12)


def caught(strategy: str) -> tuple[bool, torch.Tensor, torch.Tensor]:
    model, optimizer, loader = make(strategy)
    try:
        for number, batch in enumerate(loader, start=1):
            train(model, optimizer, batch)
            if number == STEPS:
                raise RuntimeError
    except RuntimeError:
        pass
    hocket.settle()
    found = flat(model)
    hocket.barrier()
    return True, found, flat(model)


@pytest.mark.parametrize("strategy", ["local_sgd(period=3)", "delayed"])
def test_settle_after_an_exception(pool: Pool, strategy: str) -> None:
    expected = pool.run(2, seen, strategy, "by_break")[0][0]
    for _, found, later in pool.run(2, caught, strategy):
        assert torch.equal(found, expected)
        assert torch.equal(found, later)


def overfitted() -> list[bool]:
    """One batch, again and again."""
    model, optimizer, loader = make("local_sgd(period=3)")
    batch = next(iter(loader))
    equal = []
    for _ in range(6):
        train(model, optimizer, batch)
        equal.append(same(model))
    return equal


def test_one_batch_again_and_again(pool: Pool) -> None:
    assert pool.run(2, overfitted) == [[False, False, True] * 2] * 2


def left_apart(strategy: str) -> torch.Tensor:
    """Workers that take uneven numbers of batches break in different epochs, and meet later."""
    model, optimizer, loader = make(strategy, samples=9 * 4)
    done = 0
    while done < (9 if hocket.rank() == 0 else 12):
        for batch in loader:
            train(model, optimizer, batch)
            done += 1
            if done == (9 if hocket.rank() == 0 else 12):
                break
    hocket.barrier()
    return flat(model)


@pytest.mark.parametrize("strategy", ["asynchronous", "hogwild", "gossip(topology='ring')"])
def test_workers_may_break_in_different_epochs(pool: Pool, strategy: str) -> None:
    found = pool.run(2, left_apart, strategy, strategy=strategy, servers=int(strategy == "asynchronous"))
    assert torch.equal(found[0], found[1])


def epochs_alone() -> int:
    model, optimizer, loader = make("mirrored")
    for _ in range(3):
        by_break(model, optimizer, loader)
    return int(loader.epoch)


@pytest.mark.parametrize("workers", [1, 2])
def test_a_loop_that_was_left_is_an_epoch(pool: Pool, workers: int) -> None:
    assert pool.run(workers, epochs_alone) == [3] * workers
