"""Learning rates where workers advance unevenly: all follow the count of all."""

import os
from pathlib import Path

import torch
from pool import Pool
from strategies.training import Case, make
from torch.optim.lr_scheduler import ChainedScheduler, LinearLR, OneCycleLR, SequentialLR, StepLR

import hocket
from hocket.capture.collector import BackwardPasses
from hocket.job.schedules import Following, LoopPace
from hocket.job.simulated_job import SimulatedJob


def optimizer() -> torch.optim.Optimizer:
    return torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=1.0)


def test_a_slow_worker_takes_several_steps_at_once_and_a_fast_one_fewer() -> None:
    for own, everyone in ((1, 4.0), (7, 4.0), (4, 4.0)):
        trained = optimizer()
        scheduler = LinearLR(trained, 1.0, 0.0, total_iters=100)
        pace = LoopPace(BackwardPasses())
        following = Following(pace, [trained])
        for batch in range(1, 10 * own + 1):
            pace.own, pace.pace = batch, batch * everyone / own
            trained.step()
            scheduler.step()
        assert scheduler.last_epoch == 40
        assert "step" not in scheduler.state_dict()
        following.end()
        scheduler.step()
        assert scheduler.last_epoch == 41
        assert type(scheduler) is LinearLR


def test_schedulers_made_of_others_and_those_of_other_optimizers() -> None:
    trained, other = optimizer(), optimizer()
    parts = [LinearLR(trained, 0.1, 1.0, total_iters=4), StepLR(trained, 2, 0.5)]
    sequential = SequentialLR(trained, parts, milestones=[4])
    chained = ChainedScheduler([StepLR(trained, 3)], optimizer=trained)
    strange = StepLR(other, 2)
    pace = LoopPace(BackwardPasses())
    pace.own, pace.pace = 1, 3.0
    following = Following(pace, [trained])
    trained.step()
    other.step()
    sequential.step()
    chained.step()
    strange.step()
    following.end()
    assert (sequential.last_epoch, parts[0].last_epoch, strange.last_epoch) == (3, 3, 1)


def test_a_worker_that_had_fewer_batches_in_the_end_comes_to_the_same_place() -> None:
    trained = optimizer()
    scheduler = LinearLR(trained, 1.0, 0.0, total_iters=100)
    pace = LoopPace(BackwardPasses())
    following = Following(pace, [trained])
    for batch in range(1, 11):
        pace.own, pace.pace = batch, batch * 2 / 3
        trained.step()
        scheduler.step()
    assert scheduler.last_epoch == 6
    pace.complete(8.0)
    following.complete()
    assert scheduler.last_epoch == 8


def test_a_worker_that_had_no_batch_in_a_loop_comes_to_the_same_place() -> None:
    trained = optimizer()
    each_batch, each_epoch = StepLR(trained, 2), StepLR(trained, 2)
    pace = LoopPace(BackwardPasses())
    for batches in (10, 0):
        pace.begin(lambda: [trained])
        for batch in range(1, batches + 1):
            pace.own, pace.pace = batch, batch / 2
            trained.step()
            each_batch.step()
        pace.complete(8.0)
        pace.end()
        each_epoch.step()
    assert (each_batch.last_epoch, each_epoch.last_epoch) == (16, 2)


def train(job: SimulatedJob) -> tuple[int, float]:
    model, trained, loader = hocket.distribute(*make(Case(samples=120), 1))
    scheduler = LinearLR(trained, 1.0, 0.0, total_iters=20)
    steps = 0
    for x, y in loader:
        ((model(x) - y) ** 2).mean().backward()
        trained.step()
        trained.zero_grad()
        scheduler.step()
        steps += 1
        job.compute(2.0 if hocket.rank() else 0.2)
    return steps, scheduler.last_epoch


def test_workers_of_uneven_speed_come_to_the_same_rate() -> None:
    job = SimulatedJob(2, "local_sgd(time=2.0)")
    (fast, fast_count), (slow, slow_count) = job.run(lambda: train(job))
    assert fast > slow
    assert fast + slow == 40
    assert fast_count == slow_count == 20


def as_they_get_ready() -> int:
    model, trained, loader = hocket.distribute(*make(Case(samples=60, batch=3), 1), strategy="asynchronous")
    scheduler = LinearLR(trained, 1.0, 0.0, total_iters=40)
    for _ in range(2):
        for x, y in loader:
            ((model(x) - y) ** 2).mean().backward()
            trained.step()
            trained.zero_grad()
            scheduler.step()
    return scheduler.last_epoch


def test_workers_that_take_batches_as_they_get_ready_end_each_epoch_at_the_same_rate(pool: Pool) -> None:
    assert pool.run(2, as_they_get_ready, servers=1) == [20, 20]


def one_cycle(dies_at: int | None) -> tuple[int, int, float]:
    """Steps, those of the schedule, and how fast it was where a worker was lost; rank 1 dies with a batch in hand."""
    model, trained, loader = hocket.distribute(*make(Case(samples=70, batch=3), 1), strategy="bsp")
    scheduler = OneCycleLR(trained, 0.02, epochs=2, steps_per_epoch=len(loader))
    position = hocket.resume(model=model, optimizer=trained, scheduler=scheduler, loader=loader)
    steps = position.step
    after: list[tuple[int, int]] = []
    for _ in range(position.epoch, 2):
        for x, y in loader:
            if hocket.rank() == 1 and steps == dies_at:
                os._exit(1)
            ((model(x) - y) ** 2).mean().backward()
            trained.step()
            trained.zero_grad()
            scheduler.step()
            steps += 1
            after.append((steps, scheduler.last_epoch))
    half = after[len(after) // 2] if after else (1, 0)
    return steps, scheduler.last_epoch, half[1] / half[0]


def test_a_schedule_follows_what_is_trained_when_a_worker_is_lost(pool: Pool, tmp_path: Path) -> None:
    settings = {"servers": 1, "checkpoint": str(tmp_path), "checkpoint_every": 5}
    found = pool.outcomes_with_death(3, one_cycle, 1, 3, **settings)
    for steps, taken, share in (found[0], found[2]):
        assert steps > 16 == taken  # of two epochs of 8 rounds, however the last batches were dealt
        assert share < 0.8  # it did not hurry ahead, and then stand still
    assert all(taken <= 16 for _, taken, _ in pool.run(3, one_cycle, None, **settings))  # from the last checkpoint
