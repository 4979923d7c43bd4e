"""The law of delayed gradients: w(j+1) = w(j) − η·g(w(j−1)), for every optimizer; nothing is lost."""

import contextlib
import io
import os
import re
import signal
from pathlib import Path
from typing import Any

import pytest
import torch
from pool import Pool, RemoteError
from strategies.training import Case, Result, alone, assert_equal, make, together
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import hocket
from hocket.job.worker import current
from hocket.strategies.delayed import DelayedTraining
from job.test_checkpoint import train

MOMENTUM = {"lr": 0.02, "momentum": 0.9, "nesterov": True, "weight_decay": 0.01}
ADAM: dict[str, Any] = {"optimizer": "Adam", "options": {"lr": 0.01, "weight_decay": 0.1}}


def delayed(case: Case, workers: int) -> Result:
    """What one plain process does, with the batch of all workers and each gradient applied one step late."""
    model, optimizer, loader = make(case, workers)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 3, 0.5) if case.schedule else None
    late: list[torch.Tensor | None] = []

    def apply() -> None:
        for parameter, gradient in zip(model.parameters(), late, strict=False):
            parameter.grad = gradient
        if late:
            optimizer.step()
        optimizer.zero_grad()

    for _ in range(case.epochs):
        for step, (x, y) in enumerate(loader, start=1):
            ((model(x) - y) ** 2).mean().backward()
            if step % case.accumulate and step < len(loader):
                continue
            own = [parameter.grad for parameter in model.parameters()]
            apply()
            late = own
            if scheduler is not None:
                scheduler.step()
        apply()  # at the end of the epoch
        late = []
    return {
        "parameters": [p.detach().clone() for p in model.parameters()],
        "state": optimizer.state_dict(),
        "norms": [],
        "strides": [p.stride() for p in model.parameters()],
    }


@pytest.mark.few(3)
@pytest.mark.parametrize(
    ("workers", "hosts", "more"),
    [
        (1, None, {"options": MOMENTUM}),
        (2, None, {"options": MOMENTUM, "zero": True}),
        (3, None, ADAM),
        (3, [1, 1, 1], {"options": MOMENTUM, "schedule": True}),
        (3, [2, 1], {**ADAM, "groups": True}),
        (2, None, {**ADAM, "accumulate": 3, "samples": 50, "schedule": True}),
        (3, None, {"model": "sometimes", "options": MOMENTUM}),  # gradients on some ranks only
        (3, [2, 1], {"model": "tied", **ADAM}),
        (2, None, {"model": "channels_last", **ADAM, "samples": 3}),  # one batch, and a repeated one
    ],
)
def test_every_gradient_is_applied_one_step_late(
    pool: Pool, workers: int, hosts: list[int] | None, more: dict[str, Any]
) -> None:
    case = Case(**more)
    assert_equal(delayed(case, workers), pool.run(workers, together, case, "delayed", hosts=hosts, check_replicas=1))


def test_in_phases(pool: Pool) -> None:
    case = Case(options=MOMENTUM, samples=48)
    assert_equal(delayed(case, 2), pool.run(2, together, case, "delayed -> mirrored @ epoch 3"))
    mixed = pool.run(2, together, case, "mirrored -> delayed @ epoch 2 -> local_sgd(period=1) @ epoch 3")
    assert_equal(mixed[0], mixed)
    assert not all(map(torch.equal, mixed[0]["parameters"], alone(case, 2)["parameters"]))


@pytest.mark.few(1)
@pytest.mark.parametrize(("size", "hosts", "stop"), [(2, None, 8), (3, [2, 1], 5), (1, None, 11)])
def test_a_checkpoint_keeps_the_gradient_that_is_under_way(
    pool: Pool, tmp_path: Path, size: int, hosts: list[int] | None, stop: int
) -> None:
    whole = pool.run(size, train, "shuffled", 0, "delayed", hosts=hosts)
    settings: dict[str, Any] = {"checkpoint": str(tmp_path), "checkpoint_every": 3, "hosts": hosts}
    pool.run(size, train, "shuffled", 0, "delayed", stop, **settings)
    rest = pool.run(size, train, "shuffled", 0, "delayed", **settings)
    assert rest[0][2] == (stop - 2) // 3 * 3  # a step less than batches
    assert [result[1] for result in rest] == [result[1] for result in whole]


def adversarial() -> list[list[float]]:
    """Two networks, of which one gets gradients in the other's backward pass and throws them away."""
    torch.manual_seed(0)
    maker, judge = nn.Linear(2, 2).double(), nn.Linear(2, 1).double()
    first, second = (torch.optim.SGD(model.parameters(), lr=0.1) for model in (maker, judge))
    hocket.distribute(maker, first, strategy="delayed")
    hocket.distribute(judge, second, strategy="delayed")
    loader = hocket.distribute(loader=DataLoader(TensorDataset(torch.eye(8, 2).double()), 2))
    for (x,) in loader:
        judge.zero_grad()
        judge(x).mean().backward()
        (-judge(maker(x).detach()).mean()).backward()
        second.step()
        maker.zero_grad()
        judge(maker(x)).mean().backward()
        first.step()
    return [[float(value) for value in p.detach().flatten()] for p in [*maker.parameters(), *judge.parameters()]]


