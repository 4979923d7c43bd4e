"""What real scripts do around a training loop gives the numbers of one process with the batch of all workers.

Each script is one function, run alone and by every worker; its last batch leaves a worker without a sample.
"""

import math
import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from pool import Pool, RemoteError
from strategies.training import assert_same_state
from torch import nn
from torch.nn import functional as F
from torch.optim import lr_scheduler as schedulers
from torch.optim import swa_utils
from torch.utils.data import DataLoader, TensorDataset

import hocket

STRATEGIES = ["mirrored", "central", "central(fused=True)"]
AVERAGED = STRATEGIES[:2]  # those that make the average that clipping and GradScaler need
WORKERS = 3
REFUSED = "needs the averaged gradient, which strategy 'central(fused=True)' never makes"


@dataclass(frozen=True)
class World:
    """Where a script runs: by itself if there is no strategy."""

    strategy: str | None = None

    def distribute(self, *things: Any, training: bool | None = None) -> Any:
        if self.strategy is None:
            return things[0] if len(things) == 1 else things
        return hocket.distribute(*things, strategy=self.strategy, training=training)

    def sync_batchnorm(self, model: nn.Module) -> nn.Module:
        return model if self.strategy is None else hocket.sync_batchnorm(model)

    def loader(self, dtype: torch.dtype = torch.float64) -> DataLoader[Any]:
        random = torch.Generator().manual_seed(1)
        x = torch.randn(20, 6, generator=random, dtype=torch.float64)
        y = torch.sin(x.sum(1, keepdim=True))
        return DataLoader(
            TensorDataset(x.to(dtype), y.to(dtype)), 3 * (WORKERS if self.strategy is None else 1), shuffle=True,
            generator=torch.Generator().manual_seed(2),
        )  # fmt: skip

    def mean(self, value: torch.Tensor, loader: Any) -> torch.Tensor:
        """A loss over the samples of all workers, as a script computes it to show it."""
        return value.detach() if self.strategy is None else hocket.allreduce(value.detach() * loader.weight)


def mlp(dtype: torch.dtype = torch.float64, *, norm: bool = False) -> nn.Sequential:
    torch.manual_seed(0)
    # A bias before batch norm has gradient 0, of which Adam would make steps out of rounding errors.
    first = [nn.Linear(6, 8, bias=False), nn.BatchNorm1d(8)] if norm else [nn.Linear(6, 8)]
    layers = [*first, nn.Tanh(), nn.Linear(8, 8), nn.Tanh()]
    return nn.Sequential(*layers, nn.Linear(8, 1)).to(dtype)


def make_optimizer(name: str, model: nn.Module) -> torch.optim.Optimizer:
    if name == "Adam":
        return torch.optim.Adam(model.parameters(), lr=0.02)
    rate: Any = torch.tensor(0.05) if name == "tensor rate" else 0.05
    return torch.optim.SGD(model.parameters(), lr=rate, momentum=0.8)


def parameters(model: nn.Module) -> list[torch.Tensor]:
    return [tensor.detach().clone() for tensor in model.state_dict().values()]


def assert_close(one: Any, many: Any, tolerance: float) -> None:
    """Compares nested results: tensors and numbers to ``tolerance``, the rest exactly."""
    assert type(one) is type(many)
    if isinstance(one, torch.Tensor):
        assert torch.allclose(one.double(), many.double(), rtol=tolerance, atol=tolerance), (one - many).abs().max()
    elif isinstance(one, float):
        assert math.isclose(one, many, rel_tol=tolerance, abs_tol=tolerance)
    elif isinstance(one, dict) and "param_groups" in one:
        assert_same_state(one, many, tolerance)
    elif isinstance(one, list | tuple):
        assert len(one) == len(many)
        for mine, theirs in zip(one, many, strict=True):
            assert_close(mine, theirs, tolerance)
    else:
        assert one == many


def check(
    pool: Pool, script: Callable[..., Any], *args: Any, strategies: list[str] = STRATEGIES, tolerance: float = 1e-9
) -> None:
    one = script(World(), *args)
    for strategy in strategies:
        for many in pool.run(WORKERS, script, World(strategy), *args):
            assert_close(one, many, tolerance)


def check_refused(pool: Pool, script: Callable[..., Any], strategy: str, line: str, *args: Any) -> None:
    for outcome in pool.outcomes(WORKERS, script, World(strategy), *args):
        assert isinstance(outcome, RemoteError) and outcome.kind == "StrategyError" and line in outcome.message


# Schedulers

