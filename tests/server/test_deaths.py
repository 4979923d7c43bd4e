"""Workers that are killed or stopped: the others go on, every batch counts once, and who comes back is judged."""

import contextlib
import multiprocessing
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
from hocket.job import worker
from hocket.strategies.base import Why

BATCHES = 24
VICTIM = 1


def wait_for(path: Path) -> str:
    deadline = time.monotonic() + 30
    while not path.exists() or not path.read_text():
        assert time.monotonic() < deadline
        time.sleep(0.005)
    return path.read_text()


def start(strategy: str, batches: int = BATCHES, processes: int = 0) -> tuple[Any, Any, Any]:
    torch.manual_seed(0)
    model = torch.nn.Linear(4, 1, dtype=torch.float64)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9)
    x = torch.randn(batches, 4, dtype=torch.float64)
    data = TensorDataset(x, torch.arange(batches))
    generator = torch.Generator().manual_seed(3)
    loader = DataLoader(
        data, 1, True, num_workers=processes, collate_fn=plain if processes else None, generator=generator
    )
    return hocket.distribute(model, optimizer, loader, strategy=strategy)


def plain(samples: list[Any]) -> tuple[list[list[float]], int]:
    """No tensors: a data process that is stopped on its way to share one would leave it in the memory of the host."""
    return [x.tolist() for x, _ in samples], int(samples[0][1])


def step(model: Any, optimizer: Any, x: torch.Tensor, number: torch.Tensor | int, done: Path) -> bool:
    """One batch, which is written down if it counts; whether it does."""
    (model(x) ** 2).mean().backward()
    late = late_pushes()
    optimizer.step()
    optimizer.zero_grad()
    if late_pushes() > late:
        return False
    with done.open("a") as file:  # one write, which is appended as a whole
        file.write(f"{int(number)}\n")
    return True


def late_pushes() -> int:
    return int(worker.current().training.strategies[0].late)  # type: ignore[attr-defined]


def finish(model: Any) -> dict[str, Any]:
    """What the living have in the end, and what they find together."""
    hocket.barrier()
    for strategy in worker.current().training.strategies:
        strategy.settle(Why.REFRESH)
    return {
        "parameters": [p.detach().clone() for p in model.parameters()],
        "mean": float(hocket.mean(torch.tensor(float(hocket.rank()), dtype=torch.float64))),
        "product": float(hocket.allreduce(torch.tensor(hocket.rank() + 2.0), "product")),
        "late": late_pushes(),
    }


def train_with_death(strategy: str, folder: str, after: int) -> dict[str, Any]:
    """The victim dies with a batch in hand; the others keep their first until it has one."""
    done, taken = Path(folder) / "done", Path(folder) / "taken"
    model, optimizer, loader = start(strategy)
    for _ in range(2):
        for count, (x, number) in enumerate(loader):
            if hocket.rank() == VICTIM and count == after:
                taken.write_text(str(int(number)))
                os.kill(os.getpid(), signal.SIGKILL)
            if hocket.rank() != VICTIM and count == after:
                wait_for(taken)
            assert step(model, optimizer, x, number, done)
    return finish(model)


def counted(folder: Path) -> Counter[int]:
    return Counter(int(line) for line in (folder / "done").read_text().split())


@pytest.mark.few(4)
@pytest.mark.parametrize("strategy", ["asynchronous", "ssp(staleness=1)", "bsp", "softsync(2)", "downpour"])
@pytest.mark.parametrize("transport", ["auto", "gloo"])
def test_a_killed_worker(pool: Pool, tmp_path: Path, strategy: str, transport: str) -> None:
    after = 0 if strategy in ("asynchronous", "downpour", "softsync(2)") else 2
    results = pool.outcomes_with_death(
        3, train_with_death, VICTIM, strategy, str(tmp_path), after, servers=2, transport=transport
    )
    for rank in (0, 2):
        assert isinstance(results[rank], dict), results[rank]
        assert results[rank]["mean"] == 1.0
        assert results[rank]["product"] == 8.0
        for mine, theirs in zip(results[0]["parameters"], results[rank]["parameters"], strict=True):
            assert torch.equal(mine, theirs)
    assert counted(tmp_path) == dict.fromkeys(range(BATCHES), 2)
    report, said = pool.served[0], pool.said
    assert report["workers"][str(VICTIM)]["lost"]
    assert not report["workers"]["0"]["lost"]
    ends = f"; round {after + 1} ends without it" if strategy == "bsp" else ""
    assert said == [f"hocket: rank {VICTIM} was lost{ends}; 1 of its batches is dealt to others"]


