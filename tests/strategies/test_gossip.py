"""Gossip in training loops: uneven numbers of batches, averages at their ends, checkpoints, lost workers."""

import os
import signal
import time
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import torch
from pool import Pool
from torch.utils.data import DataLoader, TensorDataset

import hocket
from hocket.job.checkpoint.saving import Saver
from hocket.job.runtime import current

KINDS = ["gossip", "gossip(order='adapt_while_combine')", "gossip(push_sum=True)", "gossip(asynchronous=True)"]


def start(strategy: str, batches: int) -> tuple[Any, Any, Any]:
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(4, 6), torch.nn.BatchNorm1d(6), torch.nn.Linear(6, 1)).double()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9)
    x = torch.randn(2 * batches, 4, dtype=torch.float64)
    loader = DataLoader(TensorDataset(x, torch.arange(2 * batches)), 2, shuffle=True)
    return hocket.distribute(model, optimizer, loader, strategy=strategy)


def step(model: Any, optimizer: Any, x: torch.Tensor) -> None:
    (model(x) ** 2).mean().backward()
    optimizer.step()
    optimizer.zero_grad()


def loops(strategy: str, batches: int, stop: int | None = None) -> dict[str, Any]:
    model, optimizer, loader = start(strategy, batches)
    if batches > 2:
        next(iter(loader))  # a glance
    seen: list[int] = []
    for _ in range(3):
        for count, (x, numbers) in enumerate(loader, start=1):
            step(model, optimizer, x)
            seen += numbers.tolist()
            if count == stop:
                break
    strategy_at_work: Any = current().strategies[0]
    return {
        "state": [value.clone() for value in model.state_dict().values()],
        "seen": seen,
        "rounds": strategy_at_work.rounds,
        "sent": strategy_at_work.sent,
        "distance": strategy_at_work.distance,
    }


@pytest.mark.parametrize("strategy", KINDS)
@pytest.mark.parametrize("batches", [1, 10])
def test_every_sample_counts_once_and_replicas_are_equal_in_the_end(pool: Pool, strategy: str, batches: int) -> None:
    many = pool.run(3, loops, strategy, batches, servers=1)
    seen = Counter(number for found in many for number in found["seen"])
    assert seen == dict.fromkeys(range(2 * batches), 3)
    for found in many:
        for mine, theirs in zip(many[0]["state"], found["state"], strict=True):
            assert torch.equal(mine, theirs)
        assert 0 < found["distance"] < 1
        assert found["sent"] > 0 or batches < 3  # a glance keeps nobody out of the first loop


@pytest.mark.parametrize("strategy", KINDS)
def test_loops_that_are_left(pool: Pool, strategy: str) -> None:
    many = pool.run(3, loops, strategy, 12, 2, servers=1)
    assert [found["rounds"] for found in many] == [6, 6, 6]
    for found in many:
        for mine, theirs in zip(many[0]["state"], found["state"], strict=True):
            assert torch.equal(mine, theirs)


def train_with_death(strategy: str, victim: int, folder: str) -> dict[str, Any]:
    """The victim dies with a batch in hand; the others keep their third until it has."""
    done, taken = Path(folder) / "done", Path(folder) / "taken"
    model, optimizer, loader = start(strategy, 24)
    for _ in range(2):
        for count, (x, numbers) in enumerate(loader):
            if count == 2 and hocket.rank() == victim:
                taken.write_text("!")
                os.kill(os.getpid(), signal.SIGKILL)
            deadline = time.monotonic() + 30
            while count == 2 and not taken.exists():
                assert time.monotonic() < deadline
                time.sleep(0.005)
            step(model, optimizer, x)
            with done.open("a") as file:  # one write, which is appended as a whole
                file.write("".join(f"{int(number)}\n" for number in numbers))
    at_work: Any = current().strategies[0]
    return {
        "state": [value.clone() for value in model.state_dict().values()],
        "live": at_work._peers.live,
        "neighbours": len(at_work._graph.neighbours(at_work._peers.live, hocket.rank())),
        "mean": float(hocket.mean(torch.tensor(float(hocket.rank())))),
    }


@pytest.mark.parametrize(
    ("strategy", "victim", "transport"),
    [
        ("gossip", 0, "auto"),
        ("gossip(topology='torus')", 1, "gloo"),
        ("gossip(topology='exponential', push_sum=True)", 2, "auto"),
        ("gossip(topology='pairs', asynchronous=True)", 0, "auto"),
    ],
)
def test_a_killed_worker(pool: Pool, tmp_path: Path, strategy: str, victim: int, transport: str) -> None:
    results = pool.outcomes_with_death(
        4, train_with_death, victim, strategy, victim, str(tmp_path), servers=1, transport=transport
    )
    left = [rank for rank in range(4) if rank != victim]
    for rank in left:
        assert isinstance(results[rank], dict), results[rank]
        assert results[rank]["live"] == left and results[rank]["mean"] == pytest.approx(sum(left) / 3)
        assert results[rank]["neighbours"] <= 2
        for mine, theirs in zip(results[left[0]]["state"], results[rank]["state"], strict=True):
            assert torch.equal(mine, theirs)
    counted = Counter(int(line) for line in (tmp_path / "done").read_text().split())
    assert counted == dict.fromkeys(range(48), 2)  # its last batch was dealt again
    assert pool.served[0][1] == [f"hocket: rank {victim} was lost; 1 of its batches is dealt to others"]


class Enough(Exception):
    """The end of an interrupted training."""


def train_with_checkpoints(strategy: str, stop: int | None) -> dict[str, Any]:
    model, optimizer, loader = start(strategy, 12)
    position = hocket.resume(model=model, optimizer=optimizer, loader=loader)
    first = [value.clone() for value in model.state_dict().values()]
    at_work: Any = current().strategies[0]
    merged: list[torch.Tensor] = []
    take = at_work.refresh

    def refresh() -> None:
        take()
        if at_work._is_merging:
            merged[:] = [value.clone() for value in model.state_dict().values()]

    at_work.refresh = refresh
    seen: list[int] = []
    taken = position.step
    for _ in range(position.epoch, 2):
        for x, numbers in loader:
            saver = current().saver
            if isinstance(saver, Saver):
                saver.settle()
            if taken == stop:
                hocket.barrier()
                return {"merged": merged, "first": first, "seen": seen, "step": position.step}
            step(model, optimizer, x)
            seen += numbers.tolist()
            taken += 1
    state = [value.clone() for value in model.state_dict().values()]
    return {"merged": merged, "first": first, "seen": seen, "step": position.step, "state": state}


@pytest.mark.parametrize("strategy", [KINDS[0], KINDS[2], KINDS[3]])
def test_rank_0_saves_the_mean_while_others_train(pool: Pool, tmp_path: Path, strategy: str) -> None:
    settings = {"checkpoint": str(tmp_path), "checkpoint_every": 2}
    before = pool.run(2, train_with_checkpoints, strategy, 3, servers=1, **settings)
    after = pool.run(2, train_with_checkpoints, strategy, None, servers=1, **settings)
    assert before[0]["merged"] and not before[1]["merged"]
    for rank in range(2):
        assert after[rank]["step"] == 2
        for mine, theirs in zip(before[0]["merged"], after[rank]["first"], strict=True):
            assert torch.equal(mine, theirs)
        for mine, theirs in zip(after[0]["state"], after[rank]["state"], strict=True):
            assert torch.equal(mine, theirs)
    counted = Counter(number for found in after for number in found["seen"])
    assert set(counted) == set(range(24)) and max(counted.values()) == 2
