"""A worker joins ``diloco`` in the middle of a round, also where displacements are under way: it is an average one."""

import itertools
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from pool import Pool
from products import product
from torch import nn

from job.test_newcomers import SAMPLES, Numbered, build, check, train
from job.test_regrouping import Counted

PLAIN = "outer_lr=1.0, outer_momentum=0.0"


def read(folder: Path) -> list[Counted]:
    """What has counted, by round and worker."""
    counted = list[Counted]()
    for path in folder.glob("*.???"):
        *lines, last = path.read_text().splitlines()
        is_dead = last.startswith("dead")
        for step, line in enumerate(lines if is_dead else [*lines, last]):
            exchanges, weight, _, *numbers = line.split()
            if not is_dead or int(exchanges) < int(last.split()[1]):
                worker = int(path.stem) + 10 * (path.suffix == ".new")
                told = Counted(int(exchanges), step, worker, float(weight), list(map(int, numbers)))
                counted.append(told)
    return sorted(counted, key=lambda each: (each.exchanges, each.worker, each.step))


def displaced(counted: list[Counted], delay: int) -> torch.Tensor:
    """The law of plain outer steps that are ``delay`` batches late, where a newcomer is the mean of the others."""
    data, workers, starts = Numbered(), dict[int, Any](), dict[int, torch.Tensor]()
    mean, samples = torch.empty(0), 0
    seen = {each.worker for each in counted if not each.exchanges}

    def parameters(worker: int) -> torch.Tensor:
        return nn.utils.parameters_to_vector(workers[worker][0].parameters()).detach().clone()

    def average(find: Callable[[Any], list[torch.Tensor]], others: set[int]) -> list[torch.Tensor]:
        return [torch.stack(each).mean(0) for each in zip(*(find(workers[other]) for other in others), strict=True)]

    def join(worker: int, others: set[int]) -> None:
        workers[worker] = model, optimizer, scheduler = build()
        with torch.no_grad():
            for parameter, value in zip(
                model.parameters(), average(lambda of: list(of[0].parameters()), others), strict=True
            ):
                parameter.copy_(value)
            buffers = average(lambda of: [of[1].state[each]["momentum_buffer"] for each in of[0].parameters()], others)
            for parameter, value in zip(model.parameters(), buffers, strict=True):
                optimizer.state[parameter] = {"momentum_buffer": value}
        scheduler.load_state_dict(workers[min(others)][2].state_dict())
        optimizer.param_groups[0]["lr"] = workers[min(others)][1].param_groups[0]["lr"]
        if starts:
            starts[worker] = torch.stack([starts[other] for other in others]).mean(0)

    def take_over(worker: int) -> None:
        if worker in starts:
            now = mean + parameters(worker) - starts.pop(worker)
            nn.utils.vector_to_parameters(now, workers[worker][0].parameters())

    for worker in seen:
        workers[worker] = build()
    for _, group in itertools.groupby(counted, key=lambda each: each.exchanges):
        of_round = {worker: list(its) for worker, its in itertools.groupby(group, key=lambda each: each.worker)}
        starts = {worker: start for worker, start in starts.items() if worker in of_round}
        most = max(map(len, of_round.values()))
        for number in range(most):
            here = {worker for worker, its in of_round.items() if number >= most - len(its)}
            for worker in here - set(workers):
                join(worker, here & set(workers))
            for worker in here:
                model, optimizer, _ = workers[worker]
                each = of_round[worker][number - most + len(of_round[worker])]
                (((model(data.x[each.numbers]) - data.y[each.numbers]) ** 2).mean() * each.weight).backward()
                optimizer.step()
                optimizer.zero_grad()
                samples += len(each.numbers) if each.weight else 0
                if number + 1 == delay:
                    take_over(worker)
        for worker in of_round:
            take_over(worker)
        starts = {worker: parameters(worker) for worker in of_round}
        mean = torch.stack(list(starts.values())).mean(0)
        if not delay or samples % SAMPLES == 0:
            for worker in list(starts):
                take_over(worker)
        if samples % SAMPLES == 0:
            for worker in of_round:
                workers[worker][2].step()
    return mean


@pytest.mark.few(1)
@product(delay=[0, 2, 5], who=[(3, 1), (2, 0)], phase=["forward", "between"])
def test_a_new_worker_is_the_mean_of_the_others(
    pool: Pool, tmp_path: Path, delay: int, who: tuple[int, int], phase: str
) -> None:
    size, dead = who
    strategy = f"diloco(period=5, delay={delay}, {PLAIN})"
    arguments = str(tmp_path), {dead: (6, phase)}, 0, strategy
    found = pool.outcomes(size, train, *arguments, replaced=[dead], on_loss="replace", timeout=50.0)
    check(tmp_path, found, size)
    expected = displaced(read(tmp_path), delay)
    assert torch.allclose(torch.tensor(found[0][0], dtype=torch.float64), expected, rtol=1e-9, atol=1e-12)


@pytest.mark.few(1)
@pytest.mark.parametrize(
    "strategy", ["diloco(period=4, fragments=2)", "diloco(period=6, fragments=3, delay=4)", "diloco(7, delay=7)"]
)
def test_fragments_have_their_own_places(pool: Pool, tmp_path: Path, strategy: str) -> None:
    arguments = str(tmp_path), {1: (5, "forward")}, 0, strategy
    found = pool.outcomes(3, train, *arguments, replaced=[1], on_loss="replace", timeout=50.0)
    check(tmp_path, found, 3)
