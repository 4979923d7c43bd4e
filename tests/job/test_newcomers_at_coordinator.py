"""With servers, gossip and Hogwild, a killed worker is replaced, and its batches count once."""

import os
import signal
import sys
import threading
import time
from collections import Counter, defaultdict
from pathlib import Path
from typing import Any

import pytest
import torch
from pool import Pool, needs
from products import product
from torch import nn
from torch.utils.data import DataLoader

import hocket
from hocket.job.worker import current
from hocket.strategies.gossip_rounds import PushSumTraining
from job.test_newcomers import BATCH, SAMPLES, Numbered, build


def train(folder: str, strategy: str, dead: int, phases: list[str], processes: int, per_batch: bool) -> tuple[Any, ...]:
    """Train, and write down each batch; the n-th worker with the number ``dead`` dies in the n-th of ``phases``."""
    place = Path(folder)
    model, optimizer, scheduler = build()
    loader = DataLoader(Numbered(), BATCH, shuffle=True, num_workers=processes)
    model, optimizer, loader = hocket.distribute(model, optimizer, loader, strategy=strategy)
    mine, is_new = current().config.rank, current().config.newcomer
    total = int(hocket.allreduce(torch.tensor([1]), "sum"))  # a call before training
    life = len(list(place.glob(f"{mine}.*")))
    (at_work,) = current().training.strategies
    with (place / f"{mine}.{life}").open("w", buffering=1) as diary:

        def perhaps(phase: str) -> None:
            if mine == dead and life < len(phases) and phases[life] == phase:
                print("dead", file=diary)
                os.kill(os.getpid(), signal.SIGKILL)

        if is_new:
            (place / f"coming{life}").touch()
            perhaps("joining")
            at_work.take = lambda given: perhaps("taking") or type(at_work).take(at_work, given)  # type: ignore
        start = hocket.resume(model=model, optimizer=optimizer, scheduler=scheduler, loader=loader)
        epoch = start.epoch
        hocket.barrier()
        steps = 0
        for epoch in range(start.epoch, EPOCHS):
            for numbers, x, y in loader:
                is_last = steps == 3
                if is_last:
                    perhaps("before")
                loss = ((model(x) - y) ** 2).mean()
                if is_last:
                    perhaps("forward")
                loss.backward()
                print(epoch, *numbers.tolist(), file=diary)
                if is_last:
                    perhaps("backward")
                optimizer.step()
                optimizer.zero_grad()
                if per_batch:
                    scheduler.step()
                if is_last:
                    perhaps("between")
                steps += 1
                while 1 <= epoch <= len(phases) and not (place / f"coming{epoch}").exists():
                    time.sleep(0.005)  # so that each newcomer finds somebody
                time.sleep(0.01)
            if not per_batch:
                scheduler.step()
    parameters: list[float] = nn.utils.parameters_to_vector(model.parameters()).tolist()
    rates = [group["lr"] for group in optimizer.param_groups]
    return parameters, rates, hocket.rank(), hocket.size(), total, is_new, steps, scheduler.last_epoch


def check(folder: Path, found: list[Any], size: int, dead: int, newcomers: int, *, told: int) -> None:
    """Whether each sample has counted once in each epoch, and all are equal at the end.

    Of a dead worker the last ``told`` batches may have counted, or have been dealt again.
    """
    for each in found:
        assert not isinstance(each, Exception), each
    assert [each[2] for each in found] == list(range(size)) and {each[3] for each in found} == {size}
    assert {each[4] for each in found} == {size}
    assert [each[5] for each in found] == [rank == dead for rank in range(size)]
    assert all(each[6] > 0 for each in found)
    epochs, unsure = defaultdict[int, Counter[int]](Counter), list[tuple[int, list[int]]]()
    lives = sorted(folder.glob("?.?"))
    assert len(lives) == size + newcomers
    for path in lives:
        lines = path.read_text().splitlines()
        is_dead = lines[-1:] == ["dead"]
        batches = [list(map(int, line.split())) for line in lines if line != "dead"]
        keep = len(batches) - told if is_dead else len(batches)
        for number, (epoch, *numbers) in enumerate(batches):
            if number < keep:
                epochs[epoch].update(numbers)
            else:
                unsure.append((epoch, numbers))
    for epoch, numbers in unsure:
        if not any(epochs[epoch][number] for number in numbers):
            epochs[epoch].update(numbers)
    assert [epochs[epoch] for epoch in range(EPOCHS)] == [Counter(range(SAMPLES))] * EPOCHS
    assert len({tuple(each[0]) for each in found}) == 1
    assert len({tuple(each[1]) for each in found}) == 1


