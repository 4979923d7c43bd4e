"""Replicas that should be equal and are not: found by default, wherever a rank goes its own way."""

from pathlib import Path
from typing import Any

import pytest
import torch
from pool import Pool
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import hocket
from hocket.capture.members import Members
from hocket.comm.alone import AloneCommunicator
from hocket.errors import MismatchError
from hocket.job import replica_check
from hocket.job.buffers import fingerprint
from hocket.job.replica_check import ReplicaCheck
from hocket.job.simulated_job import SimulatedJob
from hocket.job.worker import current
from hocket.specs import Mirrored
from hocket.strategies.base import Context
from hocket.strategies.building import build


def stray(what: str, folder: str = "") -> None:
    """Rank 1 goes its own way in the first step."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(6, 30), nn.Tanh(), nn.Linear(30, 1))
    other = {name: value + 1 for name, value in model.state_dict().items()}
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    hocket.distribute(model, optimizer)
    for step in range(4):
        optimizer.zero_grad()
        model(torch.ones(2, 6)).sum().backward()
        odd = step == 0 and hocket.rank() == 1
        if what == "clip" and odd:
            nn.utils.clip_grad_norm_(model.parameters(), 0.1)
        if not (what == "skip" and odd):
            optimizer.step()
        if what == "load" and odd:
            model.load_state_dict(other)
        if what == "write" and odd:
            model[0].bias.data[3] += 1e-6
    if folder:
        hocket.save(folder, model=model)


@pytest.mark.parametrize(("what", "names"), [("clip", "'0.weight'"), ("load", "'0.weight'"), ("write", "'0.bias'")])
def test_a_rank_that_goes_its_own_way_is_found_in_the_first_steps(pool: Pool, what: str, names: str) -> None:
    for outcome in pool.outcomes(3, stray, what):
        assert outcome.kind == "ReplicaError" and f"{names} on rank 1" in outcome.message
        assert "if hocket.rank() ==" in outcome.message


@pytest.mark.parametrize("check", [None, 0])
def test_a_step_that_one_rank_leaves_out_is_found_by_the_next_exchange(pool: Pool, check: int | None) -> None:
    for outcome in pool.outcomes(2, stray, "skip", check_replicas=check):
        assert outcome.kind == "MismatchError"
        assert "the gradient exchange of step 2 with learning rate 0.1, after 0 optimizer steps" in outcome.message
        assert "after 1 optimizer steps" in outcome.message


@pytest.mark.few(2)
@pytest.mark.parametrize(
    ("strategy", "servers", "message"),
    [
        ("central", 0, "after 2 optimizer steps"), ("delayed", 0, "after 3 batches"),
        ("bsp", 1, "rank 1: optimizer.step() after 2 backward passes since the last step, on 2 batches"),
    ],
)  # fmt: skip
@pytest.mark.parametrize("last", [False, True])
def test_a_step_that_one_rank_leaves_out_is_found_in_a_loop(
    strategy: str, servers: int, message: str, last: bool
) -> None:
    def script() -> None:
        model = nn.Linear(6, 1)
        optimizer: Any = torch.optim.SGD(model.parameters(), lr=0.1)
        loader: Any = DataLoader(TensorDataset(torch.ones(24, 6)), 2)
        model, optimizer, loader = hocket.distribute(model, optimizer, loader, strategy=strategy)
        for epoch in range(2):
            for number, (x,) in enumerate(loader):
                optimizer.zero_grad()
                model(x).sum().backward()
                if (epoch, number, hocket.rank()) != (0, 3 if last else 2, 1):
                    optimizer.step()

    with pytest.raises(MismatchError) as found:
        SimulatedJob(3, strategy, servers=servers).run(script)
    assert last or message in str(found.value)


def test_a_batch_that_one_rank_leaves_out_is_found_with_servers() -> None:
    """Else all further gradients of that rank would be averaged with those of other batches."""

    def script() -> None:
        model = nn.Linear(6, 1)
        optimizer: Any = torch.optim.SGD(model.parameters(), lr=0.1)
        loader: Any = DataLoader(TensorDataset(torch.ones(24, 6)), 2)
        model, optimizer, loader = hocket.distribute(model, optimizer, loader)
        for _ in range(2):
            for place, (x,) in enumerate(loader):
                loss = model(x).sum()
                if (place, hocket.rank()) != (1, 1):
                    optimizer.zero_grad()
                    loss.backward()
                    optimizer.step()

    with pytest.raises(MismatchError, match=r"rank 1: .* on 2 batches"):
        SimulatedJob(3, "bsp", servers=1).run(script)


def test_replicas_are_compared_at_checkpoints(pool: Pool, tmp_path: Path) -> None:
    for outcome in pool.outcomes(2, stray, "write", str(tmp_path), check_replicas=1000):
        assert outcome.kind == "ReplicaError" and "after 4 steps" in outcome.message
    assert not list(tmp_path.iterdir())


def at_end(what: str) -> dict[str, int]:
    torch.manual_seed(0)
    model = nn.Linear(6, 3)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    hocket.distribute(model, optimizer)
    for _ in range(3):
        optimizer.zero_grad()
        model(torch.ones(2, 6)).sum().backward()
        optimizer.step()
    if what == "best" and hocket.rank() == 0:  # and evaluate it there
        model.load_state_dict({name: value + 1 for name, value in model.state_dict().items()})
    if what == "data" and hocket.rank() == 1:
        model.bias.data += 1
    return next(iter(current().training.checks.values())).at_end()


def test_what_replicas_are_after_the_last_step_is_told_at_the_end(pool: Pool) -> None:
    first, second = pool.run(2, at_end, "")
    assert first == second and set(first) == {"weight", "bias"}
    first, second = pool.run(2, at_end, "data")
    assert first["weight"] == second["weight"] and first["bias"] != second["bias"]
    first, second = pool.run(2, at_end, "best")  # a rank that has loaded another model since is not compared
    assert first == {} and second


def test_comparisons_take_their_share_of_the_time_as_measured(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = [100.0]

    def costly(_: Any) -> int:
        clock[0] += 1.0
        return 7

    monkeypatch.setattr(replica_check, "fingerprint", costly)
    monkeypatch.setattr(replica_check.time, "perf_counter", lambda: clock[0])
    model = nn.Linear(3, 1)
    alone = AloneCommunicator()
    strategy = build(Context(model, None, Members(model, None), alone), Mirrored())
    check = ReplicaCheck(alone, strategy, None)
    compared = []
    for step in range(1, 501):
        clock[0] += 2.0
        before = clock[0]
        check.after_step()
        if clock[0] > before:
            compared.append(step)
    assert compared == [1, 2, 102, 202, 302, 402]  # a second in every 200


def test_fingerprints_see_every_bit() -> None:
    random = torch.Generator().manual_seed(0)
    for dtype in (torch.float64, torch.float32, torch.bfloat16):
        values = torch.randn(20003, generator=random).to(dtype)
        known = fingerprint([values])
        for i in (0, 1, 9999, 20002):
            changed = values.clone()
            changed.view(torch.uint8)[i * dtype.itemsize] ^= 1
            assert fingerprint([changed]) != known == fingerprint([values.clone()])
        swapped = values.clone()
        swapped[[0, 14000]] = values[[14000, 0]]
        assert fingerprint([swapped]) != known
    assert fingerprint([torch.arange(40001, dtype=torch.uint8)[3:]]) == fingerprint(
        [torch.arange(40001, dtype=torch.uint8)[3:].clone()]
    )
