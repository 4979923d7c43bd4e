"""What a plain script does with its model and optimizer works when they are distributed."""

import copy
import io
from typing import Any

import pytest
import torch
from pool import Pool
from strategies.training import Case, alone, assert_same_state, loop, make, make_model
from torch import nn

import hocket
from hocket.job.worker import current

STRATEGIES = ["mirrored", "central", "central(fused=True)"]
ADAM = Case(optimizer="Adam", options={"lr": 0.01})


def step(model: nn.Module, optimizer: torch.optim.Optimizer, x: torch.Tensor | None = None) -> None:
    random = torch.Generator().manual_seed(hocket.rank())
    x = torch.randn(4, 6, generator=random, dtype=torch.float64) if x is None else x
    optimizer.zero_grad()
    (model(x) ** 2).mean().backward()
    optimizer.step()


def gradients_are_private(strategy: str) -> None:
    model, optimizer, _ = make(Case(), 1)
    hocket.distribute(model, optimizer, strategy=strategy)
    x = torch.randn(4, 6, dtype=torch.float64)
    (model(x) ** 2).mean().backward()
    before = [p.grad.clone() for p in model.parameters() if p.grad is not None]
    everyone = [hocket.allgather(g) for g in before]
    assert all(torch.equal(g[0], g[-1]) for g in everyone), "not the same average everywhere"
    if hocket.rank() == 0:
        for p in model.parameters():
            assert p.grad is not None
            p.grad.fill_(7)
    hocket.barrier()
    if hocket.rank():
        assert all(
            torch.equal(p.grad, g) for p, g in zip(model.parameters(), before, strict=True) if p.grad is not None
        )
    hocket.barrier()


@pytest.mark.parametrize("workers", [2, 3])
@pytest.mark.parametrize("strategy", STRATEGIES[:2])
def test_gradients_are_private_to_the_worker(pool: Pool, workers: int, strategy: str) -> None:
    pool.run(workers, gradients_are_private, strategy)


def objects_stay(strategy: str) -> None:
    model, optimizer, loader = make(ADAM, 1)
    keys = list(model.state_dict())
    parameters = list(model.parameters())
    m, o, new = hocket.distribute(model, optimizer, loader, strategy=strategy)
    assert m is model and o is optimizer and type(o) is torch.optim.Adam
    assert new is not loader and new.dataset is loader.dataset and new.batch_size == loader.batch_size
    assert list(m.state_dict()) == keys
    assert all(a is b for a, b in zip(m.parameters(), parameters, strict=True))
    assert hocket.distribute(loader=loader).dataset is loader.dataset


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_model_and_optimizer_are_the_same_objects(pool: Pool, strategy: str) -> None:
    pool.run(2, objects_stay, strategy)


def save_on_rank_0(strategy: str) -> bytes | None:
    model, optimizer, loader = make(ADAM, 1)
    loop(ADAM, *hocket.distribute(model, optimizer, loader, strategy=strategy), held=hocket.accumulate)
    if hocket.rank() == 0:
        file = io.BytesIO()
        torch.save({"model": model.state_dict(), "optimizer": optimizer.state_dict()}, file)
        return file.getvalue()
    return None


def load_and_go_on(strategy: str, saved: bytes) -> dict[str, Any]:
    model, optimizer, loader = make(ADAM, 1)
    m, o, new = hocket.distribute(model, optimizer, loader, strategy=strategy)
    for name, part in torch.load(io.BytesIO(saved)).items():
        {"model": m, "optimizer": o}[name].load_state_dict(part)
    return loop(ADAM, m, o, new, held=hocket.accumulate)


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_checkpoints_are_plain_ones(pool: Pool, strategy: str) -> None:
    """Saved by rank 0 alone, in the plain size; loaded by a plain script, and back."""
    distributed = pool.run(3, save_on_rank_0, strategy)[0]
    model, optimizer, loader = make(ADAM, 3)
    loop(ADAM, model, optimizer, loader, held=None)
    plain = io.BytesIO()
    torch.save({"model": model.state_dict(), "optimizer": optimizer.state_dict()}, plain)
    assert abs(len(distributed) - len(plain.getvalue())) < 0.01 * len(distributed) + 2000
    loaded = torch.load(io.BytesIO(distributed))
    assert_same_state(optimizer.state_dict(), loaded["optimizer"], 1e-9)
    steps = [values["step"] for values in loaded["optimizer"]["state"].values()]
    assert len({s.data_ptr() for s in steps}) == len(steps), "parameters share one step count"
    # A plain script and a distributed one go on from it alike.
    again, other, loader = make(ADAM, 3)
    again.load_state_dict(loaded["model"])
    other.load_state_dict(loaded["optimizer"])
    one = loop(ADAM, again, other, loader, held=None)
    for result in pool.run(3, load_and_go_on, strategy, plain.getvalue()):
        for mine, theirs in zip(one["parameters"], result["parameters"], strict=True):
            assert torch.allclose(mine, theirs, rtol=1e-9, atol=1e-9)
        assert_same_state(one["state"], result["state"], 1e-9)