Make = Callable[[Any], schedulers.LRScheduler]
SCHEDULERS: dict[str, Make] = {
    "LambdaLR": lambda o: schedulers.LambdaLR(o, lambda t: 0.9**t),
    "MultiplicativeLR": lambda o: schedulers.MultiplicativeLR(o, lambda t: 0.9),
    "StepLR": lambda o: schedulers.StepLR(o, 2, 0.5),
    "MultiStepLR": lambda o: schedulers.MultiStepLR(o, [1, 3], 0.5),
    "ConstantLR": lambda o: schedulers.ConstantLR(o, 0.5, total_iters=2),
    "LinearLR": lambda o: schedulers.LinearLR(o, 0.2, total_iters=4),
    "ExponentialLR": lambda o: schedulers.ExponentialLR(o, 0.9),
    "SequentialLR": lambda o: schedulers.SequentialLR(
        o, [schedulers.LinearLR(o, 0.2, total_iters=2), schedulers.ExponentialLR(o, 0.9)], [2]
    ),
    "CosineAnnealingLR": lambda o: schedulers.CosineAnnealingLR(o, 5),
    "ChainedScheduler": lambda o: schedulers.ChainedScheduler(
        [schedulers.ConstantLR(o, 0.5, total_iters=2), schedulers.ExponentialLR(o, 0.9)], o
    ),
    "ReduceLROnPlateau": lambda o: schedulers.ReduceLROnPlateau(o, patience=0, factor=0.5, threshold=0.2),
    "CyclicLR": lambda o: schedulers.CyclicLR(o, 0.01, 0.08, step_size_up=2),
    "CosineAnnealingWarmRestarts": lambda o: schedulers.CosineAnnealingWarmRestarts(o, 2),
    "OneCycleLR": lambda o: schedulers.OneCycleLR(o, 0.1, total_steps=20),
    "PolynomialLR": lambda o: schedulers.PolynomialLR(o, 6, 2.0),
    "SWALR": lambda o: swa_utils.SWALR(o, 0.01, anneal_epochs=3),
}


def known_schedulers(kind: type) -> Iterator[str]:
    for derived in kind.__subclasses__():
        yield from known_schedulers(derived)
        if derived.__module__.startswith("torch.optim") and not derived.__name__.startswith("_"):
            yield derived.__name__


def test_every_scheduler_is_tried() -> None:
    assert set(known_schedulers(schedulers.LRScheduler)) == SCHEDULERS.keys()
    assert set(schedulers.__all__) - {"LRScheduler"} <= SCHEDULERS.keys()


def schedule(world: World, name: str, optimizer_name: str) -> list[Any]:
    """Stepped per batch and per epoch, built before and after; rates, momenta and warnings included."""
    results: list[Any] = []
    for per_batch in (True, False):
        for before in (True, False):
            with warnings.catch_warnings(record=True) as caught:
                warnings.simplefilter("always")
                results.append(_schedule(world, name, optimizer_name, per_batch, before))
            results.append(sorted({str(warning.message) for warning in caught}))
    return results


def _schedule(world: World, name: str, optimizer_name: str, per_batch: bool, before: bool) -> list[Any]:
    model, history = mlp(), []
    optimizer = make_optimizer(optimizer_name, model)
    scheduler = SCHEDULERS[name](optimizer) if before else None
    model, optimizer, loader = world.distribute(model, optimizer, world.loader())
    scheduler = scheduler or SCHEDULERS[name](optimizer)
    for _ in range(3):
        total = torch.zeros((), dtype=torch.float64)
        for x, y in loader:
            optimizer.zero_grad()
            loss = F.mse_loss(model(x), y)
            loss.backward()
            optimizer.step()
            shown = world.mean(loss, loader)
            total += shown
            if per_batch:
                scheduler.step(*([shown] if name == "ReduceLROnPlateau" else []))
            group = optimizer.param_groups[0]
            history.append((float(group["lr"]), group.get("momentum"), group.get("betas")))
        if not per_batch:
            scheduler.step(*([total] if name == "ReduceLROnPlateau" else []))
    assert len({rate for rate, *_ in history}) > 1, "the scheduler did nothing"
    return [parameters(model), optimizer.state_dict(), history]


@pytest.mark.few(6)
@pytest.mark.parametrize("name", SCHEDULERS)
def test_every_scheduler(pool: Pool, name: str) -> None:
    check(pool, schedule, name, "SGD")


@pytest.mark.parametrize("name", ["CyclicLR", "OneCycleLR"])
def test_betas_are_cycled(pool: Pool, name: str) -> None:
    check(pool, schedule, name, "Adam")


