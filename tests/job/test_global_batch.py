"""``--batch``: the global batch is what it is said to be, on however many workers, and through their changes."""

import os
import signal
import time
from collections import defaultdict
from itertools import chain
from pathlib import Path
from typing import Any

import pytest
import torch
from pool import Pool, needs
from products import product
from torch import nn
from torch.optim import lr_scheduler
from torch.utils.data import BatchSampler, DataLoader, IterableDataset, SequentialSampler

import hocket
from hocket.errors import UsageError
from hocket.job.checkpoint.save_load_resume import _saver
from hocket.job.loader.global_batch import GlobalBatch
from hocket.job.worker import current
from job import test_newcomers, test_regrouping
from job.test_regrouping import SAMPLES, Numbered, build

RATE, WARMUP = 0.01, 8


def learn(strategy: str, stop: int | None = None, part: int = 4, epochs: int = 2) -> tuple[Any, ...]:
    """Train with scaled rates, and stop after so many steps; parameters, samples and rate of each step, and lengths."""
    model, _ = build()
    optimizer = torch.optim.SGD(model.parameters(), lr=RATE, momentum=0.9)
    loader: Any = DataLoader(Numbered(), part)
    model, optimizer, loader = hocket.distribute(
        model, optimizer, loader, strategy=strategy, scale_lr="linear", warmup=WARMUP
    )
    scheduler = lr_scheduler.StepLR(optimizer, 5, 0.8)
    place = hocket.resume(model=model, optimizer=optimizer, scheduler=scheduler, loader=loader)
    numbers, rates, lengths = list[list[int]](), list[float](), {len(loader)}
    for _ in range(place.epoch, epochs):
        for chosen, x, y in loader:
            if current().config.checkpoint:
                _saver(current())._last.wait()
            rates.append(optimizer.param_groups[0]["lr"])
            ((model(x) - y) ** 2).mean().backward()
            optimizer.step()
            optimizer.zero_grad()
            scheduler.step()
            numbers.append(chosen.tolist() if loader.weight else [])
            if len(numbers) == stop:
                return numbers, rates
    parameters: list[float] = nn.utils.parameters_to_vector(model.parameters()).tolist()
    return parameters, numbers, rates, lengths


def alone(batch: int, times: float) -> tuple[list[float], list[float]]:
    """One plain process with the whole batch; its parameters and rates."""
    model, _ = build()
    optimizer = torch.optim.SGD(model.parameters(), lr=RATE * times, momentum=0.9)
    loader = DataLoader(Numbered(), batch)
    scheduler, rates = lr_scheduler.StepLR(optimizer, 5, 0.8), list[float]()
    for _ in range(2):
        for _, x, y in loader:
            rate = optimizer.param_groups[0]["lr"]
            share = (1 + (times - 1) * min(1.0, len(rates) / WARMUP)) / times if times > 1 else 1.0
            rates.append(rate * share)
            optimizer.param_groups[0]["lr"] = rate * share
            ((model(x) - y) ** 2).mean().backward()
            optimizer.step()
            optimizer.param_groups[0]["lr"] = rate
            optimizer.zero_grad()
            scheduler.step()
    return nn.utils.parameters_to_vector(model.parameters()).tolist(), rates


def close(values: list[float]) -> Any:
    return pytest.approx(values, rel=1e-9, abs=1e-12)