def until_stopped(pid: int) -> None:
    deadline = time.monotonic() + 30
    while Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "T":
        assert time.monotonic() < deadline
        time.sleep(0.005)


def train_with_stop(strategy: str, folder: str) -> dict[str, Any]:
    """The victim stops with a gradient in hand, until another worker has made many more steps.

    The servers have more patience than a worker needs that runs on a busy machine: nobody else is to be late.
    """
    done, pid, again = Path(folder) / "done", Path(folder) / "pid", Path(folder) / "again"
    model, optimizer, loader = start(strategy, batches=60)
    since = 0
    for count, (x, number) in enumerate(loader):
        if hocket.rank() == VICTIM and count == 2:
            (model(x) ** 2).mean().backward()
            optimizer.zero_grad()
            pid.write_text(str(os.getpid()))
            os.kill(os.getpid(), signal.SIGSTOP)
        if hocket.rank() == 0 and count >= 2:
            victim = int(wait_for(pid))
            since += 1
            if since == 10:
                until_stopped(victim)
                os.kill(victim, signal.SIGCONT)
                again.write_text("now")
        if hocket.rank() == 2 and count == 2 and strategy.startswith("asynchronous"):
            wait_for(again)  # or all batches could be done before rank 0 has made these steps
        step(model, optimizer, x, number, done)
    return finish(model)


@pytest.mark.few(3)
@pytest.mark.parametrize(
    ("strategy", "late"),
    [("bsp(patience=2)", 1), ("ssp(staleness=1, patience=2)", 1), ("asynchronous(patience=2)", 0)],
)
@pytest.mark.parametrize("transport", ["auto", "gloo"])
def test_a_stopped_worker(pool: Pool, tmp_path: Path, strategy: str, late: int, transport: str) -> None:
    results = pool.run(3, train_with_stop, strategy, str(tmp_path), servers=1, transport=transport)
    assert counted(tmp_path) == dict.fromkeys(range(60), 1)
    assert [result["late"] for result in results] == [0, late, 0]
    for result in results:
        assert result["mean"] == 1.0
        for mine, theirs in zip(results[0]["parameters"], result["parameters"], strict=True):
            assert torch.equal(mine, theirs)
    report, said = pool.served[0], pool.said
    assert report["workers"][str(VICTIM)]["late"] == late
    assert said == []


def die_beside_data_processes(folder: str) -> list[int]:
    """The victim's data process is stopped, so that it cannot end with the victim."""
    done, child = Path(folder) / "done", Path(folder) / "child"
    model, optimizer, loader = start("bsp", processes=1)
    for count, (x, number) in enumerate(loader):
        if hocket.rank() == VICTIM and count == 2:
            pids = [process.pid for process in multiprocessing.active_children()]
            for pid in pids:
                assert pid is not None
                os.kill(pid, signal.SIGSTOP)
            child.write_text(" ".join(map(str, pids)))
            os.kill(os.getpid(), signal.SIGKILL)
        step(model, optimizer, torch.tensor(x, dtype=torch.float64), number, done)
    orphans = [int(pid) for pid in wait_for(child).split()]
    for pid in orphans:
        os.kill(pid, 0)  # it is there, and has not kept the connection open
    return orphans


@pytest.mark.few(1)
@pytest.mark.parametrize("transport", ["auto", "gloo"])
def test_data_processes_of_a_killed_worker_do_not_hide_its_death(pool: Pool, tmp_path: Path, transport: str) -> None:
    orphans: list[int] = []
    try:
        results = pool.outcomes_with_death(
            2, die_beside_data_processes, VICTIM, str(tmp_path), servers=1, transport=transport
        )
        assert isinstance(results[0], list), results[0]
        orphans = results[0]
        assert orphans
        assert counted(tmp_path) == dict.fromkeys(range(BATCHES), 1)
    finally:
        for pid in orphans or map(int, (tmp_path / "child").read_text().split()):
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
