"""A worker that is killed: the others go on, with every sample once, and each step is that of its batch."""

import contextlib
import itertools
import os
import select
import signal
import threading
import time
from collections import defaultdict
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from pool import Pool
from products import product
from torch import nn
from torch.utils.data import DataLoader, Dataset

import hocket
from hocket.job.checkpoint.reading import on_rank_0
from hocket.job.worker import current

SAMPLES, BATCH, EPOCHS = 100, 4, 2
PHASES = ["before", "forward", "backward", "after", "between"]


class Numbered(Dataset[Any]):
    """Samples that know their numbers."""

    def __init__(self) -> None:
        generator = torch.Generator().manual_seed(5)
        self.x = torch.randn(SAMPLES, 3, generator=generator, dtype=torch.float64)
        self.y = self.x.sum(1, keepdim=True) + torch.randn(SAMPLES, 1, generator=generator, dtype=torch.float64)

    def __len__(self) -> int:
        return SAMPLES

    def __getitem__(self, index: int) -> Any:
        return index, self.x[index], self.y[index]


def build(device: str = "cpu") -> tuple[nn.Module, torch.optim.Optimizer]:
    torch.manual_seed(1)
    model = nn.Sequential(nn.Linear(3, 5), nn.Tanh(), nn.Linear(5, 1)).double().to(device)
    return model, torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)


def train(
    folder: str,
    deaths: dict[int, tuple[int, str]],
    processes: int = 0,
    strategy: str = "mirrored",
    slow: int | None = None,
    device: str = "cpu",
) -> tuple[list[float], int, int, int]:
    """Train, and write down after each backward pass which samples it was of, and how many exchanges were before it.

    Args:
        folder: Where each worker writes.
        deaths: The step and the phase in which a rank is killed.
        processes: Data-loader processes of each worker.
        strategy: How the workers train together.
        slow: A worker that takes longer for its batches than others.
        device: Where the model is.

    Returns:
        The parameters at the end, who this is then, of how many, and the samples that were counted.
    """
    loader = DataLoader(Numbered(), BATCH, shuffle=True, num_workers=processes)
    model, optimizer, loader = hocket.distribute(*build(device), loader, strategy=strategy)
    steps, mine, (at_work,) = 0, hocket.rank(), current().training.strategies
    (Path(folder) / f"{mine}.process").write_text(str(os.getpid()))
    hocket.barrier()

    def perhaps(phase: str) -> None:
        if deaths.get(mine) == (steps, phase):
            print("dead", at_work.exchanges, file=counted)
            os.kill(os.getpid(), signal.SIGKILL)

    with (Path(folder) / f"{mine}.counted").open("w", buffering=1) as counted:
        for epoch in range(EPOCHS):
            for numbers, x, y in loader:
                perhaps("before")
                time.sleep(0.02 if mine == slow else 0.0)
                loss = ((model(x.to(device)) - y.to(device)) ** 2).mean()
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
                if mine == slow and steps == 9 and hocket.size() == 3:
                    time.sleep(0.5)  # at the end of the first epoch, when others begin the next one
    parameters: list[float] = nn.utils.parameters_to_vector(model.parameters()).tolist()
    samples = int(hocket.mean(float(hocket.rank() >= 0)))  # a collective of those who are left
    return parameters, hocket.rank(), hocket.size(), samples


def wait_for_the_end(named: Path) -> None:
    with contextlib.suppress(ProcessLookupError):
        process = os.pidfd_open(int(named.read_text()))
        select.select([process], [], [])
        os.close(process)


class Counted(NamedTuple):
    """Samples of one worker that have counted in one step."""

    exchanges: int  # before the step
    step: int
    worker: int
    weight: float
    numbers: list[int]


def check_counted(folder: Path, found: list[Any], deaths: dict[int, tuple[int, str]], size: int) -> list[Counted]:
    """Whether each sample has counted once in each epoch; returns what has counted, in order."""
    left = [each for rank, each in enumerate(found) if rank not in deaths]
    for each in left:
        assert not isinstance(each, Exception), each
    assert sorted(rank for _, rank, _, _ in left) == list(range(size - len(deaths)))
    assert {now for _, _, now, _ in left} == {size - len(deaths)}
    assert len({tuple(parameters) for parameters, _, _, _ in left}) == 1
    counted, epochs = list[Counted](), defaultdict[int, list[int]](list)
    for path in folder.glob("*.counted"):
        *lines, last = path.read_text().splitlines()
        is_dead = last.startswith("dead")
        for line in lines if is_dead else [*lines, last]:
            exchanges, weight, epoch, step, *numbers = line.split()
            if not is_dead or int(exchanges) < int(last.split()[1]):  # what came after its last exchange is lost
                told = int(exchanges), int(step), int(path.stem), float(weight), list(map(int, numbers))
                counted.append(Counted(*told))
                epochs[int(epoch)] += counted[-1].numbers if counted[-1].weight else []
    assert [sorted(numbers) for _, numbers in sorted(epochs.items())] == [list(range(SAMPLES))] * EPOCHS
    return sorted(counted)


