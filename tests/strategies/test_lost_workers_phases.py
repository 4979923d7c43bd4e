"""A switch of strategies when a worker is killed, before it, in the middle of it, or after."""

import itertools
import os
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from pool import Pool
from products import product
from torch import nn
from torch.utils.data import DataLoader

import hocket
from hocket import specs
from hocket.job.worker import current
from hocket.strategies.optimizer_state import CommonState
from hocket.strategies.phases import PhasedTraining
from job.test_regrouping import BATCH, PHASES, SAMPLES, Counted, Numbered, build, check_counted, train

IN_STEP = "mirrored -> local_sgd(period=3) @ step 4 -> mirrored @ step 9"  # the last round is short


@pytest.mark.parametrize(
    ("text", "regroups", "unasked", "takes_newcomers"),
    [
        (IN_STEP, True, True, True),
        ("easgd -> diloco(period=4) @ epoch 2 -> local_sgd @ decay", True, True, True),
        ("mirrored -> delayed @ epoch 2", True, False, True),
        ("dmb(extra=1) -> mirrored @ epoch 2", True, False, True),
        ("mirrored -> diloco(fragments=2) @ epoch 2", True, False, True),
        ("local_sgd(after=100)", True, True, True),
        ("local_sgd(after='decay', period=4)", True, True, True),
        ("local_sgd(time=1.0)", True, True, True),
        ("full_batch", True, True, False),
    ],
)
def test_a_switch_goes_on_if_all_its_strategies_do(
    text: str, regroups: bool, unasked: bool, takes_newcomers: bool
) -> None:
    for spec in (specs.parse(text), specs.parse(text).resolve(3, 0)):
        assert (spec.regroups, spec.regroups_unasked, spec.takes_newcomers) == (regroups, unasked, takes_newcomers)