EPOCHS = 4
SERVED = ["asynchronous", "ssp(staleness=1)", "bsp"]
OTHERS = ["gossip", "gossip(push_sum=True)", "gossip(topology='complete', asynchronous=True)", "hogwild"]
MORE = [
    "softsync(n=2)", "downpour(push=2, fetch=2)", "easgd(period=3)", "gossip(order='adapt_while_combine')",
    "gossip(topology='pairs')", "gossip(topology='exponential', push_sum=True, period=2)",
    "gossip(topology='torus')", "hogwild(locked=True)",
]  # fmt: skip


def run(pool: Pool, folder: Path, strategy: str, size: int, dead: int, phases: list[str], **options: Any) -> None:
    settings = needs(strategy) | ({"servers": 1} if strategy.startswith("easgd") else {})
    found = pool.outcomes(
        size, train, str(folder), strategy, dead, phases, options.get("processes", 0), options.get("per_batch", False),
        replaced=[dead] * len(phases), on_loss="replace", strategy=strategy, **settings,
    )  # fmt: skip
    # A batch that a worker without servers has learned from counts when the worker has said so, with its next question;
    # in rounds of several batches, when the round is over. What processes read ahead is not learned from.
    served = strategy.partition("(")[0] in ("asynchronous", "ssp", "bsp", "softsync")
    check(folder, found, size, dead, len(phases), told=int(phases[0] == "backward") if served else 3)


@pytest.mark.few(1)
@product(strategy=SERVED, phase=["forward", "backward", "between"], who=[(2, 1), (3, 0), (2, 0)])
def test_a_lost_worker_is_replaced(pool: Pool, tmp_path: Path, strategy: str, phase: str, who: tuple[int, int]) -> None:
    run(pool, tmp_path, strategy, *who, [phase])


@pytest.mark.few(2)
@product(strategy=OTHERS, phase=["forward", "backward", "between"], who=[(3, 1), (2, 0), (3, 2)])
def test_a_lost_worker_without_servers_is_replaced(
    pool: Pool, tmp_path: Path, strategy: str, phase: str, who: tuple[int, int]
) -> None:
    run(pool, tmp_path, strategy, *who, [phase])


@pytest.mark.parametrize("strategy", [pytest.param(each, marks=pytest.mark.all_combinations) for each in MORE])
def test_a_lost_worker_is_replaced_whatever_the_options(pool: Pool, tmp_path: Path, strategy: str) -> None:
    run(pool, tmp_path, strategy, 4 if "torus" in strategy else 3, 0, ["between"])


@pytest.mark.parametrize(
    ("strategy", "death"),
    [
        ("gossip(push_sum=True)", "taking"),
        *(
            pytest.param(strategy, death, marks=pytest.mark.all_combinations)
            for strategy in ("asynchronous", "bsp", "gossip", "hogwild")
            for death in ("joining", "taking")
        ),
    ],
)
def test_a_newcomer_that_is_killed_while_it_joins_is_replaced(
    pool: Pool, tmp_path: Path, strategy: str, death: str
) -> None:
    run(pool, tmp_path, strategy, 2, 0, ["forward", death])