def check(folder: Path, found: list[Any], deaths: dict[int, tuple[int, str]], size: int) -> dict[int, list[int]]:
    """Whether all that must be true of mirrored is true; returns the samples of each step."""
    left = [each for rank, each in enumerate(found) if rank not in deaths]
    steps = defaultdict[int, list[int]](list)
    for each in check_counted(folder, found, deaths, size):
        steps[each.step] += each.numbers if each.weight else []  # else only to be in step
    model, optimizer = build()
    data = Numbered()
    for numbers in steps.values():
        ((model(data.x[numbers]) - data.y[numbers]) ** 2).mean().backward()
        optimizer.step()
        optimizer.zero_grad()
    expected = nn.utils.parameters_to_vector(model.parameters())
    assert torch.allclose(torch.tensor(left[0][0], dtype=torch.float64), expected, rtol=1e-9, atol=1e-12)
    return steps


@pytest.mark.few(2)
@product(phase=PHASES, who=[(2, 1, 0), (3, 0, 0), (3, 1, 2), (4, 2, 0)])
def test_the_others_go_on(pool: Pool, tmp_path: Path, who: tuple[int, int, int], phase: str) -> None:
    size, dead, processes = who
    deaths = {dead: (3, phase)}
    settings: dict[str, Any] = {"on_loss": "continue", "check_replicas": 1}
    found = pool.outcomes_with_death(size, train, dead, str(tmp_path), deaths, processes, **settings)
    steps = check(tmp_path, found, deaths, size)
    if phase == "between":  # everybody knows before the next batch: batches are as if nothing had happened
        each = size * BATCH
        rest = [SAMPLES % each] if SAMPLES % each else []
        assert [len(numbers) for numbers in steps.values()] == ([each] * (SAMPLES // each) + rest) * EPOCHS


@pytest.mark.few(2)
@pytest.mark.parametrize(
    "deaths",
    [
        {1: (3, "forward"), 2: (3, "forward")},
        {0: (3, "forward"), 3: (3, "backward")},
        {2: (3, "before"), 3: (4, "forward")},  # not with the samples of 2, which 0 has then, or the job would end
        {2: (3, "before"), 0: (5, "forward")},
        {3: (2, "after"), 1: (9, "before"), 0: (12, "backward")},
        {3: (3, "between"), 1: (3, "between")},
    ],
)
def test_several_are_lost(pool: Pool, tmp_path: Path, deaths: dict[int, tuple[int, str]]) -> None:
    settings: dict[str, Any] = {"on_loss": "continue", "check_replicas": 1}
    found = pool.outcomes_with_death(4, train, deaths, str(tmp_path), deaths, **settings)
    check(tmp_path, found, deaths, 4)


@pytest.mark.few(1)
@pytest.mark.parametrize("most", [1, 2])
def test_a_part_that_would_be_too_large_ends_the_job(pool: Pool, tmp_path: Path, most: int) -> None:
    deaths = {1: (3, "forward")}
    found = pool.outcomes_with_death(3, train, 1, str(tmp_path), deaths, on_loss="continue", max_part=most)
    if most == 2:
        check(tmp_path, found, deaths, 3)
        return
    for error in (found[0], found[2]):
        assert "WorkerLost" in str(error) and "more than 1 times its batch of 4 samples: raise --max-part" in str(error)


def hear_of_changes() -> list[Any]:
    heard = list[Any]()
    mine = hocket.rank()
    hocket.on_change(lambda change: heard.append([change.generation, change.rank, change.size, change.lost]))
    model, optimizer, loader = hocket.distribute(*build(), DataLoader(Numbered(), BATCH))
    for step, (_, x, y) in enumerate(loader):
        if (mine, step) in ((0, 2), (2, 4)):
            os.kill(os.getpid(), signal.SIGKILL)
        assert hocket.size() == (heard[-1][2] if heard else 4)
        ((model(x) - y) ** 2).mean().backward()
        optimizer.step()
    return [*heard, hocket.rank()]


def test_a_script_hears_of_changes(pool: Pool) -> None:
    found = pool.outcomes_with_death(4, hear_of_changes, {0: 0, 2: 0}, on_loss="continue")
    assert found[1] == [[1, 0, 3, [0]], [2, 0, 2, [2]], 0]
    assert found[3] == [[1, 2, 3, [0]], [2, 1, 2, [2]], 1]


def work_on_rank_0() -> int:
    mine = hocket.rank()

    def work() -> int:
        if mine == 0:
            os.kill(os.getpid(), signal.SIGKILL)
        return 10 + mine

    return on_rank_0(current().communicator, work)


def test_the_next_worker_does_what_rank_0_has_left(pool: Pool) -> None:
    assert pool.outcomes_with_death(3, work_on_rank_0, 0, on_loss="continue")[1:] == [11, 11]


def fail() -> None:
    model, optimizer, loader = hocket.distribute(*build(), DataLoader(Numbered(), BATCH))
    for step, (_, x, y) in enumerate(loader):
        if step == 3 and hocket.rank() == 1:
            raise ValueError("broken on purpose")
        ((model(x) - y) ** 2).mean().backward()
        optimizer.step()


def test_an_exception_is_no_loss(pool: Pool) -> None:
    first, second = pool.outcomes(2, fail, on_loss="continue")
    assert "broken on purpose" in str(second)
    assert "WorkerLost" in str(first) and "rank 1" in str(first)


def accumulate(dead: int, at: int) -> tuple[list[float], list[list[int]]]:
    """Two batches for each step; one worker is killed at its batch number ``at``."""
    model, optimizer, loader = hocket.distribute(*build(), DataLoader(Numbered(), BATCH, drop_last=True))
    mine, seen, steps = hocket.rank(), list[list[int]](), list[list[int]]()
    for number, (numbers, x, y) in enumerate(loader):
        if (mine, number) == (dead, at):
            os.kill(os.getpid(), signal.SIGKILL)
        seen.append(numbers.tolist())
        is_last = number % 2 == 1
        with contextlib.nullcontext() if is_last else hocket.accumulate():
            ((model(x) - y) ** 2).mean().backward()
        if is_last:
            optimizer.step()
            optimizer.zero_grad()
            steps.append([each for batch in seen for each in batch])
            seen.clear()
    return nn.utils.parameters_to_vector(model.parameters()).tolist(), steps


@pytest.mark.few(1)
@pytest.mark.parametrize("at", [4, 5])
def test_gradients_that_were_held_back_are_lost_with_their_worker(pool: Pool, at: int) -> None:
    found = pool.outcomes_with_death(3, accumulate, 1, 1, at, on_loss="continue", check_replicas=1)
    left = [found[0], found[2]]
    for each in left:
        assert not isinstance(each, Exception), each
    assert left[0][0] == left[1][0]
    # The third step is without the dead worker, and all that it had of that step comes again.
    counted = sorted(number for _, steps in left for step in steps[2:] for number in step)
    assert len(counted) == len(set(counted))
    assert set(range(48, 72)) <= set(counted)


def train_oddly(kind: str, dead: int, at: int) -> tuple[list[float], list[int], list[int]]:
    """What scripts of other people do; returns the parameters, the samples of this worker, and who it was."""
    loader = DataLoader(Numbered(), BATCH, shuffle=True)
    if kind == "own batches":
        loader = DataLoader(Numbered(), batch_sampler=[[*range(n, n + BATCH)] for n in range(0, SAMPLES, BATCH)])
    model, optimizer, loader = hocket.distribute(*build(), loader)
    mine, steps, seen = hocket.rank(), 0, list[int]()

    def step(batch: Any) -> None:
        nonlocal steps
        if (mine, steps) == (dead, at):
            os.kill(os.getpid(), signal.SIGKILL)
        numbers, x, y = batch
        ((model(x) - y) ** 2).mean().backward()
        optimizer.step()
        optimizer.zero_grad()
        steps += 1
        seen.extend(numbers.tolist() if loader.weight else [])

    if kind == "max_steps":
        for batch in loader:
            step(batch)
            if steps == 6:
                break
        seen.clear()
        for batch in loader:
            step(batch)
    elif kind == "next":
        batches = iter(loader)
        for _ in range(5):
            step(next(batches))
        hocket.settle()
        for batch in batches:
            step(batch)
    elif kind == "ahead":
        batches = iter(loader)
        following = next(batches)
        while following is not None:
            batch, following = following, next(batches, None)
            step(batch)
    elif kind == "own batches":
        for batch in loader:
            step(batch)
    elif kind == "metrics":
        for batch in loader:
            step(batch)
            assert hocket.mean(1.0) == 1.0
    return nn.utils.parameters_to_vector(model.parameters()).tolist(), seen, [mine, hocket.size()]


@pytest.mark.few(3)
@pytest.mark.parametrize("kind", ["max_steps", "next", "ahead", "metrics", "own batches"])
def test_scripts_of_other_people(pool: Pool, kind: str) -> None:
    dead, at = 1, 8 if kind == "max_steps" else 3
    found = pool.outcomes_with_death(3, train_oddly, dead, kind, dead, at, on_loss="continue", check_replicas=1)
    left = [found[0], found[2]]
    for each in left:
        assert not isinstance(each, Exception), each
    assert left[0][0] == left[1][0]
    counted = [number for _, seen, _ in left for number in seen]
    assert len(counted) == len(set(counted)), "a sample came twice"
    done = at - 6 if kind == "max_steps" else at  # steps of this epoch in which the dead one took part
    assert len(counted) == SAMPLES - done * BATCH


def leave_early() -> None:
    model, optimizer, loader = hocket.distribute(*build(), DataLoader(Numbered(), BATCH))
    for step, (_, x, y) in enumerate(loader):
        if step == 3 and hocket.rank() == 1:
            current().communicator.leave(False)  # as at the end of a script
            time.sleep(0.5)
            os._exit(0)
        ((model(x) - y) ** 2).mean().backward()
        optimizer.step()


def test_who_has_finished_is_not_lost(pool: Pool) -> None:
    found = pool.outcomes_with_death(2, leave_early, 1, on_loss="continue")
    assert "finished the script" in str(found[0])


def share_by_hand(dead: int, at: int) -> tuple[list[float], int]:
    model, optimizer = hocket.distribute(*build())
    mine, data = hocket.rank(), Numbered()
    for step in range(8):
        if (mine, step) == (dead, at):
            os.kill(os.getpid(), signal.SIGKILL)
        part = hocket.share(10)
        x, y = data.x[10 * step :][:10][part], data.y[10 * step :][:10][part]
        ((model(x) - y) ** 2).mean().backward()
        optimizer.step()
        optimizer.zero_grad()
    return nn.utils.parameters_to_vector(model.parameters()).tolist(), hocket.size()


def test_uneven_parts_without_a_loader(pool: Pool) -> None:
    """The step in hand is the mean over the samples that are left, of parts of 4, 3 and 3."""
    found = pool.outcomes_with_death(3, share_by_hand, 1, 1, 4, on_loss="continue", check_replicas=1)
    model, optimizer = build()
    data = Numbered()
    for step in range(8):
        numbers = [10 * step + i for i in range(10) if step != 4 or not 4 <= i < 7]
        ((model(data.x[numbers]) - data.y[numbers]) ** 2).mean().backward()
        optimizer.step()
        optimizer.zero_grad()
    expected = nn.utils.parameters_to_vector(model.parameters())
    for parameters, size in (found[0], found[2]):
        assert size == 2
        assert torch.allclose(torch.tensor(parameters, dtype=torch.float64), expected, rtol=1e-9, atol=1e-12)


@pytest.mark.few(5)
@product(
    "strategy",
    strategy=[
        "local_sgd(period=4)",
        "local_sgd(period=4, optimizer_state=True)",
        "diloco(period=4, outer_lr=1.0, outer_momentum=0.0)",
        "easgd(period=4)",
    ],
    phase=["forward", "after", "between"],
    step=[7, 5],
    dead=[1, 0, 2],
)
def test_a_round_ends_with_those_who_are_there(
    pool: Pool, tmp_path: Path, strategy: str, dead: int, step: int, phase: str
) -> None:
    """What the dead worker has done since the last round is lost with it, and is done again by the others."""
    deaths = {dead: (step, phase)}
    arguments = str(tmp_path), deaths, 0, strategy
    found = pool.outcomes_with_death(3, train, dead, *arguments, on_loss="continue")
    counted = check_counted(tmp_path, found, deaths, 3)
    if strategy.startswith("diloco") or strategy == "local_sgd(period=4)":
        expected = average_locally(counted)
        parameters = torch.tensor(found[(dead + 1) % 3][0], dtype=torch.float64)
        assert torch.allclose(parameters, expected, rtol=1e-9, atol=1e-12)


def wait_for_one_who_is_behind(folder: str, strategy: str, in_group: bool) -> tuple[int, list[float]]:
    """Rank 1 is killed while it waits in an exchange, as rank 0 does, and rank 2 notices that between two batches."""
    model, optimizer, loader = hocket.distribute(*build(), DataLoader(Numbered(), BATCH), strategy=strategy)
    mine, group = hocket.rank(), hocket.group([0, 2])
    (Path(folder) / f"{mine}.process").write_text(str(os.getpid()))
    hocket.barrier()
    for step, (_, x, y) in enumerate(loader):
        if (mine, step) == (1, 3):
            threading.Timer(0.2, os.kill, [os.getpid(), signal.SIGKILL]).start()
        if in_group and mine != 1:
            assert float(hocket.allreduce(torch.ones(1), "sum", group=group)) == 2
        ((model(x) - y) ** 2).mean().backward()
        optimizer.step()
        optimizer.zero_grad()
        if (mine, step) == (2, 2):
            wait_for_the_end(Path(folder) / "1.process")
    return hocket.size(), nn.utils.parameters_to_vector(model.parameters()).tolist()


@pytest.mark.few(2)
@pytest.mark.parametrize(
    ("strategy", "in_group"),
    [("mirrored", False), ("local_sgd(period=4)", False), ("delayed", False), ("mirrored", True)],
)
def test_a_worker_is_killed_while_it_waits_for_one_who_is_behind(
    pool: Pool, tmp_path: Path, strategy: str, in_group: bool
) -> None:
    arguments = str(tmp_path), strategy, in_group
    found = pool.outcomes_with_death(3, wait_for_one_who_is_behind, 1, *arguments, on_loss="continue")
    assert found[0] == found[2] and found[0][0] == 2, found


def test_a_worker_is_lost_when_another_one_is_behind(pool: Pool, tmp_path: Path) -> None:
    """A slow worker has not come to the end of one division when there is the next one."""
    deaths = {1: (5, "after"), 3: (6, "forward")}
    arguments = str(tmp_path), deaths, 0, "local_sgd(period=8)", 0
    found = pool.outcomes_with_death(4, train, deaths, *arguments, on_loss="continue")
    expected = average_locally(check_counted(tmp_path, found, deaths, 4))
    parameters = torch.tensor(found[0][0], dtype=torch.float64)
    assert torch.allclose(parameters, expected, rtol=1e-9, atol=1e-12)


@pytest.mark.few(1)
@pytest.mark.parametrize("slow", [0, 2])
def test_a_loss_is_noticed_in_a_pull_and_between_two_batches(pool: Pool, tmp_path: Path, slow: int) -> None:
    """With another number of workers ``easgd`` moves by another part; each worker brings what it has moved by."""
    deaths = {1: (5, "forward")}
    arguments = str(tmp_path), deaths, 0, "easgd(period=4)", slow
    found = pool.outcomes_with_death(3, train, deaths, *arguments, on_loss="continue")
    check_counted(tmp_path, found, deaths, 3)


@pytest.mark.few(2)
@pytest.mark.parametrize(
    ("deaths", "slow"), [({1: (8, "between")}, None), ({1: (9, "before")}, 0), ({1: (9, "before")}, 2)]
)
@pytest.mark.parametrize("processes", [0, 1])
def test_a_worker_is_lost_between_two_epochs(
    pool: Pool, tmp_path: Path, deaths: dict[int, tuple[int, str]], slow: int | None, processes: int
) -> None:
    """Of nine batches each: one worker may still be at the end of an epoch when another one has begun the next."""
    settings: dict[str, Any] = {"on_loss": "continue", "check_replicas": 1}
    found = pool.outcomes_with_death(3, train, deaths, str(tmp_path), deaths, processes, "mirrored", slow, **settings)
    check(tmp_path, found, deaths, 3)


def average_locally(counted: list[Counted]) -> torch.Tensor:
    """The law of local SGD: steps of each worker's own, and the mean of those who have come to the end of a round."""
    workers, data = {each.worker: build() for each in counted}, Numbered()
    for _, of_round in itertools.groupby(counted, key=lambda each: each.exchanges):
        there = set[int]()
        for each in of_round:
            model, optimizer = workers[each.worker]
            (((model(data.x[each.numbers]) - data.y[each.numbers]) ** 2).mean() * each.weight).backward()
            optimizer.step()
            optimizer.zero_grad()
            there.add(each.worker)
        vectors = [nn.utils.parameters_to_vector(workers[worker][0].parameters()) for worker in there]
        mean = torch.stack(vectors).mean(0).detach()
        for model, _ in workers.values():
            nn.utils.vector_to_parameters(mean.clone(), model.parameters())
    return mean
