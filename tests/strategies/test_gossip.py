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
from hocket.comm import wire_peers
from hocket.comm.neighbour_rounds import PeerKind
from hocket.errors import StrategyError
from hocket.job.checkpoint.saver import Saver
from hocket.job.worker import current
from hocket.specs import parse
from hocket.strategies.base import Why

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
    hocket.barrier()  # a loop that was left is settled with the next call of all
    strategy_at_work: Any = current().training.strategies[0]
    return {
        "state": [value.clone() for value in model.state_dict().values()],
        "seen": seen,
        "rounds": strategy_at_work.rounds,
        "sent": strategy_at_work.sent,
        "distance": strategy_at_work.distance,
    }


def finish_last() -> dict[str, Any]:
    model, optimizer, loader = start("gossip", 4)
    for x, _ in loader:
        step(model, optimizer, x)
    hocket.barrier()
    at_work: Any = current().training.strategies[0]
    at_work.take_facts()
    deadline = time.monotonic() + 30
    while hocket.rank() == 0 and not at_work._peers.lost:  # the other one has finished
        assert time.monotonic() < deadline
        time.sleep(0.01)
    facts: dict[str, Any] = at_work.take_facts()
    return facts


def test_who_has_finished_was_not_lost(pool: Pool) -> None:
    assert pool.run(2, finish_last, coordinated=True) == [{}, {}]


@pytest.mark.few(4)
@pytest.mark.parametrize("strategy", KINDS)
@pytest.mark.parametrize("batches", [1, 10])
def test_every_sample_counts_once_and_replicas_are_equal_in_the_end(pool: Pool, strategy: str, batches: int) -> None:
    many = pool.run(3, loops, strategy, batches, coordinated=True)
    seen = Counter(number for found in many for number in found["seen"])
    assert seen == dict.fromkeys(range(2 * batches), 3)
    for found in many:
        for mine, theirs in zip(many[0]["state"], found["state"], strict=True):
            assert torch.equal(mine, theirs)
        assert 0 < found["distance"] < 1
        assert found["sent"] > 0 or batches < 3  # a glance keeps nobody out of the first loop


@pytest.mark.few(2)
@pytest.mark.parametrize("strategy", KINDS)
def test_loops_that_are_left(pool: Pool, strategy: str) -> None:
    many = pool.run(3, loops, strategy, 12, 2, coordinated=True)
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
    at_work: Any = current().training.strategies[0]
    return {
        "state": [value.clone() for value in model.state_dict().values()],
        "live": at_work._peers.live,
        "neighbours": len(at_work._graph.neighbours(at_work._peers.live, hocket.rank())),
        "mean": float(hocket.mean(torch.tensor(float(hocket.rank())))),
    }


@pytest.mark.few(2)
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
        4, train_with_death, victim, strategy, victim, str(tmp_path), coordinated=True, transport=transport
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
    assert pool.said == [f"hocket: rank {victim} was lost; 1 of its batches is dealt to others"]


class Enough(Exception):
    """The end of an interrupted training."""


def train_with_checkpoints(strategy: str, stop: int | None) -> dict[str, Any]:
    model, optimizer, loader = start(strategy, 12)
    position = hocket.resume(model=model, optimizer=optimizer, loader=loader)
    first = [value.clone() for value in model.state_dict().values()]
    at_work: Any = current().training.strategies[0]
    merged: list[torch.Tensor] = []
    take = at_work.settle

    def settle(why: Why) -> None:
        take(why)
        if at_work._is_merging:
            merged[:] = [value.clone() for value in model.state_dict().values()]

    at_work.settle = settle
    seen: list[int] = []
    taken = position.step
    for _ in range(position.epoch, 2):
        for x, numbers in loader:
            saver = current().training.saver
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
    before = pool.run(2, train_with_checkpoints, strategy, 3, coordinated=True, **settings)
    after = pool.run(2, train_with_checkpoints, strategy, None, coordinated=True, **settings)
    assert before[0]["merged"] and not before[1]["merged"]
    for rank in range(2):
        assert after[rank]["step"] == 2
        for mine, theirs in zip(before[0]["merged"], after[rank]["first"], strict=True):
            assert torch.equal(mine, theirs)
        for mine, theirs in zip(after[0]["state"], after[rank]["state"], strict=True):
            assert torch.equal(mine, theirs)
    counted = Counter(number for found in after for number in found["seen"])
    assert set(counted) == set(range(24)) and max(counted.values()) == 2


def start_constant(strategy: str, batches: int) -> tuple[Any, Any, Any]:
    """Every step moves every weight by -0.1, whatever the parameters: the mean tells whether something was lost."""
    model = torch.nn.Linear(3, 1, bias=False).double()
    torch.nn.init.zeros_(model.weight)
    loader = DataLoader(TensorDataset(torch.ones(batches, 3, dtype=torch.float64)), 1)
    return hocket.distribute(model, torch.optim.SGD(model.parameters(), lr=0.1), loader, strategy=strategy)


def step_constant(model: Any, optimizer: Any, x: torch.Tensor) -> None:
    model(x).mean().backward()
    optimizer.step()
    optimizer.zero_grad()


def be_late_between_loops(folder: str) -> float:
    """Rank 0 begins a loop when the other one has averaged with it for a while."""
    model, optimizer, loader = start_constant("gossip(asynchronous=True)", 60)
    for epoch in range(3):
        deadline = time.monotonic() + 30
        while hocket.rank() == 0 and not (Path(folder) / str(epoch)).exists():
            assert time.monotonic() < deadline
            time.sleep(0.005)
        for count, (x,) in enumerate(loader):
            step_constant(model, optimizer, x)
            if hocket.rank() == 1 and count == 10:
                (Path(folder) / str(epoch)).write_text("!")
    return float(model.weight[0, 0])