@product(strategy=["mirrored", "central", "bsp"], size=[1, 2, 3], batch=[14, 9], part=[4, 16])
def test_the_law_holds_whatever_the_loader_says(pool: Pool, strategy: str, size: int, batch: int, part: int) -> None:
    parameters, rates = alone(batch, batch / part)
    told: dict[str, Any] = {"batch": batch, **(needs(strategy) if strategy == "bsp" else {})}
    found = pool.run(size, learn, strategy, None, part, **told)
    for each in found:
        assert each[0] == close(parameters) and each[2] == close(rates)
        assert each[3] == {-(-SAMPLES // batch)}
    steps = [sorted(chain(*(each[1][step] for each in found))) for step in range(len(rates))]
    whole = [batch] * (SAMPLES // batch) + [SAMPLES % batch] * (SAMPLES % batch > 0)
    assert [len(numbers) for numbers in steps] == whole * 2


@pytest.mark.few(1)
@product(phase=["before", "between"], who=[(3, 0), (3, 2), (2, 1)])
def test_a_named_batch_stays_when_a_worker_is_lost(
    pool: Pool, tmp_path: Path, who: tuple[int, int], phase: str
) -> None:
    size, dead = who
    deaths = {dead: (3, phase)}
    settings: dict[str, Any] = {"on_loss": "continue", "check_replicas": 1, "batch": 10}
    found = pool.outcomes_with_death(size, test_regrouping.train, dead, str(tmp_path), deaths, **settings)
    steps = test_regrouping.check(tmp_path, found, deaths, size)
    if phase == "between":
        assert [len(numbers) for numbers in steps.values()] == [10] * (SAMPLES // 10) * 2


def test_a_named_batch_stays_when_a_worker_comes(pool: Pool, tmp_path: Path) -> None:
    settings: dict[str, Any] = {"on_loss": "replace", "timeout": 50.0, "check_replicas": 1, "batch": 10}
    deaths = {1: (3, "between")}
    found = pool.outcomes(3, test_newcomers.train, str(tmp_path), deaths, 0, "mirrored", replaced=[1], **settings)
    steps = test_newcomers.check(tmp_path, found, 3)
    test_newcomers.check_law(steps, found[0][0])
    assert max(len(numbers) for numbers in steps) == 10  # the step in which it was lost has fewer


def divide_by_size(*args: Any) -> Any:
    """A script whose loader has its part of 24 samples; before its loop a newcomer sees 3 workers."""
    before, test_newcomers.BATCH = test_newcomers.BATCH, 24 // hocket.size()
    try:
        return test_newcomers.train(*args)
    finally:
        test_newcomers.BATCH = before


def test_a_script_that_divides_by_the_workers_has_the_batch_of_all(pool: Pool, tmp_path: Path) -> None:
    settings: dict[str, Any] = {"on_loss": "replace", "timeout": 50.0, "check_replicas": 1}
    deaths = {2: (3, "between")}
    found = pool.outcomes(3, divide_by_size, str(tmp_path), deaths, 0, "mirrored", replaced=[2], **settings)
    steps = test_newcomers.check(tmp_path, found, 3)
    test_newcomers.check_law(steps, found[0][0])
    assert max(len(numbers) for numbers in steps) == 24


@pytest.mark.parametrize("most", [1, 2])
def test_a_part_of_a_named_batch_may_become_too_large(pool: Pool, tmp_path: Path, most: int) -> None:
    deaths = {1: (3, "forward")}
    settings: dict[str, Any] = {"on_loss": "continue", "max_part": most, "batch": 30}
    found = pool.outcomes_with_death(3, test_regrouping.train, 1, str(tmp_path), deaths, **settings)
    if most == 2:
        test_regrouping.check(tmp_path, found, deaths, 3)
        return
    for error in (found[0], found[2]):
        assert "more than 1 times its batch of 10 samples: raise --max-part" in str(error)


def follow(folder: str, dead: int, step: int) -> tuple[Any, ...]:
    """Train with rates that follow the workers; what each step used, in a file, and the parameters."""
    model, _ = build()
    optimizer = torch.optim.SGD(model.parameters(), lr=RATE)
    loader: Any = DataLoader(Numbered(), 4, shuffle=True)
    model, optimizer, loader = hocket.distribute(model, optimizer, loader, scale_lr="linear", warmup=WARMUP)
    scheduler = lr_scheduler.LambdaLR(optimizer, lambda at: 1 / (1 + at / 50))
    is_new, mine, at = current().config.newcomer, current().config.rank, 0
    if is_new:
        (Path(folder) / "coming").touch()
    place = hocket.resume(model=model, optimizer=optimizer, scheduler=scheduler, loader=loader)
    with (Path(folder) / f"{mine}.{is_new}").open("w", buffering=1) as counted:
        for _ in range(place.epoch, 9):
            for numbers, x, y in loader:
                if mine == dead and at == step and not is_new:
                    os.kill(os.getpid(), signal.SIGKILL)
                before = float(model[0].bias[0].detach())
                ((model(x) - y) ** 2).mean().backward()
                read, gradient = scheduler.get_last_lr()[0], float(model[0].bias.grad[0])
                optimizer.step()
                moved = (before - float(model[0].bias[0].detach())) / gradient
                optimizer.zero_grad()
                taken = scheduler.last_epoch
                scheduler.step()
                number = current().training.counts.step
                print(number, hocket.size(), read, moved, taken, *numbers.tolist() * bool(loader.weight), file=counted)
                at += 1
                while at > step + 5 and not (Path(folder) / "coming").exists():
                    time.sleep(0.005)
                time.sleep(0.005)
    return nn.utils.parameters_to_vector(model.parameters()).tolist(), hocket.size()


@pytest.mark.few(1)
@pytest.mark.parametrize("step", [3, 12])
def test_rates_follow_the_workers_where_their_parts_stay(pool: Pool, tmp_path: Path, step: int) -> None:
    settings: dict[str, Any] = {"on_loss": "replace", "timeout": 50.0, "check_replicas": 1, "batch": "per-worker"}
    found = pool.outcomes(3, follow, str(tmp_path), 1, step, replaced=[1], **settings)
    assert len({repr(each) for each in found}) == 1 and found[0][1] == 3, found
    parts, told = defaultdict[int, list[int]](list), defaultdict[int, set[tuple[float, ...]]](set)
    for path in tmp_path.glob("?.*"):
        for line in path.read_text().splitlines():
            number, size, read, moved, taken, *numbers = line.split()
            parts[int(number)] += map(int, numbers)
            told[int(number)].add((int(size), float(read), int(taken)))
            share = min(int(taken), WARMUP) / WARMUP
            expected = RATE * (1 + (int(size) - 1) * share) / (1 + int(taken) / 50)
            assert (float(read), float(moved)) == (pytest.approx(expected, rel=1e-9), pytest.approx(expected, rel=1e-6))
    assert all(len(each) == 1 for each in told.values()), "workers had different rates in a step"
    sizes = {size for each in told.values() for size, _, _ in each}
    assert sizes == {2, 3}
    usual = [(len(parts[at]), size) for at, each in told.items() for size, _, _ in each]
    assert {size: max(n for n, of in usual if of == size) for size in sizes} == {2: 8, 3: 12}
    assert sorted(chain(*parts.values())) == sorted([*range(SAMPLES)] * 9)


@product(sizes=[(2, 3), (3, 1), (1, 2)], batch=["fixed", 10])
def test_a_resumption_on_other_workers_keeps_the_batch(
    pool: Pool, tmp_path: Path, sizes: tuple[int, int], batch: str | int
) -> None:
    before, after = sizes
    whole = 10 if batch == 10 else 4 * before
    settings: dict[str, Any] = {"checkpoint": str(tmp_path), "checkpoint_every": 3, "batch": batch}
    first = pool.run(before, learn, "mirrored", 5, **settings)
    rest = pool.run(after, learn, "mirrored", **settings)
    parameters, rates = alone(whole, whole / 4)
    for each in rest:
        assert each[0] == close(parameters) and each[2] == close(rates[3:])
    steps = [[*chain(*(each[0][at] for each in first))] for at in range(3)]
    steps += [[*chain(*(each[1][at] for each in rest))] for at in range(len(rates) - 3)]
    assert [len(numbers) for numbers in steps[: SAMPLES // whole]] == [whole] * (SAMPLES // whole)
    assert sorted(chain(*steps)) == sorted([*range(SAMPLES)] * 2)


def test_a_resumption_with_parts_that_stay_has_other_rates(pool: Pool, tmp_path: Path) -> None:
    settings: dict[str, Any] = {"checkpoint": str(tmp_path), "checkpoint_every": 9, "batch": "per-worker"}
    pool.run(2, learn, "mirrored", 10, **settings)
    for _, numbers, rates, lengths in pool.run(3, learn, "mirrored", **settings):
        assert rates[0] == pytest.approx(3 * RATE * 0.8, rel=1e-9)
        assert len(numbers[0]) == 4 and lengths == {-(-SAMPLES // 12)}


class Group:
    def __init__(self, size: int, changes: bool) -> None:
        self.size, self.changes = size, changes


@pytest.mark.parametrize(
    ("told", "changes", "part", "whole", "text"),
    [
        ("auto", True, 4, 12, "the global batch stays 12 samples, as in the checkpoint; with 2 workers it would begin"),
        ("fixed", False, 4, 12, "the global batch stays 12 samples, as in the checkpoint"),
        ("auto", False, 4, 8, "the global batch is 8 samples, 4 from each of 2 workers; in the checkpoint it was 12"),
        ("per-worker", True, 4, 8, "the global batch is 8 samples, 4 from each of 2 workers; in the checkpoint"),
        ("fixed", True, 6, 12, ""),
        ("fixed", True, 5, 10, "the script's batch is 5 samples now, so the global batch is 10 with 2 workers"),
        (10, True, 4, 10, "the global batch is 10 samples, as --batch says; in the checkpoint it was 12"),
        (12, True, 4, 12, ""),
    ],
)
def test_what_is_said_of_a_checkpoint(told: str | int, changes: bool, part: int, whole: int, text: str) -> None:
    batch, group = GlobalBatch(part, 2, told), Group(2, changes)
    said = batch.adopt({"whole": 12, "part": 4}, group)  # type: ignore[arg-type]
    assert batch.whole == whole and (text in said if text else not said), said


def test_a_checkpoint_may_have_too_large_a_batch() -> None:
    with pytest.raises(UsageError, match=r"of 24 samples would give each of 1 worker more than 4 times .* batch of 4"):
        GlobalBatch(4, 1).adopt({"whole": 24, "part": 4}, Group(1, True))  # type: ignore[arg-type]


def test_what_is_said_at_the_start() -> None:
    assert GlobalBatch(4, 3).describe(3, changes=True) == (
        "the global batch is 12 samples, 4 from each of 3 workers; it stays so when workers come or go"
    )
    assert GlobalBatch(4, 3, 10).describe(3, changes=False) == (
        "the global batch is 10 samples, 3 or 4 from each of 3 workers"
    )
    assert "is 4 samples: the whole changes with the workers" in GlobalBatch(4, 3, "per-worker").describe(
        3, changes=True
    )
    assert "one of the script's own batches" in GlobalBatch(None, 3).describe(3, changes=True)


class Stream(IterableDataset[Any]):
    def __iter__(self) -> Any:
        return iter(Numbered()[i] for i in range(SAMPLES))


def cannot(kind: str, strategy: str) -> None:
    model, optimizer = build()
    loader: Any = DataLoader(Stream() if kind == "stream" else Numbered(), 4)
    if kind == "batches":
        loader = DataLoader(Numbered(), batch_sampler=BatchSampler(SequentialSampler(range(SAMPLES)), 3, False))
    data = "local" if kind == "local" else "global"
    model, optimizer, loader = hocket.distribute(model, optimizer, loader, strategy=strategy, data=data)
    with torch.no_grad():
        next(iter(loader))  # in an evaluation it does not matter
    next(iter(loader))


@pytest.mark.parametrize("batch", [8, "fixed"])
@pytest.mark.parametrize(
    ("kind", "strategy", "text"),
    [
        ("stream", "mirrored", "the data is a stream"),
        ("local", "mirrored", "each worker has data of its own (data='local')"),
        ("batches", "mirrored", "the script makes the batches itself (batch_sampler=, or batch_size=None)"),
        ("plain", "asynchronous", "workers of this strategy take their batches one by one, as they get ready"),
    ],
)
def test_what_cannot_be_is_said(pool: Pool, kind: str, strategy: str, text: str, batch: str | int) -> None:
    more = needs(strategy) if strategy == "asynchronous" else {}
    (first, *_) = pool.outcomes(2, cannot, kind, strategy, batch=batch, **more)
    assert first.kind == "UsageError" and first.message.startswith(f"--batch {batch}: {text}; leave out"), first


def scale(early: bool) -> None:
    model, optimizer = build()
    if not early:
        hocket.distribute(loader=DataLoader(Numbered(), 4))
        hocket.distribute(loader=DataLoader(Numbered(), 8))
    hocket.distribute(model, optimizer)
    hocket.scale_lr(optimizer)


@pytest.mark.parametrize(("early", "text"), [(True, "has to know how large"), (False, "they are 2, 4 times those")])
def test_rates_are_not_scaled_by_a_guess(pool: Pool, early: bool, text: str) -> None:
    assert text in pool.outcomes(2, scale, early, batch=16)[0].message
