"""Rounds that last seconds when a worker is killed, leaves or joins: what was not averaged is done again."""

import itertools
import os
import signal
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from pool import Pool
from products import product, rarely
from torch import nn

from hocket.job.loader.timed_rounds import RoundDeal
from hocket.job.worker import current
from hocket.strategies.averaging import InPlaceAverage
from hocket.strategies.local_sgd import TimedLocalSGD
from job import test_newcomers, test_newcomers_at_coordinator
from job.test_regrouping import PHASES, Counted, Numbered, build, check_counted, train

ACTIONS = ["take", "do", "round", "lose", "join"]


def average_by_samples(counted: Sequence[Counted]) -> torch.Tensor:
    """The law: in each round a worker goes on from the mean, which is weighted by the samples of the round."""
    workers, data = {each.worker: build() for each in counted}, Numbered()
    mean = nn.utils.parameters_to_vector(build()[0].parameters()).detach().clone()
    for _, group in itertools.groupby(counted, key=lambda each: each.exchanges):
        total, parts = 0, torch.zeros_like(mean)
        for worker, batches in itertools.groupby(group, key=lambda each: each.worker):
            model, optimizer = workers[worker]
            nn.utils.vector_to_parameters(mean.clone(), model.parameters())
            samples = 0
            for each in batches:
                ((model(data.x[each.numbers]) - data.y[each.numbers]) ** 2).mean().backward()
                optimizer.step()
                optimizer.zero_grad()
                samples += len(each.numbers)
            parts += nn.utils.parameters_to_vector(model.parameters()).detach() * samples
            total += samples
        mean = parts / total
    return mean


def check(folder: Path, found: list[Any], deaths: dict[int, tuple[int, str]], size: int) -> None:
    counted = check_counted(folder, found, deaths, size)
    in_rounds = sorted(counted, key=lambda each: (each.exchanges, each.worker, each.step))
    parameters = next(torch.tensor(each[0], dtype=torch.float64) for i, each in enumerate(found) if i not in deaths)
    assert torch.allclose(parameters, average_by_samples(in_rounds), rtol=1e-9, atol=1e-12)


@pytest.mark.few(2)
@product(
    seconds=["1e-9", "0.003", "0.02"],
    phase=[phase for phase in PHASES if phase != "between"],  # where all wait for a step of the dead one
    who=[(3, 1, 3, 0), (2, 1, 4, 0), (3, 0, 2, 2), (3, 2, 5, 0)],
)
def test_the_others_go_on(pool: Pool, tmp_path: Path, seconds: str, who: tuple[int, int, int, int], phase: str) -> None:
    size, dead, step, processes = who
    deaths = {dead: (step, phase)}
    arguments = str(tmp_path), deaths, processes, f"local_sgd(time={seconds})"
    found = pool.outcomes_with_death(size, train, dead, *arguments, on_loss="continue", timeout=50.0)
    check(tmp_path, found, deaths, size)


@pytest.mark.few(1)
@product(
    seconds=["1e-9", "0.02"],
    phase=["forward", "between"],
    who=[(3, 1, 0), (2, 0, 0), (3, 0, 2)],
)
def test_a_lost_worker_is_replaced(
    pool: Pool, tmp_path: Path, seconds: str, who: tuple[int, int, int], phase: str
) -> None:
    size, dead, processes = who
    settings: dict[str, Any] = {"on_loss": "replace", "timeout": 50.0}
    arguments = str(tmp_path), {dead: (3, phase)}, processes, f"local_sgd(time={seconds}, optimizer_state=True)"
    found = pool.outcomes(size, test_newcomers.train, *arguments, replaced=[dead], **settings)
    test_newcomers.check(tmp_path, found, size)
    assert found[dead][6]


@pytest.mark.parametrize("size", [2, rarely(3)])
def test_a_new_worker_has_the_schedule_of_the_others(pool: Pool, tmp_path: Path, size: int) -> None:
    settings: dict[str, Any] = {"replaced": [1], "on_loss": "replace", "timeout": 50.0}
    arguments = str(tmp_path), "local_sgd(time=1e-9)", 1, ["forward"], 0, True
    found = pool.outcomes(size, test_newcomers_at_coordinator.train, *arguments, **settings)
    test_newcomers_at_coordinator.check(tmp_path, found, size, 1, 1, told=1)


