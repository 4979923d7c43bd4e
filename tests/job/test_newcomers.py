"""A worker that is killed is replaced: the others go on meanwhile, and the new one has all that they have."""

import os
import signal
import time
from collections import defaultdict
from pathlib import Path
from typing import Any

import pytest
import torch
from pool import Pool
from products import product
from torch import nn
from torch.utils.data import DataLoader, Dataset

import hocket
from hocket.comm.changing_group import RegroupingCommunicator
from hocket.job.worker import current

SAMPLES, BATCH, EPOCHS = 240, 4, 6


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


def build(device: str = "cpu") -> tuple[nn.Module, torch.optim.Optimizer, torch.optim.lr_scheduler.LRScheduler]:
    torch.manual_seed(1)
    model = nn.Sequential(nn.Linear(3, 5), nn.Tanh(), nn.Linear(5, 1)).double().to(device)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    return model, optimizer, torch.optim.lr_scheduler.StepLR(optimizer, 2, 0.7)


def train(
    folder: str,
    deaths: dict[int, tuple[int, str]],
    processes: int,
    strategy: str,
    number: int = signal.SIGKILL,
    device: str = "cpu",
) -> tuple[Any, ...]:
    """Train, and write down which samples each backward pass was of; ranks of ``deaths`` get a signal once."""
    model, optimizer, scheduler = build(device)
    loader = DataLoader(Numbered(), BATCH, shuffle=True, num_workers=processes)
    model, optimizer, loader = hocket.distribute(model, optimizer, loader, strategy=strategy)
    mine = current().config.rank
    total = int(hocket.allreduce(torch.tensor([1]), "sum"))  # a call before training
    is_new = current().config.newcomer
    if is_new:
        (Path(folder) / "coming").touch()
    place = hocket.resume(model=model, optimizer=optimizer, scheduler=scheduler, loader=loader)
    hocket.barrier()
    (at_work,) = current().training.strategies
    current().notice.watch()
    steps = 0
    name = f"{mine}.{'new' if is_new else 'old'}"

    def perhaps(phase: str) -> None:
        if not is_new and deaths.get(mine) == (steps, phase):
            if number == signal.SIGKILL:
                print("dead", at_work.exchanges, file=counted)
            os.kill(os.getpid(), number)

    with (Path(folder) / name).open("w", buffering=1) as counted:
        for epoch in range(place.epoch, EPOCHS):
            for numbers, x, y in loader:
                perhaps("before")
                loss = ((model(x.to(device)) - y.to(device)) ** 2).mean()
                perhaps("forward")
                before = at_work.exchanges
                loss.backward()
                print(before, loader.weight, epoch, *numbers.tolist(), file=counted)
                perhaps("backward")
                optimizer.step()
                optimizer.zero_grad()
                perhaps("between")
                steps += 1
                while epoch == 1 and number == signal.SIGKILL and not (Path(folder) / "coming").exists():
                    time.sleep(0.005)
                time.sleep(0.01)
            scheduler.step()
    parameters: list[float] = nn.utils.parameters_to_vector(model.parameters()).tolist()
    momentum = [value.tolist() for state in optimizer.state.values() for value in state.values()]
    rates = [group["lr"] for group in optimizer.param_groups]
    return parameters, momentum, rates, hocket.rank(), hocket.size(), total, is_new


def check(folder: Path, found: list[Any], size: int) -> list[list[int]]:
    """Whether each sample has counted once in each epoch, and all are equal at the end; returns samples by step."""
    for each in found:
        assert not isinstance(each, Exception), each
    assert sorted(each[3] for each in found) == list(range(len(found)))
    assert {each[4] for each in found} == {len(found)}
    assert {each[5] for each in found} == {size}
    epochs, steps = defaultdict[int, list[int]](list), defaultdict[tuple[int, int], list[int]](list)
    for path in folder.glob("*.???"):
        *lines, last = path.read_text().splitlines()
        is_dead = last.startswith("dead")
        for line in lines if is_dead else [*lines, last]:
            exchanges, weight, epoch, *numbers = line.split()
            if float(weight) and (not is_dead or int(exchanges) < int(last.split()[1])):
                epochs[int(epoch)] += map(int, numbers)
                steps[int(epoch), int(exchanges)] += map(int, numbers)
    assert [sorted(numbers) for _, numbers in sorted(epochs.items())] == [list(range(SAMPLES))] * EPOCHS
    assert len({tuple(each[0]) for each in found}) == 1
    assert len({tuple(each[2]) for each in found}) == 1
    return [numbers for _, numbers in sorted(steps.items())]