def average_accumulated(strategy: str) -> list[torch.Tensor]:
    model, optimizer, _ = make(Case(), 1)
    hocket.distribute(model, optimizer, strategy=strategy)
    for turn in range(3):
        random = torch.Generator().manual_seed(10 * turn + hocket.rank())
        x = torch.randn(2, 6, generator=random, dtype=torch.float64)
        loss = (model(x) ** 2).mean()
        if turn < 2:
            with hocket.accumulate(mean=True):
                loss.backward()
        else:
            loss.backward()
    optimizer.step()
    return [p.detach().clone() for p in model.parameters()]


@pytest.mark.parametrize("workers", [1, 2, 3])
@pytest.mark.parametrize("strategy", STRATEGIES)
def test_accumulation_can_average(pool: Pool, workers: int, strategy: str) -> None:
    model, optimizer, _ = make(Case(), 1)
    seeds = [10 * turn + rank for turn in range(3) for rank in range(workers)]
    parts = [torch.randn(2, 6, generator=torch.Generator().manual_seed(s), dtype=torch.float64) for s in seeds]
    (model(torch.cat(parts)) ** 2).mean().backward()
    optimizer.step()
    for result in pool.run(workers, average_accumulated, strategy):
        assert all(torch.allclose(a, b, rtol=1e-9) for a, b in zip(model.parameters(), result, strict=True))


def step_without_exchange() -> None:
    model, optimizer, _ = make(Case(), 1)
    hocket.distribute(model, optimizer)
    with hocket.accumulate():
        model(torch.ones(1, 6, dtype=torch.float64)).sum().backward()
    optimizer.step()


def test_a_step_on_gradients_that_were_never_exchanged_is_refused(pool: Pool) -> None:
    outcome = pool.outcomes(2, step_without_exchange)[0]
    assert outcome.kind == "UsageError" and "outside of it" in outcome.message


def unfreeze(strategy: str) -> list[torch.Tensor]:
    model, optimizer, _ = make(ADAM, 1)
    model[0].requires_grad_(False)  # type: ignore[index]
    hocket.distribute(model, optimizer, strategy=strategy)
    for turn in range(4):
        if turn == 2:
            model[0].requires_grad_(True)  # type: ignore[index]
        step(model, optimizer)
    return [p.detach().clone() for p in model.parameters()]


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_parameters_may_be_unfrozen_later(pool: Pool, strategy: str) -> None:
    model, optimizer, _ = make(ADAM, 1)
    model[0].requires_grad_(False)  # type: ignore[index]
    parts = [torch.randn(4, 6, generator=torch.Generator().manual_seed(r), dtype=torch.float64) for r in range(2)]
    for turn in range(4):
        if turn == 2:
            model[0].requires_grad_(True)  # type: ignore[index]
        optimizer.zero_grad()
        (model(torch.cat(parts)) ** 2).mean().backward()
        optimizer.step()
    for result in pool.run(2, unfreeze, strategy):
        assert all(torch.allclose(a, b, rtol=1e-9) for a, b in zip(model.parameters(), result, strict=True))