def in_phases(counted: list[Counted], is_local: Callable[[int, int], bool], without: int | None = None) -> torch.Tensor:
    """The law of a switch between ``mirrored`` and ``local_sgd``: steps of all, or of each worker in rounds.

    Args:
        counted: What each worker has done.
        is_local: Whether local steps are taken, from the step and the epoch.
        without: A worker that is lost when parameters are averaged, and the optimizer's state is not.
    """
    workers, data = {each.worker: build() for each in counted}, Numbered()

    def learn(worker: int, numbers: list[int], weight: float) -> None:
        model, optimizer = workers[worker]
        (((model(data.x[numbers]) - data.y[numbers]) ** 2).mean() * weight).backward()
        optimizer.step()
        optimizer.zero_grad()

    def average(pick: Callable[[nn.Module, torch.optim.Optimizer], list[torch.Tensor]], there: set[int]) -> None:
        means = [torch.stack(each).mean(0) for each in zip(*(pick(*workers[worker]) for worker in there), strict=True)]
        for every in workers.values():
            for tensor, mean in zip(pick(*every), means, strict=True):
                tensor.copy_(mean)

    samples, was_local, there = 0, False, set[int]()
    for _, group in itertools.groupby(counted, key=lambda each: each.exchanges):
        of_round = list(group)
        local = is_local(of_round[0].step, samples // SAMPLES)
        if was_local and not local:
            with torch.no_grad():
                average(lambda _, of: [state["momentum_buffer"] for state in of.state.values()], there - {without})
        was_local, there = local, {each.worker for each in of_round}
        if local:
            for each in of_round:
                learn(each.worker, each.numbers, each.weight)
            with torch.no_grad():
                average(lambda model, _: list(model.parameters()), there)
        else:
            numbers = [number for each in of_round if each.weight for number in each.numbers]
            for worker in workers:
                learn(worker, numbers, 1.0)
        samples += sum(len(each.numbers) for each in of_round if each.weight)
    return nn.utils.parameters_to_vector(workers[min(there)][0].parameters()).detach()


def check(folder: Path, found: list[Any], deaths: dict[int, tuple[int, str]], expected: torch.Tensor) -> None:
    parameters = next(torch.tensor(each[0], dtype=torch.float64) for i, each in enumerate(found) if i not in deaths)
    assert torch.allclose(parameters, expected, rtol=1e-9, atol=1e-12)


@pytest.mark.few(2)
@product(
    phase=PHASES,
    who=[(3, 1, 3), (3, 0, 4), (3, 2, 8), (3, 1, 9), (2, 0, 6)],
)
def test_the_others_go_on(pool: Pool, tmp_path: Path, who: tuple[int, int, int], phase: str) -> None:
    size, dead, step = who
    deaths = {dead: (step, phase)}
    settings: dict[str, Any] = {"on_loss": "continue", "check_replicas": 1}
    found = pool.outcomes_with_death(size, train, dead, str(tmp_path), deaths, 0, IN_STEP, **settings)
    counted = check_counted(tmp_path, found, deaths, size)
    check(tmp_path, found, deaths, in_phases(counted, lambda step, _: 4 <= step < 9))


@pytest.mark.few(1)
@product(phase=["forward", "after"], step=[3, 8], dead=[3, 1])
def test_the_others_go_on_over_tcp(pool: Pool, tmp_path: Path, dead: int, step: int, phase: str) -> None:
    deaths = {dead: (step, phase)}
    settings: dict[str, Any] = {"on_loss": "continue", "timeout": 50.0, "hosts": (1, 2, 1), "transport": "tcp"}
    found = pool.outcomes_with_death(4, train, dead, str(tmp_path), deaths, 0, IN_STEP, **settings)
    counted = check_counted(tmp_path, found, deaths, 4)
    check(tmp_path, found, deaths, in_phases(counted, lambda step, _: 4 <= step < 9))


def train_until_the_switch(folder: str, dead: int, number: int, where: str, strategy: str) -> Any:
    """As ``train``, where a rank is killed in its switch ``number``."""
    owner: Any
    owner, name = {
        "before": (PhasedTraining, "_switch"),
        "state": (CommonState, "make_equal"),
        "after": (PhasedTraining, "begin_batch"),
    }[where]
    real = getattr(owner, name)

    def die(this: Any, *args: Any) -> Any:
        (at_work,) = current().training.strategies
        assert isinstance(at_work, PhasedTraining)
        if at_work.phase == number - (where != "after"):
            with (Path(folder) / f"{dead}.counted").open("a") as counted:
                print("dead", at_work.exchanges, file=counted)
            os.kill(os.getpid(), signal.SIGKILL)
        return real(this, *args)

    if hocket.rank() == dead:
        setattr(owner, name, die)
    return train(folder, {}, 0, strategy)


@pytest.mark.few(2)
@product(
    strategy=[IN_STEP, "mirrored -> local_sgd(period=3) @ step 4 -> mirrored @ epoch 2", "local_sgd(3, after=4)"],
    where=[("before", 1), ("after", 1), ("before", 2), ("state", 2), ("after", 2)],
    who=[(3, 1), (3, 0), (2, 1)],
)
def test_a_worker_is_lost_in_the_switch(
    pool: Pool, tmp_path: Path, strategy: str, where: tuple[str, int], who: tuple[int, int]
) -> None:
    place, number = where
    if "after" in strategy and number == 2:
        pytest.skip("there is one switch")
    size, dead = who
    settings: dict[str, Any] = {"on_loss": "continue", "check_replicas": 1}
    arguments = str(tmp_path), dead, number, place, strategy
    found = pool.outcomes_with_death(size, train_until_the_switch, dead, *arguments, **settings)
    counted = check_counted(tmp_path, found, {dead: (0, "")}, size)

    def is_local(step: int, epoch: int) -> bool:
        return step >= 4 and ("mirrored" not in strategy or (epoch < 1 if "epoch" in strategy else step < 9))

    # At the end of an epoch parameters are averaged before the switch.
    is_late = place == "state" or (place == "before" and "epoch" in strategy)
    check(tmp_path, found, {dead: (0, "")}, in_phases(counted, is_local, dead if is_late else None))


@pytest.mark.few(2)
@product(
    strategy=[
        "easgd(3) -> diloco(period=4) @ step 4 -> delayed @ epoch 2 -> dmb(extra=1) @ step 12 -> mirrored @ step 15",
        "delayed -> local_sgd(period=3, optimizer_state=True) @ step 5 -> dmb(extra=2) @ epoch 2 -> easgd @ step 13",
        "dmb(extra=1) -> easgd(period=2) @ step 4 -> delayed @ step 8 -> diloco(period=5, fragments=2) @ epoch 2",
    ],
    who=[(3, 1, 4), (3, 0, 8), (3, 2, 12), (2, 1, 3)],
    phase=["forward", "after", "between"],
)
def test_every_sample_counts_once_in_other_switches(
    pool: Pool, tmp_path: Path, strategy: str, who: tuple[int, int, int], phase: str
) -> None:
    size, dead, step = who
    deaths = {dead: (step, phase)}
    settings: dict[str, Any] = {"on_loss": "continue", "check_replicas": 1}
    found = pool.outcomes_with_death(size, train, dead, str(tmp_path), deaths, 0, strategy, **settings)
    check_counted(tmp_path, found, deaths, size)


def phases_of_rates() -> list[int]:
    """With ``--batch per-worker`` and ``scale_lr``, rates fall with the number of workers, and later by a schedule."""
    loader, strategy = DataLoader(Numbered(), BATCH), "mirrored -> local_sgd(period=2) @ decay"
    model, optimizer, loader = hocket.distribute(*build(), loader, strategy=strategy, scale_lr="linear")
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 6, 0.5)
    (phased,) = current().training.strategies
    assert isinstance(phased, PhasedTraining)
    mine, phases, rates = hocket.rank(), list[int](), list[float]()
    for step, (_, x, y) in enumerate(loader):
        if (mine, step) == (1, 2):
            os.kill(os.getpid(), signal.SIGKILL)
        phases.append(phased.phase)
        rates.append(optimizer.param_groups[0]["lr"])
        ((model(x) - y) ** 2).mean().backward()
        optimizer.step()
        optimizer.zero_grad()
        scheduler.step()
    assert [rates[2], rates[4], rates[8]] == pytest.approx([0.15, 0.1, 0.05])
    return phases[:9]


def test_a_rate_that_falls_with_the_number_of_workers_is_no_decay(pool: Pool) -> None:
    found = pool.outcomes_with_death(3, phases_of_rates, 1, on_loss="continue", batch="per-worker")
    assert [found[0], found[2]] == [[0] * 6 + [1] * 3] * 2
