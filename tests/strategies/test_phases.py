"""Switching between strategies during a run: replicas and optimizer state are kept."""

from pathlib import Path
from typing import Any

import pytest
import torch
from pool import Pool
from strategies.training import Case, alone, assert_equal, together, with_mean_state
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import hocket
from hocket import specs
from hocket.errors import StrategyError
from hocket.job.checkpoint.save_load_resume import _saver
from hocket.job.worker import current
from hocket.specs import LocalSGD, Mirrored, Switch
from hocket.strategies.phases import PhasedTraining
from job.test_checkpoint import train

MOMENTUM = {"lr": 0.02, "momentum": 0.9, "nesterov": True, "weight_decay": 0.01}


def test_a_switch_can_be_written_and_read() -> None:
    text = "mirrored -> local_sgd(period=4) @ epoch 2 -> diloco(period=50) @ step 900 -> easgd @ decay"
    choice = specs.parse(text)
    assert specs.write(choice) == text
    assert specs.parse(" mirrored->local_sgd( period = 4 )@epoch  2->diloco(50) @step 900->easgd@decay ") == choice
    assert specs.parse("mirrored -> local_sgd @ epoch 3") == Switch((Mirrored(), LocalSGD()), ("epoch 3",))


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("mirrored -> local_sgd", "say when, for example '-> local_sgd @ epoch 3'"),
        ("mirrored -> local_sgd @ noon", "'@ noon': write '@ epoch 3', '@ step 1000' or '@ decay'"),
        ("mirrored -> local_sgd @ epoch 1", "must be epoch 2 or later"),
        ("mirrored -> local_sgd @ step 0", "must be step 1 or later"),
        ("mirrored -> local_sgd @ step 9 -> mirrored @ step 9", "must be step 10 or later"),
        ("mirrored -> -> local_sgd @ epoch 3", "say when"),
        ("mirrored -> local_sgd(period=0) @ epoch 3", "period=0: must be 1 or more"),
        ("mirrored -> nonsense @ epoch 3", "unknown strategy 'nonsense'"),
        ("mirrored -> local_sgd(after=3) @ epoch 3", "leave out after="),
        *(
            (f"mirrored -> {name} @ epoch 3", "cannot be switched to or from")
            for name in ("central", "ps", "gossip", "hogwild", "full_batch", "local_sgd(time=1.0)")
        ),
        ("bsp -> mirrored @ epoch 3", "'bsp' cannot be switched to or from"),
    ],
)
def test_what_cannot_be_a_switch_is_said_in_one_line(text: str, said: str) -> None:
    with pytest.raises(StrategyError) as caught:
        specs.parse(text)
    assert said in str(caught.value) and "\n" not in str(caught.value)


def test_a_switch_needs_no_servers() -> None:
    specs.parse("mirrored -> local_sgd @ epoch 3").check_fit(2, 0)
    with pytest.raises(StrategyError, match="leave out --servers 1"):
        specs.parse("mirrored -> easgd @ epoch 3").check_fit(2, 1)


@pytest.mark.few(4)
@pytest.mark.parametrize(
    ("strategy", "workers", "hosts", "more"),
    [
        ("mirrored -> local_sgd(period=1) @ step 1", 2, None, {}),
        ("mirrored -> local_sgd(period=1) @ step 5", 3, None, {}),
        ("mirrored -> local_sgd(period=1) @ step 5", 1, None, {}),
        ("mirrored -> diloco(period=1, outer_lr=1.0, outer_momentum=0.0) @ step 5", 3, None, {}),
        ("mirrored -> local_sgd(period=1) @ step 7", 3, [2, 1], {}),
        ("mirrored -> local_sgd(period=1) @ epoch 2 -> mirrored @ epoch 3", 3, None, {"epochs": 3}),
        ("mirrored -> local_sgd(period=1) @ step 3 -> mirrored @ step 9", 2, None, {"zero": True}),
        ("mirrored -> local_sgd(period=1) @ decay", 2, None, {"schedule": True}),
        ("local_sgd(period=1, after=5)", 2, None, {}),
        ("local_sgd(period=1, after='epoch 2')", 2, None, {}),
        ("local_sgd(period=1, after='decay')", 2, None, {"schedule": True}),
    ],
)
def test_averages_after_every_batch_go_on_as_mirrored(
    pool: Pool, strategy: str, workers: int, hosts: list[int] | None, more: dict[str, Any]
) -> None:
    case = Case(options=MOMENTUM, groups=True, **more)
    many = pool.run(workers, together, case, strategy, hosts=hosts)
    assert_equal(alone(case, workers), with_mean_state(many), 1e-9)


@pytest.mark.parametrize("at", [4, 5])
def test_in_the_middle_of_an_accumulation(pool: Pool, at: int) -> None:
    case = Case(options={"lr": 0.02}, accumulate=3, samples=50)
    one = alone(case, 2)
    assert_equal(one, pool.run(2, together, case, f"mirrored -> local_sgd(period=1) @ step {at}"), 1e-9)
    assert_equal(one, pool.run(2, together, case, f"local_sgd(period=1) -> mirrored @ step {at}"), 1e-9)