def adversarial_by_hand() -> list[list[float]]:
    torch.manual_seed(0)
    maker, judge = nn.Linear(2, 2).double(), nn.Linear(2, 1).double()
    late: list[Any] = [[], []]

    def apply(which: int, model: nn.Module, fresh: list[Any]) -> None:
        with torch.no_grad():
            for parameter, gradient in zip(model.parameters(), late[which], strict=False):
                parameter -= 0.1 * gradient
        late[which] = fresh

    for x in torch.eye(8, 2).double().split(4):
        loss = judge(x).mean() - judge(maker(x).detach()).mean()
        apply(1, judge, list(torch.autograd.grad(loss, list(judge.parameters()))))
        apply(0, maker, list(torch.autograd.grad(judge(maker(x)).mean(), list(maker.parameters()))))
    apply(0, maker, [])
    apply(1, judge, [])
    return [[float(value) for value in p.detach().flatten()] for p in [*maker.parameters(), *judge.parameters()]]


def test_gradients_that_are_thrown_away_are_not_sent(pool: Pool) -> None:
    for result in pool.run(2, adversarial):
        for mine, theirs in zip(adversarial_by_hand(), result, strict=True):
            assert mine == pytest.approx(theirs, abs=1e-12)


def left_loops() -> list[float]:
    """Loops that are left after one batch are no glances."""
    model = nn.Linear(1, 1, bias=False).double()
    nn.init.zeros_(model.weight)
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    data = DataLoader(TensorDataset(torch.arange(1.0, 9.0).double().view(-1, 1)), 2)
    model, optimizer, loader = hocket.distribute(model, optimizer, data, strategy="delayed")
    next(iter(loader))
    seen = []
    for _ in range(2):
        for (x,) in loader:
            model(x).mean().backward()
            optimizer.step()
            optimizer.zero_grad()
            break
        hocket.barrier()  # the next call that all ranks make
        seen.append(float(model.weight))
    (strategy,) = current().training.strategies
    assert not strategy.holds and strategy.steps == 2 == current().training.counts.step
    return seen


def test_what_is_under_way_is_applied_when_a_loop_is_left(pool: Pool) -> None:
    assert pool.run(2, left_loops) == [[-2.5, -5.0]] * 2


def scaled(inf_at: int | None, fused: bool) -> list[list[float]]:
    """With a GradScaler that finds an infinite gradient on one rank."""
    torch.manual_seed(0)
    model = nn.Linear(2, 1)
    optimizer = torch.optim.Adam(model.parameters(), lr=0.1, fused=fused)
    loader = DataLoader(TensorDataset(torch.arange(16.0).view(8, 2)), 1)
    model, optimizer, loader = hocket.distribute(model, optimizer, loader, strategy="delayed")
    scaler = torch.amp.GradScaler("cpu", init_scale=16.0)
    seen = []
    for step, (x,) in enumerate(loader):
        optimizer.zero_grad()
        loss = scaler.scale(model(x).sum())
        (loss * float("inf") if step == inf_at and hocket.rank() == 1 else loss).backward()
        assert inf_at is not None or float(model.bias.grad) == 16.0  # this worker's own, as the script knows it
        if step == 3:
            scaler.unscale_(optimizer)
            nn.utils.clip_grad_norm_(model.parameters(), 1e6)
        scaler.step(optimizer)
        scaler.update()
        seen.append([float(model.weight[0, 0]), float(model.bias)])
    seen.append([float(model.weight[0, 0]), float(model.bias)])
    assert scaler.get_scale() == (8.0 if inf_at is not None and hocket.rank() == 1 else 16.0)
    return seen


@pytest.mark.parametrize("fused", [False, True])
def test_grad_scaler(pool: Pool, fused: bool) -> None:
    fine, skipped = pool.run(2, scaled, None, fused), pool.run(2, scaled, 1, fused)
    assert fine[0] == fine[1] and skipped[0] == skipped[1]
    assert fine[0][0] == skipped[0][0] != fine[0][1] == skipped[0][1]  # the first step changes nothing
    assert skipped[0][2] == skipped[0][1]  # what was infinite was not applied, by nobody
    assert fine[0][4][1] == pytest.approx(fine[0][0][1] - 0.4, abs=1e-4)  # a step of Adam for each of four batches
    assert skipped[0][4] != skipped[0][3] != skipped[0][2]


