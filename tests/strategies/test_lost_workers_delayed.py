"""What is applied late when a worker is killed: ``delayed``, ``dmb`` and ``diloco``."""

import itertools
from collections import defaultdict
from pathlib import Path

import pytest
import torch
from pool import Pool
from products import product
from torch import nn

from job.test_regrouping import PHASES, SAMPLES, Counted, Numbered, build, check_counted, train


def late(counted: list[Counted], delay: int, every: int) -> torch.Tensor:
    """What one process has that takes the same steps.

    Args:
        counted: What each worker has done.
        delay: How many steps late each gradient is applied.
        every: One of so many batches is trained on.
    """
    numbers = defaultdict[int, list[int]](list)
    for each in counted:
        numbers[each.step] += each.numbers if each.weight else []
    model, optimizer = build()
    data, waiting = Numbered(), list[list[torch.Tensor | None]]()

    def apply() -> None:
        for parameter, gradient in zip(model.parameters(), waiting.pop(0), strict=True):
            parameter.grad = gradient
        optimizer.step()

    place, samples = 0, 0  # in the epoch
    for step in sorted(numbers):
        if place % every == 0:
            optimizer.zero_grad()
            ((model(data.x[numbers[step]]) - data.y[numbers[step]]) ** 2).mean().backward()
            waiting.append([parameter.grad for parameter in model.parameters()])
        place, samples = place + 1, samples + len(numbers[step])
        if samples == SAMPLES:
            place = samples = 0
        while len(waiting) > (delay if samples else 0):
            apply()
    return nn.utils.parameters_to_vector(model.parameters()).detach()


def check(folder: Path, pool: Pool, size: int, strategy: str, deaths: dict[int, tuple[int, str]]) -> None:
    found = pool.outcomes_with_death(
        size, train, deaths, str(folder), deaths, 0, strategy, on_loss="continue", timeout=60.0
    )
    counted = check_counted(folder, found, deaths, size)
    delay, every = (1, 1) if strategy == "delayed" else (0, 2)
    parameters = next(torch.tensor(each[0], dtype=torch.float64) for i, each in enumerate(found) if i not in deaths)
    assert torch.allclose(parameters, late(counted, delay, every), rtol=1e-9, atol=1e-12)


@pytest.mark.few(4)
@product(
    "strategy",
    strategy=["delayed", "dmb(extra=1)"],
    phase=PHASES,
    who=[(2, 1, 3), (3, 0, 2), (3, 1, 0), (4, 2, 5)],
)
def test_the_others_go_on(pool: Pool, tmp_path: Path, strategy: str, who: tuple[int, int, int], phase: str) -> None:
    size, dead, step = who
    check(tmp_path, pool, size, strategy, {dead: (step, phase)})


@pytest.mark.few(1)
@pytest.mark.parametrize("strategy", ["delayed", "dmb(extra=1)"])
def test_several_are_lost(pool: Pool, tmp_path: Path, strategy: str) -> None:
    check(tmp_path, pool, 4, strategy, {3: (2, "after"), 1: (3, "backward"), 0: (5, "before")})


def displaced(counted: list[Counted], delay: int) -> torch.Tensor:
    """The law of ``diloco`` with plain outer steps: a worker goes on from the mean, with its steps since the exchange.

    Args:
        counted: What each worker has done.
        delay: Batches after an exchange until its mean is taken over; the end of an epoch waits for none.
    """
    workers, data = {each.worker: build() for each in counted}, Numbered()

    def parameters(worker: int) -> torch.Tensor:
        return nn.utils.parameters_to_vector(workers[worker][0].parameters()).detach().clone()

    mean, starts, samples = torch.empty(0), dict[int, torch.Tensor](), 0

    def take_over(worker: int) -> None:
        if worker in starts:
            now = mean + parameters(worker) - starts.pop(worker)
            nn.utils.vector_to_parameters(now, workers[worker][0].parameters())

    for _, group in itertools.groupby(counted, key=lambda each: each.exchanges):
        of_round = list(group)
        for worker in sorted({each.worker for each in of_round}):
            for number, each in enumerate([each for each in of_round if each.worker == worker]):
                model, optimizer = workers[worker]
                (((model(data.x[each.numbers]) - data.y[each.numbers]) ** 2).mean() * each.weight).backward()
                optimizer.step()
                optimizer.zero_grad()
                if number + 1 == delay:
                    take_over(worker)
            take_over(worker)
        starts = {worker: parameters(worker) for worker in {each.worker for each in of_round}}
        mean = torch.stack(list(starts.values())).mean(0)
        samples += sum(len(each.numbers) for each in of_round if each.weight)
        if not delay or samples % SAMPLES == 0:
            for worker in list(starts):
                take_over(worker)
    return mean


PLAIN = "outer_lr=1.0, outer_momentum=0.0"


@pytest.mark.few(2)
@product(
    "strategy",
    strategy=[f"diloco(period=4, delay=2, {PLAIN})", "diloco(period=4, fragments=2)"],
    phase=["forward", "after", "between"],
    who=[(3, 1, 7), (3, 0, 5), (2, 1, 4)],
)
def test_displacements_under_way(
    pool: Pool, tmp_path: Path, strategy: str, who: tuple[int, int, int], phase: str
) -> None:
    """With several fragments, what a lost worker has done counts in those that were exchanged since."""
    size, dead, step = who
    deaths = {dead: (step, phase)}
    arguments = str(tmp_path), deaths, 0, strategy
    found = pool.outcomes_with_death(size, train, deaths, *arguments, on_loss="continue", timeout=60.0)
    counted = check_counted(tmp_path, found, deaths, size)
    if "delay" in strategy:
        parameters = torch.tensor(found[(dead + 1) % size][0], dtype=torch.float64)
        assert torch.allclose(parameters, displaced(counted, 2), rtol=1e-9, atol=1e-12)