@pytest.mark.few(2)
@pytest.mark.parametrize(
    ("strategy", "hosts"),
    [
        ("local_sgd(period=4) -> mirrored @ step 7", None),  # in the middle of a round
        ("local_sgd(period=4) -> mirrored @ step 7", [2, 1]),
        ("easgd(period=2) -> diloco(period=6, fragments=2) @ step 3 -> delayed @ step 7 -> mirrored @ step 9", None),
        ("diloco(period=3) -> easgd(period=4) @ epoch 2 -> mirrored @ step 8", None),
    ],
)
def test_back_to_mirrored_replicas_and_their_states_are_equal(
    pool: Pool, strategy: str, hosts: list[int] | None
) -> None:
    case = Case(optimizer="Adam", options={"lr": 0.01}, dtype="float32")
    many = pool.run(3, together, case, strategy, check_replicas=1, hosts=hosts)
    for result in many[1:]:
        assert all(map(torch.equal, many[0]["parameters"], result["parameters"]))
        for index, values in many[0]["state"]["state"].items():
            assert all(torch.equal(value, result["state"]["state"][index][key]) for key, value in values.items())


def phases_without_a_loader() -> list[int]:
    model = nn.Linear(3, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    hocket.distribute(model, optimizer, strategy="mirrored -> local_sgd(period=2) @ step 3 -> mirrored @ step 6")
    (strategy,) = current().training.strategies
    assert isinstance(strategy, PhasedTraining)
    seen = []
    for _ in range(8):
        seen.append(strategy.phase)
        optimizer.zero_grad()
        model(torch.rand(2, 3)).mean().backward()
        optimizer.step()
    assert strategy.steps == 8
    return seen


def test_steps_stand_for_batches_where_there_is_no_loader(pool: Pool) -> None:
    assert pool.run(2, phases_without_a_loader) == [[0, 0, 0, 1, 1, 1, 2, 2]] * 2


@pytest.mark.few(2)
@pytest.mark.parametrize(
    ("strategy", "size", "stop"),
    [
        ("local_sgd(period=2) -> mirrored @ step 5", 2, 11),  # resumed in the last phase
        ("mirrored -> local_sgd(period=3, optimizer_state=True) @ step 3 -> mirrored @ epoch 2", 2, 8),
        ("mirrored -> local_sgd(period=3) @ epoch 2", 1, 8),
        ("mirrored -> local_sgd(period=3, optimizer_state=True) @ epoch 3", 2, 7),  # in the first
    ],
)
def test_a_resumption_goes_on_in_the_phase_it_was_in(
    pool: Pool, tmp_path: Path, strategy: str, size: int, stop: int
) -> None:
    whole = pool.run(size, train, "shuffled", 0, strategy)
    settings = {"checkpoint": str(tmp_path), "checkpoint_every": 3}
    pool.run(size, train, "shuffled", 0, strategy, stop, **settings)
    rest = pool.run(size, train, "shuffled", 0, strategy, **settings)
    assert rest[0][2] == (stop - 1) // 3 * 3
    assert [result[1] for result in rest] == [result[1] for result in whole]


def warming_up() -> list[int]:
    model = nn.Linear(1, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    loader = DataLoader(TensorDataset(torch.rand(24, 1)), 2)
    strategy = "local_sgd(period=2, after='decay')"
    model, optimizer, loader = hocket.distribute(model, optimizer, loader, strategy=strategy)
    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: (step + 1) / 4 if step < 4 else 0.1)
    (phased,) = current().training.strategies
    assert isinstance(phased, PhasedTraining)
    phases = []
    for (x,) in loader:
        phases.append(phased.phase)
        model(x).mean().backward()
        optimizer.step()
        optimizer.zero_grad()
        scheduler.step()
    return phases


def test_the_low_rate_that_a_warm_up_begins_with_is_no_decay(pool: Pool) -> None:
    assert pool.run(2, warming_up) == [[0, 0, 0, 0, 1, 1]] * 2


def phase_after_one_batch() -> int:
    model = nn.Linear(1, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    loader = DataLoader(TensorDataset(torch.rand(24, 1)), 2)
    strategy = "mirrored -> local_sgd(period=2) @ step 5"
    model, optimizer, loader = hocket.distribute(model, optimizer, loader, strategy=strategy)
    hocket.resume(model=model, optimizer=optimizer, loader=loader)
    for step, (x,) in enumerate(loader):
        optimizer.zero_grad()
        model(x).mean().backward()
        optimizer.step()
        if step == 8:
            _saver(current()).settle()
            break
    phased = [each for each in current().training.strategies if isinstance(each, PhasedTraining)]
    return phased[0].phase if phased else -1


def test_more_workers_go_on_in_the_phase_that_it_is_time_for(pool: Pool, tmp_path: Path) -> None:
    settings = {"checkpoint": str(tmp_path), "checkpoint_every": 8}
    assert pool.run(1, phase_after_one_batch, **settings) == [-1]  # has nothing to exchange
    assert pool.run(2, phase_after_one_batch, **settings) == [1, 1]


def test_a_switch_of_texts_is_refused_in_one_line() -> None:
    with pytest.raises(StrategyError, match=r"'mirrored' is no choice of a strategy: give one, for example LocalSGD"):
        specs.write(Switch(("mirrored", "local_sgd"), ("epoch 3",)))  # type: ignore[arg-type]
