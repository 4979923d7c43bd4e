"""The laws of strategies on whole simulated workers, of which there can be many."""

from collections.abc import Callable
from typing import Any

import pytest
from products import product
from strategies import test_diloco, test_gossip_laws, test_laws, test_served_laws
from strategies.training import Case, alone, assert_equal, together, with_mean_state

from hocket.job.simulated_job import SimulatedJob

ADAM = {"optimizer": "Adam", "options": {"lr": 0.01}}
MOMENTUM = {"options": {"lr": 0.02, "momentum": 0.9, "nesterov": True, "weight_decay": 0.01}}


class SimulatedPool:
    """In place of the pool of processes."""

    def run(self, size: int, function: Callable[..., Any], *args: Any, **settings: Any) -> list[Any]:
        assert settings.pop("hosts", None) is None
        return SimulatedJob(size, **settings).run(lambda: function(*args))


POOL: Any = SimulatedPool()


@pytest.mark.few(2)
@pytest.mark.parametrize("strategy", [*test_laws.STRATEGIES, "local_sgd(period=1)"])
def test_64_workers_are_one_process(strategy: str) -> None:
    """192 samples a step; the last step of an epoch has fewer samples than there are workers."""
    case = Case(samples=192 * 2 + 50, **(MOMENTUM if strategy.startswith("local_sgd") else ADAM))
    many = POOL.run(64, together, case, strategy)
    assert_equal(alone(case, 64), with_mean_state(many) if strategy.startswith("local_sgd") else many)


@pytest.mark.few(1)
@pytest.mark.parametrize("servers", [1, 3])
def test_64_workers_with_servers_are_one_process(servers: int) -> None:
    test_served_laws.check(POOL, Case(samples=192 * 2 + 50, **ADAM), 64, servers, "bsp")


@pytest.mark.few(1)
@pytest.mark.parametrize("strategy", ["gossip(topology='complete')", "gossip(topology='complete', push_sum=True)"])
def test_64_workers_that_gossip_with_everybody_are_one_process(strategy: str) -> None:
    case = Case(samples=192 * 2, **MOMENTUM)
    assert_equal(alone(case, 64), with_mean_state(POOL.run(64, together, case, strategy, coordinated=True)))


@pytest.mark.few(3)
@product(model=test_laws.MODELS, strategy=test_laws.STRATEGIES)
def test_every_model(model: str, strategy: str) -> None:
    test_laws.test_every_model(POOL, model, "momentum", strategy)


@pytest.mark.few(8)
@product(strategy=test_laws.STRATEGIES, name=list(test_laws.OPTIMIZERS))
def test_every_optimizer(strategy: str, name: str) -> None:
    test_laws.test_every_optimizer(POOL, name, strategy)


def test_other_laws_of_synchronous_strategies() -> None:
    for strategy in test_laws.STRATEGIES[:2]:
        test_laws.test_clipping_sees_the_average(POOL, strategy)
        test_laws.test_schedulers(POOL, strategy)


def test_diloco_can_be_local_sgd() -> None:
    test_diloco.test_plain_it_is_local_sgd(POOL, "tied", 8, None)


@pytest.mark.few(6)
@product(name=list(test_laws.OPTIMIZERS), strategy=["bsp", "asynchronous", "ps(staleness=2)"])
def test_one_worker_with_servers_is_plain(name: str, strategy: str) -> None:
    test_served_laws.test_one_worker_is_plain_with_every_optimizer(POOL, name, strategy)


@pytest.mark.few(4)
@product(
    "topology",
    topology=["ring", "torus", "exponential", "pairs", "complete"],
    kind=["adapt_then_combine", "adapt_while_combine"],
    workers=[4, 12],
)
def test_gossip_is_what_the_matrix_says(topology: str, kind: str, workers: int) -> None:
    test_gossip_laws.test_it_is_what_the_matrix_says(POOL, workers, topology, kind, 2)


@pytest.mark.few(1)
@pytest.mark.parametrize("options", ["topology='torus'", "push_sum=True", "asynchronous=True"])
def test_gossip_preserves_the_mean(options: str) -> None:
    test_gossip_laws.test_mixing_preserves_the_mean_and_brings_together(POOL, 16, options)