@pytest.mark.few(1)
@pytest.mark.parametrize(("size", "told"), [(3, 0), (2, 1)])
def test_a_worker_leaves_on_notice(pool: Pool, tmp_path: Path, size: int, told: int) -> None:
    arguments = str(tmp_path), {told: (3, "forward")}, 0, "local_sgd(time=0.02)", signal.SIGTERM
    outcomes = pool.outcomes(size, test_newcomers.train, *arguments, on_loss="continue", timeout=50.0)
    assert outcomes[told].kind == "Left"
    test_newcomers.check(tmp_path, [each for rank, each in enumerate(outcomes) if rank != told], size)


@pytest.mark.parametrize("dead", [3, rarely(1)])
def test_the_others_go_on_over_tcp(pool: Pool, tmp_path: Path, dead: int) -> None:
    deaths = {dead: (3, "after")}
    settings: dict[str, Any] = {"on_loss": "continue", "timeout": 50.0, "hosts": (1, 2, 1), "transport": "tcp"}
    found = pool.outcomes_with_death(4, train, dead, str(tmp_path), deaths, 0, "local_sgd(time=0.02)", **settings)
    check(tmp_path, found, deaths, 4)


def train_until_the_average(folder: str, dead: int, number: int, where: str) -> Any:
    """As ``train``, where a rank is killed at the end of its round ``number``."""
    owner: Any
    owner, name = {
        "told": (TimedLocalSGD, "average"),  # all know how far it is
        "met": (InPlaceAverage, "_average"),  # all know its samples
        "averaged": (TimedLocalSGD, "end_round"),  # it has counted, and the optimizer's state has not
    }[where]
    real = getattr(owner, name)
    mine = current().config.rank

    def die(this: Any, *args: Any) -> Any:
        (at_work,) = current().training.strategies
        if at_work.exchanges == number + (where == "averaged"):
            with (Path(folder) / f"{dead}.counted").open("a") as counted:
                print("dead", at_work.exchanges, file=counted)
            os.kill(os.getpid(), signal.SIGKILL)
        return real(this, *args)

    if mine == dead:
        setattr(owner, name, die)
    return train(folder, {}, 0, "local_sgd(time=0.003, optimizer_state=True)")


@pytest.mark.few(1)
@product(where=["told", "met", "averaged"], who=[(3, 1), (3, 0), (2, 1)])
def test_a_worker_is_lost_at_the_end_of_a_round(pool: Pool, tmp_path: Path, who: tuple[int, int], where: str) -> None:
    size, dead = who
    arguments = str(tmp_path), dead, 2, where
    found = pool.outcomes_with_death(size, train_until_the_average, dead, *arguments, on_loss="continue", timeout=50.0)
    check_counted(tmp_path, found, {dead: (0, "")}, size)


@given(
    total=st.integers(0, 60),
    size=st.integers(1, 4),
    actions=st.lists(st.tuples(st.sampled_from(ACTIONS), st.integers(0, 5)), max_size=80),
)
def test_what_is_lost_in_a_round_is_dealt_again(total: int, size: int, actions: list[tuple[str, int]]) -> None:
    """Some take ahead, whoever is lost loses what it has done since the last round, and newcomers come after rounds."""
    deals = {number: RoundDeal(number, range(size)) for number in range(size)}
    held, done = {number: list[int]() for number in deals}, {number: list[int]() for number in deals}
    counted, is_over = list[int](), False

    def take(number: int) -> None:
        if (batch := deals[number].take(1, total)) is not None:
            held[number].append(batch)

    def end_round() -> None:
        nonlocal is_over
        rows = {number: (deal.drawn, len(held[number]), 0) for number, deal in deals.items()}
        (is_over,) = {deal.end_round(rows) for deal in deals.values()}
        for number in deals:
            counted.extend(done[number])
            done[number].clear()

    def regroup() -> None:
        now = tuple(deals)
        told = {number: deal.told for number, deal in deals.items()}
        for rank, deal in enumerate(deals.values()):
            deal.regroup(rank, now, told)

    for number in deals:
        take(number)
    for action, number in actions:
        if action in ("take", "do", "lose") and number not in deals:
            continue
        if action == "take":
            take(number)
        elif action == "do" and held[number]:
            done[number].append(held[number].pop(0))
        elif action == "lose" and len(deals) > 1:
            del deals[number], held[number], done[number]
            regroup()
        elif action in ("round", "join"):
            end_round()
            if is_over:
                break
            if action == "join" and number not in deals:
                place = next(iter(deals.values())).place()
                deals[number], held[number], done[number] = RoundDeal(0, [0]), [], []
                deals[number].go_on(place)
                regroup()
        states = [deal.place() for deal in deals.values()]
        assert action in ("take", "do") or all(state == states[0] for state in states)
    while not is_over:
        for number in deals:
            take(number)
            done[number] += held[number]
            held[number].clear()
        end_round()
    assert sorted(counted) == list(range(total))