@pytest.mark.parametrize("name", ["StepLR", "OneCycleLR"])
def test_a_rate_that_is_a_tensor(pool: Pool, name: str) -> None:
    check(pool, schedule, name, "tensor rate")


# Loops of one model


def loop(world: World, what: str) -> list[Any]:
    model = mlp()
    optimizer = make_optimizer("SGD", model)
    if what == "groups":
        optimizer = torch.optim.SGD(model[0].parameters(), lr=0.1, momentum=0.9)
        optimizer.add_param_group({"params": [model[2].weight], "lr": 0.01, "weight_decay": 0.1, "nesterov": True})
        optimizer.add_param_group({"params": [model[2].bias, model[4].bias], "momentum": 0.0, "maximize": True})
        model[4].weight.requires_grad_(False)  # is in no group either
    if what == "compiled before":
        model = torch.compile(model, backend="aot_eager")  # type: ignore[assignment]
    model, optimizer, loader = world.distribute(model, optimizer, world.loader())
    if what == "compiled in place":
        model.compile(backend="aot_eager")
    forward = torch.compile(model, backend="aot_eager") if what == "compiled" else model
    norms = []
    for _ in range(3):
        for x, y in loader:
            optimizer.zero_grad()
            F.mse_loss(forward(x), y).backward()
            if what == "clip by norm":
                norms.append(float(nn.utils.clip_grad_norm_(model.parameters(), 0.1)))
            if what == "clip by value":
                nn.utils.clip_grad_value_(model.parameters(), 0.02)
            optimizer.step()
    return [parameters(model), optimizer.state_dict(), norms]


@pytest.mark.few(2)
@pytest.mark.parametrize("what", ["plain", "groups", "compiled", "compiled before", "compiled in place"])
def test_loops(pool: Pool, what: str) -> None:
    check(pool, loop, what)


@pytest.mark.parametrize("what", ["clip by norm", "clip by value"])
def test_clipping(pool: Pool, what: str) -> None:
    check(pool, loop, what, strategies=AVERAGED)
    check_refused(pool, loop, STRATEGIES[2], REFUSED, what)


def closures(world: World, name: str) -> list[Any]:
    model = mlp()
    options: dict[str, Any] = {"line_search_fn": "strong_wolfe"} if name == "LBFGS with line search" else {}
    optimizer: Any = make_optimizer("SGD", model)
    if name != "SGD":
        optimizer = torch.optim.LBFGS(model.parameters(), lr=0.2, max_iter=3, history_size=3, **options)
    model, optimizer, loader = world.distribute(model, optimizer, world.loader())
    losses = []
    for _ in range(2):
        for x, y in loader:

            def closure(x: torch.Tensor = x, y: torch.Tensor = y) -> torch.Tensor:
                optimizer.zero_grad()
                loss = F.mse_loss(model(x), y)
                loss.backward()
                return loss

            losses.append(float(optimizer.step(closure).detach()))
    return [parameters(model), losses]


def test_sgd_with_a_closure(pool: Pool) -> None:
    check(pool, closures, "SGD")


@pytest.mark.parametrize("name", ["LBFGS", "LBFGS with line search"])
def test_lbfgs(pool: Pool, name: str) -> None:
    check(pool, closures, name, strategies=["mirrored"], tolerance=1e-7)  # it divides by small differences
    for strategy in STRATEGIES[1:]:
        check_refused(pool, closures, strategy, "cannot divide LBFGS: it evaluates", name)


# Mixed precision


def scale(world: World, poisoned: bool, clip: str) -> list[Any]:
    model = mlp(torch.float32)
    model, optimizer, loader = world.distribute(model, make_optimizer("SGD", model), world.loader(torch.float32))
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**12, growth_interval=4)
    scales: list[Any] = []
    for epoch in range(2):
        for turn, (x, y) in enumerate(loader):
            if poisoned and epoch == 0 and turn == 1 and (world.strategy is None or hocket.rank() == 1):
                x = x.index_fill(0, torch.tensor([0]), math.inf)
            before = parameters(model)
            optimizer.zero_grad()
            with torch.autocast("cpu", torch.bfloat16):
                loss = F.mse_loss(model(x), y)
            scaler.scale(loss).backward()
            if clip:
                scaler.unscale_(optimizer)
            if clip == "norm":
                nn.utils.clip_grad_norm_(model.parameters(), 0.1)
            elif clip == "value":
                nn.utils.clip_grad_value_(model.parameters(), 0.02)
            scaler.step(optimizer)
            scaler.update()
            moved = any(not torch.equal(a, b) for a, b in zip(before, parameters(model), strict=True))
            scales.append((moved, str(scaler.get_scale())))
    assert all(bool(tensor.isfinite().all()) for tensor in parameters(model))
    assert [moved for moved, _ in scales].count(False) == poisoned
    return [parameters(model), scales]


