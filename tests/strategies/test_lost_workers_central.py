"""``central`` when a worker is killed: the copy is never torn, and each step is that of its batch."""

import itertools
import os
import signal
from collections import defaultdict
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from pool import Pool
from products import product
from torch import nn
from torch.utils.data import DataLoader

import hocket
from hocket.capture.members import Members
from hocket.comm.bucket_layout import Layout, Place
from hocket.errors import WorkerLost
from hocket.job.worker import current
from hocket.updates.slices import SlicedUpdate
from hocket.updates.undo_log import UndoLog
from job.test_regrouping import BATCH, EPOCHS, PHASES, SAMPLES, Numbered, wait_for_the_end

OPTIMIZERS = ["SGD", "Adam", "AdamW groups", "plain"]


class Mortal(torch.optim.SGD):
    """Momentum by hand, in several passes, in the middle of any of which the process may be killed."""

    die: Callable[[int], None] | None = None

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        passes = itertools.count()
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is None:
                    continue
                state = self.state[p]
                if "momentum_buffer" not in state:
                    state["momentum_buffer"] = torch.zeros_like(p)
                flat, buffer, gradient = p.view(-1), state["momentum_buffer"].view(-1), p.grad.view(-1)
                gradient.mul_(0.5)  # as it should not
                for half in (slice(0, len(flat) // 2), slice(len(flat) // 2, None)):
                    buffer[half] = 0.9 * buffer[half] + gradient[half]
                    self.look(next(passes))
                    flat[half] -= 2 * group["lr"] * buffer[half]
                    self.look(next(passes))
                gradient.mul_(2)

    def look(self, done: int) -> None:
        if self.die is not None:
            self.die(done)


def build(kind: str = "SGD") -> tuple[nn.Module, torch.optim.Optimizer]:
    torch.manual_seed(1)
    model = nn.Sequential(nn.Linear(3, 30), nn.Tanh(), nn.Linear(30, 1)).double()
    if kind == "SGD":
        return model, torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    if kind == "Mortal":
        return model, Mortal(model.parameters(), lr=0.05)
    if kind == "Adam":
        return model, torch.optim.Adam(model.parameters(), lr=0.01)
    if kind == "AdamW groups":
        groups = [{"params": model[0].parameters()}, {"params": model[2].parameters(), "lr": 0.02}]
        return model, torch.optim.AdamW(groups, lr=0.01)
    return model, torch.optim.SGD(model.parameters(), lr=0.05)


def train(folder: str, strategy: str, kind: str, deaths: dict[int, tuple[int, str]]) -> tuple[Any, Any, int, int]:
    """Train, and write down after each backward pass which samples it was of, and how many exchanges were before it.

    A phase ``update 3`` is after three passes of the optimizer.
    """
    model, optimizer, loader = hocket.distribute(
        *build(kind), DataLoader(Numbered(), BATCH, shuffle=True), strategy=strategy
    )
    steps, mine, (at_work,) = 0, hocket.rank(), current().training.strategies
    (Path(folder) / f"{mine}.process").write_text(str(os.getpid()))
    hocket.barrier()

    def perhaps(phase: str) -> None:
        if deaths.get(mine) == (steps, phase):
            print("dead", at_work.exchanges, file=counted)
            os.kill(os.getpid(), signal.SIGKILL)

    with (Path(folder) / f"{mine}.counted").open("w", buffering=1) as counted:
        if isinstance(optimizer, Mortal):
            optimizer.die = lambda done: perhaps(f"update {done}")
        for epoch in range(EPOCHS):
            for numbers, x, y in loader:
                perhaps("before")
                loss = ((model(x) - y) ** 2).mean()
                perhaps("forward")
                before = at_work.exchanges
                loss.backward()
                print(before, loader.weight, epoch, steps, *numbers.tolist(), file=counted)
                perhaps("backward")
                optimizer.step()
                perhaps("after")
                optimizer.zero_grad()
                perhaps("between")
                for dead in [dead for dead, (step, phase) in deaths.items() if (step, phase) == (steps, "between")]:
                    wait_for_the_end(Path(folder) / f"{dead}.process")
                steps += 1
    parameters = nn.utils.parameters_to_vector(model.parameters()).tolist()
    state = {
        index: {key: value.tolist() if isinstance(value, torch.Tensor) else value for key, value in each.items()}
        for index, each in optimizer.state_dict()["state"].items()
    }
    return parameters, state, hocket.rank(), hocket.size()


def read_counted(folder: Path) -> dict[int, list[int]]:
    """The samples of each step that have counted; each must have counted once in each epoch."""
    epochs, steps = defaultdict[int, list[int]](list), defaultdict[int, list[int]](list)
    for path in folder.glob("*.counted"):
        *lines, last = path.read_text().splitlines()
        is_dead = last.startswith("dead")
        for line in lines if is_dead else [*lines, last]:
            exchanges, weight, epoch, step, *numbers = line.split()
            if (not is_dead or int(exchanges) < int(last.split()[1])) and float(weight):
                epochs[int(epoch)] += map(int, numbers)
                steps[int(step)] += map(int, numbers)
    assert [sorted(numbers) for _, numbers in sorted(epochs.items())] == [list(range(SAMPLES))] * EPOCHS
    return dict(sorted(steps.items()))


def check(folder: Path, found: list[Any], deaths: dict[int, tuple[int, str]], kind: str) -> dict[int, list[int]]:
    """Whether those who are left have the same, and what one process has that takes the steps that have counted."""
    left = [each for rank, each in enumerate(found) if rank not in deaths]
    for each in left:
        assert not isinstance(each, Exception), each
    assert sorted(rank for *_, rank, _ in left) == list(range(len(left)))
    assert {size for *_, size in left} == {len(left)}
    assert all(each[:2] == left[0][:2] for each in left)
    steps = read_counted(folder)
    model, optimizer = build(kind)
    data = Numbered()
    for numbers in steps.values():
        ((model(data.x[numbers]) - data.y[numbers]) ** 2).mean().backward()
        optimizer.step()
        optimizer.zero_grad()
    expected = nn.utils.parameters_to_vector(model.parameters()).detach()
    assert torch.allclose(torch.tensor(left[0][0], dtype=torch.float64), expected, rtol=1e-9, atol=1e-12)
    state = optimizer.state_dict()["state"]
    assert left[0][1].keys() == state.keys()
    for index, values in state.items():
        assert left[0][1][index].keys() == values.keys()
        for key, value in values.items():
            mine, whole = torch.as_tensor(left[0][1][index][key], dtype=torch.float64), torch.as_tensor(value)
            assert torch.allclose(mine, whole.double(), rtol=1e-9, atol=1e-12)
    return steps


@pytest.mark.few(4)
@product(
    "strategy",
    strategy=["central", "central(fused=True)"],
    phase=PHASES,
    kind=OPTIMIZERS,
    who=[(2, 1, 3), (3, 0, 0), (3, 1, 1), (4, 2, 5)],
)
def test_the_others_go_on(
    pool: Pool, tmp_path: Path, strategy: str, who: tuple[int, int, int], phase: str, kind: str
) -> None:
    size, dead, step = who
    deaths = {dead: (step, phase)}
    found = pool.outcomes_with_death(
        size, train, dead, str(tmp_path), strategy, kind, deaths, on_loss="continue", timeout=60.0
    )
    steps = check(tmp_path, found, deaths, kind)
    if phase == "between":  # everybody knows before the next batch: batches are as if nothing had happened
        each = size * BATCH
        rest = [SAMPLES % each] if SAMPLES % each else []
        assert [len(numbers) for numbers in steps.values()] == ([each] * (SAMPLES // each) + rest) * EPOCHS


@pytest.mark.few(4)
@product(
    "strategy",
    strategy=["central", "central(fused=True)"],
    done=[0, 1, 2, 3],
    who=[(2, 1, 3), (3, 0, 0), (3, 1, 1), (4, 2, 5), (4, 3, 0)],
)
def test_a_slice_that_is_torn_is_not_used(
    pool: Pool, tmp_path: Path, strategy: str, who: tuple[int, int, int], done: int
) -> None:
    """The worker is killed in its update: its gradients have counted, and the step is taken without it."""
    size, dead, step = who
    deaths = {dead: (step, f"update {done}")}
    found = pool.outcomes_with_death(
        size, train, dead, str(tmp_path), strategy, "Mortal", deaths, on_loss="continue", timeout=60.0
    )
    steps = check(tmp_path, found, deaths, "Mortal")
    assert len(steps[step]) == size * BATCH


@pytest.mark.few(3)
@pytest.mark.parametrize("strategy", ["central", "central(fused=True)"])
@pytest.mark.parametrize(
    "deaths",
    [
        {1: (3, "update 1"), 2: (3, "update 3")},
        {0: (3, "update 1"), 1: (3, "update 0"), 2: (3, "update 2")},
        {0: (3, "update 2"), 3: (4, "backward")},
        {2: (0, "update 1"), 0: (1, "update 3"), 1: (1, "update 0")},
    ],
)
def test_several_are_lost(pool: Pool, tmp_path: Path, deaths: dict[int, tuple[int, str]], strategy: str) -> None:
    found = pool.outcomes_with_death(
        4, train, deaths, str(tmp_path), strategy, "Mortal", deaths, on_loss="continue", timeout=60.0
    )
    check(tmp_path, found, deaths, "Mortal")


class _Alone:
    rank, size = 0, 1

    def one_copy(
        self, dtype: torch.dtype, count: int, places: Sequence[Place], purpose: str
    ) -> tuple[torch.Tensor, list[torch.Tensor]]:
        flat = torch.zeros(count, dtype=dtype)
        return flat, [flat[p.start : p.end].as_strided(p.shape, p.stride, p.start) for p in places]

    def barrier(self, what: str = "") -> None:
        """Nothing to do: there is nobody to wait for."""


@pytest.mark.parametrize("logs", [False, True])
def test_a_step_without_a_log_is_not_interrupted(logs: bool) -> None:
    model, optimizer = build("Adam")
    members = Members(model, optimizer)
    layout = Layout(members.parameters)
    flats, gradients = layout.allocate(), [torch.ones(bucket.count, dtype=bucket.dtype) for bucket in layout.buckets]
    owners = _Alone()
    update = SlicedUpdate(owners, optimizer, members, layout, flats, gradients, UndoLog(owners) if logs else None)
    present = b"\1" * len(members.parameters)
    update.prepare(present)
    update.step(optimizer.step)
    update.share()
    update.end()
    after_one = [flat.clone() for flat in flats]
    update.regroup(flats, gradients)
    update.prepare(present)
    update.step(optimizer.step)
    if not logs:
        with pytest.raises(WorkerLost, match="in the middle of its update"):
            update.regroup(flats, gradients)
        return
    assert not torch.equal(flats[0], after_one[0])
    update.regroup(flats, gradients)
    assert torch.equal(flats[0], after_one[0])
    assert {float(state["step"]) for state in optimizer.state_dict()["state"].values()} == {1.0}
