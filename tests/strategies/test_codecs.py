"""Training with codecs: replicas are equal, and what was sent and what is owed is all there was.

The law is tested with losses whose gradients do not depend on the parameters: then the parameters say what was sent.
"""

from pathlib import Path
from typing import Any

import pytest
import torch
from pool import Pool, RemoteError
from products import product
from strategies.training import Case, alone, assert_equal, loop, make
from torch import nn

import hocket
from hocket.job.worker import current
from job import test_newcomers, test_regrouping

CODECS = ["fp16", "bf16", "int8(block=32)", "int4", "onebit", "topk(0.1)", "topk(0.05, warmup=3)", "randomk(0.2)",
          "threshold(0.5)", "ternary", "qsgd(4)", "qsgd(8)"]  # fmt: skip
UNBIASED = ("ternary", "qsgd")
STRATEGIES = ["mirrored", "central", "central(fused=True)"]
STEPS, RATE = 7, 0.1


class Weights(nn.Module):
    """Parameters whose gradients are the inputs."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Parameter(torch.zeros(40, 30, dtype=torch.float64))
        self.second = nn.Parameter(torch.zeros(77, dtype=torch.float64))

    def forward(self, inputs: list[torch.Tensor]) -> torch.Tensor:
        return sum(((p * x).sum() for p, x in zip(self.parameters(), inputs, strict=True)), torch.zeros(()))


def inputs_of(rank: int, step: int) -> list[torch.Tensor]:
    random = torch.Generator().manual_seed(1000 * rank + step)
    return [torch.randn(p.shape, generator=random, dtype=torch.float64) for p in Weights().parameters()]


def build(strategy: str, codec: str, **options: Any) -> tuple[nn.Module, torch.optim.Optimizer]:
    model = Weights()
    optimizer = torch.optim.SGD(model.parameters(), lr=RATE)
    hocket.distribute(model, optimizer, strategy=strategy, codec=codec, **options)
    return model, optimizer


def flat(tensors: Any) -> torch.Tensor:
    return torch.cat([tensor.detach().reshape(-1) for tensor in tensors])


def owed(model: nn.Module) -> torch.Tensor:
    """What all ranks together owe of the averages; collective."""
    (strategy,) = current().training.strategies
    found = strategy._exchange.owed()  # type: ignore[attr-defined]
    return flat(found[name] for name, _ in model.named_parameters())


def train(strategy: str, codec: str, steps: int = STEPS) -> tuple[torch.Tensor, torch.Tensor]:
    model, optimizer = build(strategy, codec)
    for step in range(steps):
        model(inputs_of(hocket.rank(), step)).backward()
        optimizer.step()
        optimizer.zero_grad()
    return flat(model.parameters()), owed(model)


def means(size: int, steps: int = STEPS) -> torch.Tensor:
    return sum((flat(inputs_of(rank, step)) for rank in range(size) for step in range(steps)), torch.zeros(1)) / size


@pytest.mark.few(14)
@product("codec", codec=CODECS, strategy=STRATEGIES, hosts=[(1, 1), (2, 2), (1, 1, 1), (3, 1)])
def test_what_was_sent_and_what_is_owed_is_all_there_was(
    pool: Pool, codec: str, strategy: str, hosts: tuple[int, ...]
) -> None:
    size = sum(hosts)
    found = pool.run(size, train, strategy, codec, hosts=hosts, transport="tcp")
    for parameters, rest in found:
        assert torch.equal(parameters, found[0][0])
        if not codec.startswith(UNBIASED):
            assert torch.allclose(-parameters / RATE + rest, means(size), rtol=1e-5, atol=1e-5)


def whole(case: Case, strategy: str, codec: str) -> Any:
    model, optimizer, loader = make(case, 1)
    distributed = hocket.distribute(model, optimizer, loader, strategy=strategy, codec=codec)
    return loop(case, *distributed, held=hocket.accumulate)


@product("codec", codec=["topk(1.0)", "randomk(1.0)"], strategy=STRATEGIES[:2], hosts=[(1, 1), (2, 1)])
def test_all_of_the_values_are_one_process(pool: Pool, codec: str, strategy: str, hosts: tuple[int, ...]) -> None:
    case = Case(options={"lr": 0.02, "momentum": 0.9}, clip=0.05, accumulate=2)
    found = pool.run(sum(hosts), whole, case, strategy, codec, hosts=hosts, transport="tcp")
    assert_equal(alone(case, sum(hosts)), found)


def saved(folder: str, codec: str, first: int, last: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Steps ``first`` to ``last``, from a checkpoint to a checkpoint."""
    model, optimizer = build("mirrored", codec)
    if first:
        hocket.load(folder, model=model, optimizer=optimizer)
    for step in range(first, last):
        model(inputs_of(hocket.rank(), step)).backward()
        optimizer.step()
        optimizer.zero_grad()
    hocket.save(folder, model=model, optimizer=optimizer).wait()
    hocket.barrier()
    return flat(model.parameters()), owed(model)