@pytest.mark.parametrize("clip", ["", "norm", "value"])
@pytest.mark.parametrize("poisoned", [False, True])
def test_scaled_gradients(pool: Pool, poisoned: bool, clip: str) -> None:
    """An overflow on one rank skips the step and halves the scale on all."""
    check(pool, scale, poisoned, clip, strategies=AVERAGED, tolerance=0.02)  # bfloat16


def test_scaled_gradients_are_refused_where_there_is_no_average(pool: Pool) -> None:
    check_refused(pool, scale, STRATEGIES[2], REFUSED, False, "")


# Averages of models


def average(world: World, kind: str, before: bool) -> list[Any]:
    model = world.sync_batchnorm(mlp(norm=True))
    options: dict[str, Any] = {"use_buffers": kind == "ema buffers"}
    if kind != "swa":
        options["multi_avg_fn"] = swa_utils.get_ema_multi_avg_fn(0.7)
    averaged = swa_utils.AveragedModel(model, **options) if before else None
    # Ranks must be in step in update_bn(), too, although that computes no gradients.
    model, optimizer, loader = world.distribute(model, make_optimizer("SGD", model), world.loader(), training=True)
    averaged = averaged or swa_utils.AveragedModel(model, **options)
    for _ in range(2):
        for x, y in loader:
            optimizer.zero_grad()
            F.mse_loss(model(x), y).backward()
            optimizer.step()
            averaged.update_parameters(model)
    if kind != "ema buffers":
        swa_utils.update_bn(loader, averaged)
    with torch.no_grad():
        output = averaged.eval()(torch.linspace(-1, 1, 12, dtype=torch.float64).view(2, 6))
    return [parameters(model), parameters(averaged), output]


@pytest.mark.few(2)
@pytest.mark.parametrize("before", [True, False], ids=["before", "after"])
@pytest.mark.parametrize("kind", ["swa", "ema", "ema buffers"])
def test_averaged_models(pool: Pool, kind: str, before: bool) -> None:
    check(pool, average, kind, before)


# Two models


def adversaries(world: World, what: str) -> list[Any]:
    """The discriminator takes two backward passes, the generator one through the discriminator."""
    norm = what == "batch norm"
    generator = world.sync_batchnorm(nn.Sequential(mlp(norm=norm)[:-1], nn.Linear(8, 7, dtype=torch.float64)))
    judge = world.sync_batchnorm(nn.Sequential(nn.Linear(7, 6, dtype=torch.float64), *mlp(norm=norm)))
    making = torch.optim.Adam(generator.parameters(), lr=0.01, betas=(0.5, 0.999))
    judging = torch.optim.Adam(judge.parameters(), lr=0.01, betas=(0.5, 0.999))
    generator, making = world.distribute(generator, making)
    judge, judging, loader = world.distribute(judge, judging, world.loader())
    losses = []
    for _ in range(2):
        for x, y in loader:
            real, noise = torch.cat([x, y], 1), torch.sin(7 * x)
            ones, zeros = torch.ones_like(y), torch.zeros_like(y)
            judging.zero_grad()
            loss_real = F.binary_cross_entropy_with_logits(judge(real), ones)
            loss_real.backward()
            fake = generator(noise)
            loss_fake = F.binary_cross_entropy_with_logits(judge(fake.detach()), zeros)
            if what == "penalty":  # of Gulrajani et al. 2017: a gradient of a gradient
                between = (0.3 * real + 0.7 * fake.detach()).requires_grad_()
                (slope,) = torch.autograd.grad(judge(between).sum(), between, create_graph=True)
                loss_fake = loss_fake + ((slope.norm(dim=1) - 1) ** 2).mean()
            loss_fake.backward()
            judging.step()
            if what == "frozen judge":
                judge.requires_grad_(False)
            making.zero_grad()
            loss = F.binary_cross_entropy_with_logits(judge(fake), ones)
            loss.backward()
            making.step()
            judge.requires_grad_(True)
            losses += [float(world.mean(value, loader)) for value in (loss_real, loss_fake, loss)]
    return [parameters(generator), parameters(judge), losses, making.state_dict(), judging.state_dict()]


@pytest.mark.few(2)
@pytest.mark.parametrize("what", ["plain", "frozen judge", "batch norm", "penalty"])
def test_adversaries(pool: Pool, what: str) -> None:
    check(pool, adversaries, what)
