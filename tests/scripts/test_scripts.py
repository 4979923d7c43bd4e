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
LAW = {"mirrored": 0, "central": 0, "bsp": 1, "full_batch": 0, "central(fused=True)": 0}  # the number of servers
BY_LOSS = {
    "local_sgd(period=4)": 0, "easgd(period=4)": 0, "delayed": 0, "gossip": 0, "asynchronous": 1, "hogwild": 0,
    "ssp(staleness=2)": 1, "diloco(period=4, outer_momentum=0.5)": 0, "dmb(extra=1)": 0, "downpour": 1,
    "softsync(n=2)": 1, "local_sgd(time=0.1)": 0, "gossip(push_sum=True)": 0, "gossip(asynchronous=True)": 0,
    "mirrored -> local_sgd(period=4) @ epoch 2": 0,
}  # fmt: skip
QUEUED = {
    "gossip", "asynchronous", "hogwild", "ssp(staleness=2)", "downpour", "softsync(n=2)", "gossip(push_sum=True)",
    "gossip(asynchronous=True)",
}  # fmt: skip
REFUSED = {
    *(("finetune", strategy) for strategy in {"bsp", *QUEUED}),  # servers keep the optimizer that they were given
    ("best", "bsp"),  # clips what only the servers average
    ("best", "central(fused=True)"),  # clips what nobody has
    # The next batch of a worker is any, and not the one that goes on.
    *(("carried", strategy) for strategy in {"local_sgd(time=0.1)", *QUEUED}),
    ("gpt", "local_sgd(time=0.1)"),  # has no loader
}
PART = {"dmb(extra=1)": 1 / 8}  # of what one worker gains that is enough, if not a quarter; half of the batches count
SCRIPTS = [
    "trainer", "gan", "graph", "folds", "finetune", "best", "prefetch", "vae", "gpt", "carried", "lbfgs", "logger",
]  # fmt: skip
ALWAYS = {  # without ``--all``: every script, and most strategies, at least once
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
            assert before - loss > (before - alone) * PART.get(strategy, 1 / 4)