@pytest.mark.parametrize("codec", ["topk(0.1)", "int4", "qsgd(4)", "topk(0.05, warmup=6)"])
def test_a_checkpoint_has_what_is_owed(pool: Pool, tmp_path: Path, codec: str) -> None:
    two: dict[str, Any] = {"hosts": (1, 1), "transport": "tcp"}
    ((straight, rest), _) = pool.run(2, saved, str(tmp_path / "a"), codec, 0, 6, **two)
    pool.run(2, saved, str(tmp_path / "b"), codec, 0, 3, **two)
    ((again, _), _) = pool.run(2, saved, str(tmp_path / "b"), codec, 3, 6, **two)
    if codec == "qsgd(4)":  # owes nothing, and draws the same numbers
        assert torch.equal(straight, again)
        return
    sums = sum(flat(inputs_of(rank, step)) for rank in range(2) for step in range(6)) / 2
    assert torch.allclose(-straight / RATE + rest, sums, rtol=1e-5, atol=1e-5)
    three: dict[str, Any] = {"hosts": (2, 1), "transport": "tcp"}
    pool.run(2, saved, str(tmp_path / "c"), codec, 0, 3, **two)
    ((parameters, left), *_) = pool.run(3, saved, str(tmp_path / "c"), codec, 3, 6, **three)
    sums = sum(flat(inputs_of(rank, step)) for rank in range(2) for step in range(3)) / 2
    sums = sums + sum(flat(inputs_of(rank, step)) for rank in range(3) for step in range(3, 6)) / 3
    assert torch.allclose(-parameters / RATE + left, sums, rtol=1e-5, atol=1e-5)


def spoiled(strategy: str, codec: str) -> tuple[torch.Tensor, torch.Tensor]:
    """One rank has an infinity in step 3, which nobody takes."""
    model, optimizer = build(strategy, codec, on_nan="skip")
    for step in range(STEPS):
        x = inputs_of(hocket.rank(), step)
        if step == 3 and hocket.rank() == 1:
            x[1][5] = float("inf")
        model(x).backward()
        optimizer.step()
        optimizer.zero_grad()
    return flat(model.parameters()), owed(model)


@product("codec", codec=["fp16", "int8", "onebit", "topk(0.1)", "threshold(0.5)"], hosts=[(1, 1), (2, 1)])
def test_a_value_that_is_not_finite_spoils_nothing(pool: Pool, codec: str, hosts: tuple[int, ...]) -> None:
    size = sum(hosts)
    expected = means(size) - sum(flat(inputs_of(rank, 3)) for rank in range(size)) / size
    for parameters, rest in pool.run(size, spoiled, "mirrored", codec, hosts=hosts, transport="tcp"):
        assert torch.allclose(-parameters / RATE + rest, expected, rtol=1e-5, atol=1e-5)


def refused(strategy: str, codec: str, dtype: str = "float32") -> None:
    model = nn.Linear(3, 1, dtype=getattr(torch, dtype))
    hocket.distribute(model, torch.optim.SGD(model.parameters(), lr=0.1), strategy=strategy, codec=codec)


@pytest.mark.parametrize(
    ("strategy", "codec", "dtype", "words"),
    [
        ("local_sgd(period=4)", "int8", "float32", "it can with mirrored, central"),
        ("mirrored", "topk(0)", "float32", "density=0.0 must be more than 0"),
        ("mirrored", "gzip", "float32", "unknown codec 'gzip': the choices are fp16"),
        ("mirrored", "int8", "complex64", "'weight' is complex64"),
    ],
)
def test_what_makes_no_sense_is_refused(pool: Pool, strategy: str, codec: str, dtype: str, words: str) -> None:
    for outcome in pool.outcomes(2, refused, strategy, codec, dtype, hosts=(1, 1), transport="tcp"):
        assert isinstance(outcome, RemoteError) and words in outcome.message
    if dtype != "float32":
        return


def over_gloo(codec: str) -> None:
    train("mirrored", codec, 1)


def test_gloo_carries_no_codec(pool: Pool) -> None:
    for outcome in pool.outcomes(2, over_gloo, "int8", hosts=(1, 1), transport="gloo"):
        assert isinstance(outcome, RemoteError) and "--codec int8 and --transport gloo" in outcome.message


@pytest.mark.parametrize("codec", ["int8", "topk(0.2)"])
@pytest.mark.parametrize("phase", ["forward", "after"])
def test_the_others_go_on(pool: Pool, tmp_path: Path, codec: str, phase: str) -> None:
    deaths = {1: (3, phase)}
    found = pool.outcomes_with_death(
        3, test_regrouping.train, 1, str(tmp_path), deaths, on_loss="continue", check_replicas=1, codec=codec,
        hosts=(1, 1, 1), transport="tcp",
    )  # fmt: skip
    test_regrouping.check_counted(tmp_path, found, deaths, 3)


def test_a_lost_worker_is_replaced(pool: Pool, tmp_path: Path) -> None:
    found = pool.outcomes(
        3, test_newcomers.train, str(tmp_path), {1: (3, "forward")}, 0, "mirrored", replaced=[1],
        on_loss="replace", check_replicas=1, codec="topk(0.2)", transport="tcp",
    )  # fmt: skip
    test_newcomers.check(tmp_path, found, 3)