def survive_an_error(strategy: str) -> bool:
    """A backward pass that raises in the middle, on all ranks, does not spoil the next one."""

    class Trap(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
            return x.clone()

        @staticmethod
        def backward(ctx: Any, *gradients: Any) -> Any:
            raise ValueError("trap")

    model = make_model("mlp").double()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    hocket.distribute(model, optimizer, strategy=strategy)
    x = torch.randn(2, 6, dtype=torch.float64)
    hidden = Trap.apply(model[1](model[0](x)))  # type: ignore[index]
    with pytest.raises(ValueError, match="trap"):
        model[4](model[3](model[2](hidden))).sum().backward()  # type: ignore[index]
    step(model, optimizer)
    return all(torch.equal(t[0], t[1]) for t in map(hocket.allgather, model.parameters()))


@pytest.mark.parametrize("strategy", STRATEGIES[:2])
def test_an_error_in_backward_can_be_survived(pool: Pool, strategy: str) -> None:
    assert pool.run(2, survive_an_error, strategy) == [True, True]


def copy_the_model(strategy: str) -> None:
    model, optimizer, _ = make(ADAM, 1)
    hocket.distribute(model, optimizer, strategy=strategy)
    step(model, optimizer)
    average = torch.optim.swa_utils.AveragedModel(model)
    twin = copy.deepcopy(model)
    torch.save(model, io.BytesIO())
    # The copies train by themselves, on one rank only.
    if hocket.rank() == 0:
        twin(torch.ones(1, 6, dtype=torch.float64)).sum().backward()
    step(model, optimizer)
    average.update_parameters(model)
    assert not torch.equal(next(twin.parameters()), next(model.parameters()))


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_models_can_be_copied_and_averaged(pool: Pool, strategy: str) -> None:
    pool.run(2, copy_the_model, strategy)


def scale_gradients(strategy: str) -> list[float]:
    model, optimizer, _ = make(Case(dtype="float32"), 1)
    hocket.distribute(model, optimizer, strategy=strategy)
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**10)
    scales = []
    for turn in range(4):
        x = torch.randn(3, 6)
        if turn == 1 and hocket.rank() == 1:
            x[0, 0] = float("inf")  # one rank overflows, and all skip
        optimizer.zero_grad()
        scaler.scale((model(x) ** 2).mean()).backward()
        scaler.unscale_(optimizer)
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        scaler.step(optimizer)
        scaler.update()
        scales.append(scaler.get_scale())
    assert all(bool(torch.isfinite(p).all()) for p in model.parameters())
    return scales


@pytest.mark.parametrize("strategy", STRATEGIES[:2])
def test_grad_scaler_probes_undisturbed(pool: Pool, strategy: str) -> None:
    results = pool.run(2, scale_gradients, strategy)
    assert results[0] == results[1] and results[0][0] == 2.0**10 and results[0][1] == 2.0**9


def closures(strategy: str, name: str) -> list[torch.Tensor]:
    model, _, _ = make(Case(), 1)
    optimizer = getattr(torch.optim, name)(model.parameters(), lr=0.1)
    hocket.distribute(model, optimizer, strategy=strategy)
    random = torch.Generator().manual_seed(hocket.rank())
    x = torch.randn(4, 6, generator=random, dtype=torch.float64)

    def closure() -> torch.Tensor:
        optimizer.zero_grad()
        loss = hocket.allreduce((model(x) ** 2).mean())  # for L-BFGS, which compares losses
        local = (model(x) ** 2).mean()
        local.backward()
        return loss

    for _ in range(2):
        assert float(optimizer.step(closure)) > 0
    return [p.detach().clone() for p in model.parameters()]


@pytest.mark.parametrize(("strategy", "name"), [*((s, "SGD") for s in STRATEGIES), ("mirrored", "LBFGS")])
def test_closures(pool: Pool, strategy: str, name: str) -> None:
    model, _, _ = make(Case(), 1)
    optimizer = getattr(torch.optim, name)(model.parameters(), lr=0.1)
    parts = [torch.randn(4, 6, generator=torch.Generator().manual_seed(r), dtype=torch.float64) for r in range(2)]

    def closure() -> torch.Tensor:
        optimizer.zero_grad()
        loss = (model(torch.cat(parts)) ** 2).mean()
        loss.backward()
        return loss

    for _ in range(2):
        optimizer.step(closure)
    for result in pool.run(2, closures, strategy, name):
        assert all(torch.allclose(a, b, rtol=1e-7) for a, b in zip(model.parameters(), result, strict=True))