def test_averages_with_one_that_is_between_its_loops_are_not_lost(pool: Pool, tmp_path: Path) -> None:
    assert pool.run(2, be_late_between_loops, str(tmp_path), coordinated=True) == pytest.approx([-9.0, -9.0], rel=1e-9)


def push_over_a_slow_link(leaves: bool) -> float:
    model, optimizer, loader = start_constant("gossip(push_sum=True)", 21)
    peers: Any = current().training.strategies[0]._peers  # type: ignore[attr-defined]
    take = peers.handlers[PeerKind.DATA]

    def slow(*args: Any) -> None:
        time.sleep(0.03)
        take(*args)

    if hocket.rank() == 0:
        peers.handlers[PeerKind.DATA] = slow
    for _ in range(3):
        for count, (x,) in enumerate(loader, start=1):
            step_constant(model, optimizer, x)
            if leaves and hocket.rank() == 0 and count == 3:
                break
    hocket.barrier()
    return float(model.weight[0, 0])


@pytest.mark.parametrize("leaves", [False, True])
def test_what_was_pushed_late_counts(pool: Pool, leaves: bool) -> None:
    assert pool.run(2, push_over_a_slow_link, leaves, coordinated=True) == pytest.approx([-3.15, -3.15], rel=1e-9)


def follow_a_schedule() -> int:
    model, optimizer, loader = start_constant("gossip", 30)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, max_lr=0.1, total_steps=len(loader))
    for count, (x,) in enumerate(loader):
        if hocket.rank() == 2 and count == 2:
            os.kill(os.getpid(), signal.SIGKILL)
        step_constant(model, optimizer, x)
        schedule.step()
    return count + 1


def test_the_schedule_of_survivors_is_long_enough(pool: Pool) -> None:
    first, second, _ = pool.outcomes_with_death(3, follow_a_schedule, 2, coordinated=True)
    assert first + second >= 28  # more than 10 each


def evaluate_with_gradients() -> tuple[bool, float]:
    model, optimizer, loader = start_constant("gossip(order='adapt_while_combine')", 20)
    at_work: Any = current().training.strategies[0]
    begun = False
    for _ in range(2):
        model(torch.ones(1, 3, dtype=torch.float64))
        begun = begun or at_work._is_begun
        if hocket.rank() == 0:  # a glance that begins an exchange
            for (x,) in loader:
                model(x)
                break
        for (x,) in loader:
            step_constant(model, optimizer, x)
    return begun, float(model.weight[0, 0])


def test_a_forward_pass_outside_of_loops_exchanges_nothing(pool: Pool) -> None:
    found = pool.run(2, evaluate_with_gradients, coordinated=True)
    assert [begun for begun, _ in found] == [False, False]
    assert [value for _, value in found] == pytest.approx([-2.0, -2.0], rel=1e-9)


def test_a_word_without_quotes() -> None:
    with pytest.raises(StrategyError, match=r"no literal: write for example topology='ring'$"):
        parse("gossip(topology=ring)")


def break_links(strategy: str, times: int, is_for_good: bool) -> tuple[list[int], list[int], float, float, list[int]]:
    """Rank 0 breaks the wires to and from rank 1 in the first loop, one after the other."""
    model, optimizer, loader = start_constant(strategy, 30)
    at_work: Any = current().training.strategies[0]
    peers = at_work._peers
    steps, longest = [0, 0], 0.0
    for epoch in range(2):
        for count, (x,) in enumerate(loader):
            if hocket.rank() == 0 and count in range(3, 3 + times) and epoch == 0:
                if is_for_good:
                    peers._out[1]._renew = lambda _: None
                (peers._out[1] if count % 2 else peers._incoming[1]).wire.close()
            step_constant(model, optimizer, x)
            steps[epoch] += 1
            longest = max(longest, 0.1 / at_work.mass)
    live, lost = peers.live, list(peers.lost)
    hocket.barrier()  # before anybody says goodbye
    return live, lost, float(model.weight[0, 0]), longest, steps


def break_links_with_patience(strategy: str, times: int) -> Any:
    """Each of them is made anew, though this machine may be busy."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(wire_peers, "_AGAIN", 30.0)
        return break_links(strategy, times, False)


@pytest.mark.few(4)
@pytest.mark.parametrize("strategy", KINDS)
@pytest.mark.parametrize("workers", [2, 3])
def test_nothing_is_lost_with_a_link_that_breaks(pool: Pool, strategy: str, workers: int) -> None:
    for live, lost, value, longest, _ in pool.run(workers, break_links_with_patience, strategy, 4, coordinated=True):
        assert live == list(range(workers)) and not lost
        assert value == pytest.approx(-6.0 / workers, rel=1e-9) and longest < 0.4


@pytest.mark.few(3)
@pytest.mark.parametrize("strategy", KINDS)
@pytest.mark.parametrize("workers", [2, 3])
def test_two_that_cannot_reach_each_other_go_on_until_the_end_of_the_loop(
    pool: Pool, strategy: str, workers: int
) -> None:
    found = pool.run(workers, break_links, strategy, 1, True, coordinated=True)
    # Workers that are busy take fewer batches of the queue, and differ by as many steps.
    apart = 0.1 * sum(max(steps) - min(steps) for steps in zip(*(each[4] for each in found), strict=True))
    for live, lost, value, longest, _ in found:
        assert live == list(range(workers)) and not lost
        assert abs(value + 6.0 / workers) < 0.5 + apart / 2, found  # one may have heard what the other one has not
        assert longest < 0.4
