"""The law of local SGD: averages after every batch are mirrored training; and what rounds are counted in."""

from typing import Any

import pytest
from pool import Pool
from strategies.training import Case, alone, assert_equal, together, with_mean_state

SGD = {
    "plain": {"lr": 0.05},
    "momentum": {"lr": 0.02, "momentum": 0.9, "weight_decay": 0.01},
    "nesterov": {"lr": 0.02, "momentum": 0.9, "nesterov": True, "weight_decay": 0.01},
}


@pytest.mark.parametrize("workers", [1, 2, 3])
@pytest.mark.parametrize("options", SGD.values(), ids=SGD.keys())
def test_a_period_of_one_is_mirrored(pool: Pool, options: dict[str, Any], workers: int) -> None:
    case = Case(options=options, groups=True)
    assert_equal(alone(case, workers), with_mean_state(pool.run(workers, together, case, "local_sgd(period=1)")), 1e-9)


@pytest.mark.parametrize("model", ["channels_last", "checkpointed", "checkpointed reentrant"])
def test_every_model(pool: Pool, model: str) -> None:
    case = Case(model=model, options=SGD["nesterov"])
    assert_equal(alone(case, 2), with_mean_state(pool.run(2, together, case, "local_sgd(period=1)")), 1e-9)


def test_over_hosts(pool: Pool) -> None:
    case = Case(options=SGD["nesterov"])
    many = pool.run(3, together, case, "local_sgd(period=1)", hosts=[2, 1])
    assert_equal(alone(case, 3), with_mean_state(many), 1e-9)


def test_accumulation_and_schedules(pool: Pool) -> None:
    case = Case(options=SGD["plain"], accumulate=2, schedule=True)
    assert_equal(alone(case, 2), with_mean_state(pool.run(2, together, case, "local_sgd(period=1)")), 1e-9)