def buffers_and_scheduler_built_before() -> None:
    model = nn.Sequential(nn.Linear(6, 6), nn.BatchNorm1d(6), nn.Linear(6, 1))
    model[1].running_mean.fill_(hocket.rank() + 1.0)  # type: ignore[union-attr, operator]
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.5)
    hocket.distribute(model, optimizer, strategy="central")
    assert float(model[1].running_mean[0]) == 1.0  # type: ignore[union-attr, index]
    step(model, optimizer, torch.randn(4, 6))
    scheduler.step()
    assert optimizer.param_groups[0]["lr"] == 0.5
    torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.5)


def test_buffers_start_equal_and_schedulers_may_be_older(pool: Pool) -> None:
    pool.run(2, buffers_and_scheduler_built_before)


def one_copy() -> tuple[list[bool], int]:
    """Whether parameters and state of all ranks are the same memory: what one writes, all see."""
    model, optimizer, loader = make(ADAM, 1)
    loop(ADAM, *hocket.distribute(model, optimizer, loader, strategy="central"), held=hocket.accumulate)
    tensors = [p.detach() for p in model.parameters()]
    tensors += [optimizer.state[p][key] for p in model.parameters() for key in ("exp_avg", "exp_avg_sq")]
    hocket.barrier()
    if hocket.rank() == 1:
        for tensor in tensors:
            tensor.fill_(42)
    hocket.barrier()
    return [bool((tensor == 42).all()) for tensor in tensors], len(current().training.strategies)


def test_central_keeps_one_copy_of_parameters_and_state(pool: Pool) -> None:
    for seen, _ in pool.run(3, one_copy):
        assert all(seen)


class Halver(torch.optim.Optimizer):
    """An optimizer of the user's own, with a Python number in its state and a tensor that it replaces."""

    def __init__(self, parameters: Any, lr: float, coupled: bool = False) -> None:
        super().__init__(parameters, {"lr": lr})
        self.coupled = coupled

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        parameters = [p for group in self.param_groups for p in group["params"] if p.grad is not None]
        norm = torch.stack([p.grad.norm() for p in parameters]).norm() if self.coupled else 1.0
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is not None:
                    state = self.state[p]
                    state["count"] = state.get("count", 0) + 1
                    state["memory"] = 0.5 * state.get("memory", 0.0) + p.grad
                    p -= group["lr"] / state["count"] * state["memory"] / norm


def own_optimizer(strategy: str, coupled: bool) -> dict[str, Any]:
    model = make_model("mlp").double()
    optimizer = Halver(model.parameters(), 0.1, coupled)
    hocket.distribute(model, optimizer, strategy=strategy)
    for _ in range(3):
        step(model, optimizer)
    return {"parameters": [p.detach().clone() for p in model.parameters()], "state": optimizer.state_dict()}


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_an_optimizer_of_the_users_own(pool: Pool, strategy: str) -> None:
    model = make_model("mlp").double()
    optimizer = Halver(model.parameters(), 0.1)
    parts = [torch.randn(4, 6, generator=torch.Generator().manual_seed(r), dtype=torch.float64) for r in range(2)]
    for _ in range(3):
        optimizer.zero_grad()
        (model(torch.cat(parts)) ** 2).mean().backward()
        optimizer.step()
    for result in pool.run(2, own_optimizer, strategy, False):
        assert all(
            torch.allclose(a, b, rtol=1e-9) for a, b in zip(model.parameters(), result["parameters"], strict=True)
        )
        assert_same_state(optimizer.state_dict(), result["state"], 1e-9)


def test_an_optimizer_that_couples_parameters_is_refused_by_central(pool: Pool) -> None:
    outcome = pool.outcomes(2, own_optimizer, "central", True)[0]
    assert outcome.kind == "StrategyError" and "depends on the other parameters" in outcome.message
    pool.run(2, own_optimizer, "mirrored", True)


def test_alone_nothing_is_added(pool: Pool) -> None:
    pool.run(1, nothing_added)


def nothing_added() -> None:
    model, optimizer, loader = make(Case(), 1)
    m, o, new = hocket.distribute(model, optimizer, loader, strategy="central(fused=True)")
    assert new.dataset is loader.dataset and new.weight == 1.0 and "step" not in vars(o) and not m._forward_hooks
    assert current().training.strategies == []
    assert alone(Case(), 1)["norms"] == []
