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
LAW = {"mirrored": 0, "central": 0, "bsp": 1, "full_batch": 0}  # the number of servers
BY_LOSS = {
    "local_sgd(period=4)": 0, "easgd(period=4)": 0, "delayed": 0, "gossip": 0, "asynchronous": 1, "hogwild": 0,
    "ssp(staleness=2)": 1,
}  # fmt: skip
QUEUED = {"gossip", "asynchronous", "hogwild", "ssp(staleness=2)"}
REFUSED = {
    *(("finetune", strategy) for strategy in {"bsp", *QUEUED}),  # servers keep the optimizer that they were given
    ("best", "bsp"),  # clips what only the servers average
    *(("carried", strategy) for strategy in QUEUED),  # the next batch of a worker is any, not the one that goes on
}
SCRIPTS = [
    "trainer", "gan", "graph", "folds", "finetune", "best", "prefetch", "vae", "gpt", "carried", "lbfgs", "logger",
]  # fmt: skip
ALWAYS = {  # without ``--all``: every strategy and every script at least once
    ("trainer", "mirrored"), ("carried", "mirrored"), ("gan", "central"), ("gpt", "central"), ("graph", "bsp"),
    ("vae", "bsp"), ("lbfgs", "full_batch"), ("folds", "local_sgd(period=4)"), ("finetune", "easgd(period=4)"),
    ("best", "delayed"), ("trainer", "gossip"), ("gan", "asynchronous"), ("logger", "asynchronous"),
    ("graph", "hogwild"), ("prefetch", "ssp(staleness=2)"),
}  # fmt: skip
FULL_BATCH = {"lbfgs"}  # what only ``full_batch`` serves; it serves nothing else


def run(name: str, batch: int) -> tuple[float, float, list[torch.Tensor]]:
    """The loss before and after, and what was trained."""
    os.environ["BATCH"] = str(batch)
    try:
        found: dict[str, Any] = runpy.run_path(str(Path(__file__).parent / f"{name}.py"))
    finally:
        torch.set_default_dtype(torch.float32)
    return found["before"], found["loss"], [tensor.detach().clone() for tensor in found["result"]]


def pairs() -> list[Any]:
    """Every script under every strategy that serves it, most of them with ``--all`` only."""
    return [
        pytest.param(name, strategy, marks=[] if (name, strategy) in ALWAYS else [pytest.mark.all_combinations])
        for strategy in [*LAW, *BY_LOSS]
        for name in SCRIPTS
        if (name, strategy) not in REFUSED and (name in FULL_BATCH) == (strategy == "full_batch")
    ]


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