def check_law(steps: list[list[int]], found: list[float]) -> None:
    """Whether the parameters are those of one process with the same samples in each step."""
    model, optimizer, scheduler = build()
    data, seen = Numbered(), 0
    for numbers in steps:
        ((model(data.x[numbers]) - data.y[numbers]) ** 2).mean().backward()
        optimizer.step()
        optimizer.zero_grad()
        seen += len(numbers)
        if seen % SAMPLES == 0:
            scheduler.step()
    expected = nn.utils.parameters_to_vector(model.parameters())
    assert torch.allclose(torch.tensor(found, dtype=torch.float64), expected, rtol=1e-9, atol=1e-12)


@pytest.mark.few(2)
@product(
    strategy=["mirrored", "central", "central(fused=True)"],
    phase=["forward", "between"],
    who=[(2, 1, 0), (3, 0, 0), (3, 1, 2)],
)
def test_a_lost_worker_is_replaced(
    pool: Pool, tmp_path: Path, who: tuple[int, int, int], phase: str, strategy: str
) -> None:
    size, dead, processes = who
    settings: dict[str, Any] = {"on_loss": "replace", "check_replicas": 1}
    found = pool.outcomes(
        size, train, str(tmp_path), {dead: (3, phase)}, processes, strategy, replaced=[dead], **settings
    )
    check_law(check(tmp_path, found, size), found[0][0])
    assert len({str(each[1]) for each in found}) == 1
    assert found[dead][6]


@pytest.mark.few(2)
@product(
    strategy=[
        "local_sgd(period=4)",
        "diloco(period=3)",
        "easgd(period=2)",
        "delayed",
        "dmb(extra=1)",
        "local_sgd(period=4, optimizer_state=True)",
    ],
    who=[(3, 1), (2, 0)],
)
def test_a_lost_worker_is_replaced_whose_last_steps_are_lost(
    pool: Pool, tmp_path: Path, strategy: str, who: tuple[int, int]
) -> None:
    size, dead = who
    found = pool.outcomes(
        size, train, str(tmp_path), {dead: (5, "forward")}, 0, strategy, replaced=[dead], on_loss="replace"
    )
    check(tmp_path, found, size)


def come_at_the_end(folder: str, strategy: str) -> tuple[Any, ...]:
    """The one that is left lets the new worker in when nothing is left of the epoch, in the middle of a round."""
    model, optimizer, scheduler = build()
    norm = nn.BatchNorm1d(3).double()
    both, loader = nn.Sequential(norm, model), DataLoader(Numbered(), BATCH, shuffle=True)
    hocket.distribute(both, optimizer, strategy=strategy)
    loader = hocket.distribute(loader=loader)
    is_new, here, seen = current().config.newcomer, Path(folder), 0
    group: Any = current().communicator
    while is_new and not (here / "last").exists():
        time.sleep(0.005)
    place = hocket.resume(model=both, optimizer=optimizer, scheduler=scheduler, loader=loader)
    for epoch in range(place.epoch, 3):
        for numbers, x, y in loader:
            if group._coordinator.rank == 1 and not is_new and epoch == 0:
                os.kill(os.getpid(), signal.SIGKILL)
            seen += len(numbers) if epoch == 1 else 0
            ((both(x) - y) ** 2).mean().backward()
            optimizer.step()
            optimizer.zero_grad()
            if epoch == 1 and seen == SAMPLES:
                (here / "last").touch()
                while not any(group._coordinator.wanted().values()) or time.monotonic() < group._next_look:
                    time.sleep(0.005)
        scheduler.step()
        hocket.barrier()
    state = [value.tolist() for value in both.state_dict().values()]
    return repr(state), hocket.size(), place.epoch if is_new else seen


@pytest.mark.few(2)
@pytest.mark.parametrize(
    "strategy",
    [
        "local_sgd(period=7)",
        "diloco(period=7)",
        "easgd(period=7)",
        "local_sgd(period=7) -> mirrored @ epoch 3",
        "mirrored -> easgd(period=7) @ epoch 3",
    ],
)
def test_a_new_worker_comes_when_nothing_is_left_of_the_epoch(pool: Pool, tmp_path: Path, strategy: str) -> None:
    settings: dict[str, Any] = {"on_loss": "replace", "timeout": 50.0}
    found = pool.outcomes(2, come_at_the_end, str(tmp_path), strategy, replaced=[1], **settings)
    assert found[0][0] == found[1][0], found
    assert [each[1:] for each in found] == [(2, SAMPLES), (2, 1)]


def come_between_two_gradients(folder: str, strategy: str) -> tuple[Any, ...]:
    """A step on the gradients of two batches; a new worker is there after the first one."""
    model, optimizer, scheduler = build()
    model, optimizer, loader = hocket.distribute(model, optimizer, DataLoader(Numbered(), BATCH), strategy=strategy)
    is_new, here = current().config.newcomer, Path(folder)
    group: Any = current().communicator
    while is_new and not (here / "half").exists():
        time.sleep(0.005)
    place = hocket.resume(model=model, optimizer=optimizer, scheduler=scheduler, loader=loader)
    for epoch in range(place.epoch, 3):
        for number, (_, x, y) in enumerate(loader):
            if group._coordinator.rank == 1 and not is_new and epoch == 0:
                os.kill(os.getpid(), signal.SIGKILL)
            (((model(x) - y) ** 2).mean() / 2).backward()
            if number % 2 == 1:
                optimizer.step()
                optimizer.zero_grad()
            elif epoch == 1 and not (here / "half").exists():
                (here / "half").touch()
                while not any(group._coordinator.wanted().values()) or time.monotonic() < group._next_look:
                    time.sleep(0.005)
    parameters: list[float] = nn.utils.parameters_to_vector(model.parameters()).tolist()
    return parameters, hocket.size(), is_new


