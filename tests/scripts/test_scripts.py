"""Training scripts of the kinds that people write, under every strategy that says that it serves them.

Where a law says so, two workers give the numbers of one with twice the batch; else they reach a good part of its loss.
"""

import os
import runpy
from pathlib import Path
from typing import Any

import pytest
import torch
from pool import Pool

WORKERS = 2
LAW = {"mirrored": 0, "central": 0, "bsp": 1}  # the number of servers
BY_LOSS = {
    "local_sgd(period=4)": 0, "easgd(period=4)": 0, "delayed": 0, "gossip": 1, "asynchronous": 1, "hogwild": 1,
    "ssp(staleness=2)": 1,
}  # fmt: skip
SERVED = {"bsp", "gossip", "asynchronous", "hogwild", "ssp(staleness=2)"}
REFUSED = {
    *(("finetune", strategy) for strategy in SERVED),  # servers keep the optimizer that they were given
    ("best", "bsp"),  # clips what only the servers average
}
OPEN = {("folds", "ssp(staleness=2)")}  # who has left its loop is waited for
SCRIPTS = ["trainer", "gan", "graph", "folds", "finetune", "best", "prefetch"]


def run(name: str, batch: int) -> tuple[float, float, list[torch.Tensor]]:
    """The loss before and after, and what was trained."""
    os.environ["BATCH"] = str(batch)
    try:
        found: dict[str, Any] = runpy.run_path(str(Path(__file__).parent / f"{name}.py"))
    finally:
        torch.set_default_dtype(torch.float32)
    return found["before"], found["loss"], [tensor.detach().clone() for tensor in found["result"]]


def pairs() -> list[Any]:
    """One script for each strategy, another one each time; all others with ``--all`` only."""
    found = []
    for number, strategy in enumerate([*LAW, *BY_LOSS]):
        names = [name for name in SCRIPTS if (name, strategy) not in REFUSED | OPEN]
        for place, name in enumerate(names):
            marks = [] if place == number % len(names) else [pytest.mark.all_combinations]
            found.append(pytest.param(name, strategy, marks=marks))
    return found


@pytest.mark.parametrize(("name", "strategy"), pairs())
def test_a_script(pool: Pool, name: str, strategy: str) -> None:
    ((before, alone, plain),) = pool.run(1, run, name, 4 * WORKERS)
    many = pool.run(WORKERS, run, name, 4, strategy=strategy, servers={**LAW, **BY_LOSS}[strategy])
    assert alone < before
    for first, loss, result in many:
        if strategy in LAW:
            assert first == pytest.approx(before)
            for mine, theirs in zip(plain, result, strict=True):
                assert torch.allclose(mine, theirs, rtol=1e-9, atol=1e-9), (mine - theirs).abs().max()
        else:
            assert before - loss > (before - alone) / 4