def with_nan() -> int:
    model = nn.Linear(2, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    hocket.distribute(model, optimizer, strategy="delayed")
    (strategy,) = current().training.strategies
    assert isinstance(strategy, DelayedTraining)
    for step in range(4):
        optimizer.zero_grad()
        x = torch.full((1, 2), float("nan") if step == 1 and hocket.rank() == 1 else 1.0)
        model(x).sum().backward()
        optimizer.step()
        assert bool(torch.isfinite(model.weight).all())
    return strategy.skipped


def test_gradients_that_are_not_finite(pool: Pool) -> None:
    assert pool.run(2, with_nan, on_nan="skip") == [1, 1]
    for outcome in pool.outcomes(2, with_nan, on_nan="raise"):
        assert outcome.kind == "NonFiniteError" and "rank 1: 'weight'" in outcome.message


def with_closure() -> list[float]:
    model = nn.Linear(1, 1, bias=False)
    nn.init.zeros_(model.weight)
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    hocket.distribute(model, optimizer, strategy="delayed")
    seen = []
    for step in range(3):

        def closure(step: int = step) -> torch.Tensor:
            optimizer.zero_grad()
            loss = model(torch.full((1, 1), 10.0**step * (1 + hocket.rank()))).sum()
            loss.backward()
            return loss

        optimizer.step(closure)
        seen.append(float(model.weight))
    return seen


def test_closures(pool: Pool) -> None:
    assert pool.run(2, with_closure) == [[0.0, -1.5, -16.5]] * 2


def die_under_way() -> None:
    model = nn.Linear(200, 200)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    hocket.distribute(model, optimizer, strategy="delayed")
    for step in range(4):
        optimizer.zero_grad()
        model(torch.rand(2, 200)).sum().backward()
        if step == 2 and hocket.rank() == 1:
            os.kill(os.getpid(), signal.SIGKILL)  # the others send theirs, and go on
        optimizer.step()


@pytest.mark.few(1)
@pytest.mark.parametrize("hosts", [None, [1, 1, 1]])
def test_the_death_of_a_peer_ends_what_is_under_way(pool: Pool, hosts: list[int] | None) -> None:
    outcomes = pool.outcomes_with_death(3, die_under_way, 1, hosts=hosts, check_replicas=0)  # or they would meet there
    for rank in (0, 2):
        assert outcomes[rank].kind == "WorkerLost"
        assert re.search(r"in the gradient exchange of step [23].* but rank 1 on ", outcomes[rank].message)
    if hosts is not None:
        pool.close()  # ports of what was under way go with the processes


def leave_alone() -> None:
    """A script ends while others do not: what it waits for beside itself does not hold it up."""
    model = nn.Linear(2, 2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    hocket.distribute(model, optimizer, strategy="delayed")
    if hocket.rank() == 0:
        model(torch.rand(2, 2)).sum().backward()
        optimizer.step()
        raise RuntimeError("gives up")
    hocket.barrier()


@pytest.mark.parametrize("hosts", [None, [1, 1]])
def test_a_rank_that_fails_leaves_at_once(pool: Pool, hosts: list[int] | None) -> None:
    outcomes = pool.outcomes(2, leave_alone, hosts=hosts)
    assert outcomes[0].kind == "RuntimeError" and outcomes[1].kind in ("WorkerLost", "MismatchError")
    if hosts is not None:
        pool.close()


def with_lbfgs() -> None:
    model = nn.Linear(3, 1)
    hocket.distribute(model, torch.optim.LBFGS(model.parameters()), strategy="delayed")


def test_lbfgs_is_refused(pool: Pool) -> None:
    with pytest.raises(RemoteError, match="LBFGS needs those of where it is: use full_batch"):
        pool.run(2, with_lbfgs)


def resumed_otherwise(folder: str) -> list[str]:
    """What is printed when a checkpoint with a late gradient is loaded by each strategy."""
    said = []
    for strategy in ("delayed", "delayed", "mirrored"):
        model = nn.Linear(3, 1)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        hocket.distribute(model, optimizer, strategy=strategy)
        current().training.strategies[:] = current().training.strategies[-1:]
        printed = io.StringIO()
        with contextlib.redirect_stderr(printed):
            if said:
                hocket.load(folder, model=model, optimizer=optimizer)
            else:
                model(torch.ones(2, 3)).sum().backward()
                optimizer.step()
                hocket.save(folder, model=model, optimizer=optimizer).wait()
                hocket.barrier()
        said.append(printed.getvalue())
    return said


def test_a_late_gradient_that_is_left_out_is_told(pool: Pool, tmp_path: Path) -> None:
    (first, again, other), silent = pool.run(2, resumed_otherwise, str(tmp_path))
    assert "late" not in first + again + "".join(silent) and "still to be applied" not in again
    assert "still to be applied, by 'delayed' or 'dmb'; this strategy leaves it out" in other