@pytest.mark.few(1)
@pytest.mark.parametrize("strategy", ["mirrored", "central"])
def test_nobody_comes_while_gradients_are_accumulated(pool: Pool, tmp_path: Path, strategy: str) -> None:
    settings: dict[str, Any] = {"on_loss": "replace", "check_replicas": 1, "timeout": 50.0}
    found = pool.outcomes(2, come_between_two_gradients, str(tmp_path), strategy, replaced=[1], **settings)
    assert found[0][0] == found[1][0] and [each[1:] for each in found] == [(2, False), (2, True)], found


def leave_when_one_comes(strategy: str, leaver: int) -> tuple[Any, ...]:
    """Rank 2 dies, and another one is told to leave when the new worker is there."""
    model, optimizer, scheduler = build()
    loader = DataLoader(Numbered(), BATCH, shuffle=True)
    model, optimizer, loader = hocket.distribute(model, optimizer, loader, strategy=strategy)
    notice, group, is_new = current().notice, current().communicator, current().config.newcomer
    extra = {} if is_new else {"of the script": 7}
    place = hocket.resume(model=model, optimizer=optimizer, scheduler=scheduler, loader=loader, extra=extra)
    assert isinstance(group, RegroupingCommunicator)
    notice.watch()
    for epoch in range(place.epoch, 3):
        for _, x, y in loader:
            if group._coordinator.rank == 2 and epoch == 0 and not is_new:
                os.kill(os.getpid(), signal.SIGKILL)
            ((model(x) - y) ** 2).mean().backward()
            optimizer.step()
            optimizer.zero_grad()
            if group._coordinator.rank == leaver and epoch == 1 and not notice.is_given:
                while not group._coordinator.wanted()["joining"]:
                    time.sleep(0.005)
                os.kill(os.getpid(), signal.SIGTERM)
        scheduler.step()
    parameters: list[float] = nn.utils.parameters_to_vector(model.parameters()).tolist()
    return parameters, extra, hocket.size(), is_new


@pytest.mark.few(1)
@product(strategy=["mirrored", "central", "local_sgd(period=4)"], leaver=[0, 1])
def test_a_newcomer_has_all_though_another_leaves_at_the_same_time(pool: Pool, strategy: str, leaver: int) -> None:
    settings: dict[str, Any] = {"on_loss": "replace", "check_replicas": 1, "timeout": 50.0}
    found = pool.outcomes(3, leave_when_one_comes, strategy, leaver, replaced=[2], **settings)
    assert found[leaver].kind == "Left"
    stayed = found[1 - leaver]
    assert stayed[1:] == ({"of the script": 7}, 2, False) and found[2] == (*stayed[:3], True), found


@pytest.mark.few(1)
@product(phase=["forward", "between"], who=[(2, 1), (3, 0), (4, 2)])
def test_a_worker_leaves_on_notice(pool: Pool, tmp_path: Path, who: tuple[int, int], phase: str) -> None:
    size, told = who
    outcomes = pool.outcomes(
        size, train, str(tmp_path), {told: (3, phase)}, 0, "mirrored", signal.SIGTERM, on_loss="continue"
    )
    assert outcomes[told].kind == "Left"
    steps = check(tmp_path, [each for rank, each in enumerate(outcomes) if rank != told], size)
    check_law(steps, outcomes[1 - told if size == 2 else size - 1][0])
    whole = size * BATCH
    rest = [SAMPLES % whole] if SAMPLES % whole else []
    assert [len(numbers) for numbers in steps] == ([whole] * (SAMPLES // whole) + rest) * EPOCHS  # no step is lost


def end_a_child() -> int:
    model, optimizer, _ = build()
    hocket.distribute(model, optimizer)
    current().notice.watch()
    reader, writer = os.pipe()
    if (child := os.fork()) == 0:
        os.write(writer, b"!")
        time.sleep(60)
        os._exit(0)
    assert os.read(reader, 1)
    os.close(reader)
    os.close(writer)
    os.kill(child, signal.SIGTERM)
    return os.waitpid(child, 0)[1]


def test_a_child_of_the_script_ends_with_sigterm(pool: Pool) -> None:
    assert pool.run(2, end_a_child, on_loss="continue") == [signal.SIGTERM, signal.SIGTERM]