@pytest.mark.parametrize(
    ("strategy", "processes"),
    [
        ("asynchronous", 1),
        pytest.param("bsp", 0, marks=pytest.mark.all_combinations),
        pytest.param("gossip", 1, marks=pytest.mark.all_combinations),
        pytest.param("hogwild", 0, marks=pytest.mark.all_combinations),
    ],
)
def test_a_newcomer_has_the_schedule_of_the_others(pool: Pool, tmp_path: Path, strategy: str, processes: int) -> None:
    run(pool, tmp_path, strategy, 2, 1, ["forward"], processes=processes, per_batch=True)


def divide(strategy: str) -> tuple[float, float, float]:
    """Rank 0 gives half of what it has, and rank 1 takes that; how much each has, and how much rank 0 had before."""
    torch.manual_seed(1)
    model = nn.Linear(4, 1).double()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    hocket.distribute(model, optimizer, strategy=strategy)
    (at_work,) = current().training.strategies
    assert isinstance(at_work, PushSumTraining)
    before = float(at_work.flats[0].sum())
    given = at_work.give()
    if hocket.rank() == 0:
        at_work.has_given()
    else:
        at_work._go_on(given)
    for view, parameter in zip(at_work._views, at_work._parameters, strict=True):
        assert torch.allclose(view / at_work.mass, parameter, rtol=1e-12, atol=0)
    found = float(at_work.flats[0].sum())
    at_work._publish()
    assert float(at_work.flats[0].sum()) == found
    return found, at_work.mass, before


def test_push_sum_preserves_its_sums_when_a_worker_comes(pool: Pool) -> None:
    strategy = "gossip(push_sum=True)"
    (giver, first, before), (taker, second, _) = pool.run(2, divide, strategy, strategy=strategy)
    assert giver + taker == pytest.approx(before, rel=1e-12) and first + second == 1.0


def die_in(calls: set[str]) -> None:
    """End this process as soon as its main thread is in these functions."""
    while True:
        found, frame = set(), sys._current_frames().get(threading.main_thread().ident or 0)
        while frame is not None:
            found.add(frame.f_code.co_name)
            frame = frame.f_back
        if found >= calls:
            os.kill(os.getpid(), signal.SIGKILL)
        time.sleep(0.001)


def die_in_a_meeting(folder: str, strategy: str) -> tuple[Any, ...]:
    """Rank 2 dies where it waits for rank 0, which comes when there is a new worker."""
    place = Path(folder)
    model, optimizer, _ = build()
    model, optimizer, loader = hocket.distribute(model, optimizer, DataLoader(Numbered(), BATCH), strategy=strategy)
    is_new, sums = current().config.newcomer, []
    if is_new:
        (place / "coming").touch()
    start = hocket.resume(model=model, optimizer=optimizer, loader=loader)
    for epoch in range(start.epoch, 3):
        for _, x, y in loader:
            ((model(x) - y) ** 2).mean().backward()
            optimizer.step()
            optimizer.zero_grad()
            time.sleep(0.01)
        if epoch == 0 and hocket.rank() == 2:
            threading.Thread(target=die_in, args=({"gather", "_receive"},)).start()
        while epoch == 0 and hocket.rank() == 0 and not (place / "coming").exists():
            time.sleep(0.005)
        sums.append(int(hocket.allreduce(torch.tensor(10 ** hocket.rank() * (1 + is_new)), "sum")))
    return sums, is_new


@pytest.mark.parametrize(
    "strategy", ["asynchronous", *(pytest.param(each, marks=pytest.mark.all_combinations) for each in OTHERS)]
)
def test_a_worker_that_is_killed_in_a_meeting_is_replaced(pool: Pool, tmp_path: Path, strategy: str) -> None:
    settings: dict[str, Any] = {**needs(strategy), "timeout": 50.0, "on_loss": "replace"}
    found = pool.outcomes(3, die_in_a_meeting, str(tmp_path), strategy, replaced=[2], strategy=strategy, **settings)
    assert found[0] == found[1] and found[0][0][-1] == 211 and found[2][0][-1] == 211, found
