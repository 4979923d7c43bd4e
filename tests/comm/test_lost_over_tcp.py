"""A worker that is killed in the middle of a sum over TCP: the others are told at once, and keep nothing of it."""

import os
import signal
import threading
import time
from pathlib import Path
from typing import Any

import load
import pytest
import torch
from pool import Pool, RemoteError
from products import product
from torch.utils.data import DataLoader, TensorDataset

import hocket
from hocket.errors import WorkerLost
from hocket.job.worker import current

SOON = 1.0  # seconds in which the others are told


def add_up(folder: str, dead: int, count: int) -> float:
    """Sums until a worker is killed in one; returns after how long this one was told."""
    died = Path(folder) / "died"
    for step in range(100_000):
        value = torch.full((count,), float(hocket.rank()))
        if step == 20 and hocket.rank() == dead:
            threading.Timer(0.01, die, [died]).start()
        try:
            hocket.allreduce(value, "sum")
        except WorkerLost as error:
            assert f"rank {dead} on host" in str(error), error
            return time.time() - float(died.read_text())
    raise AssertionError("nobody was lost")


def die(said: Path) -> None:
    said.write_text(str(time.time()))
    os.kill(os.getpid(), signal.SIGKILL)


def left_over() -> list[str]:
    """Threads and connections of the job before."""
    held = {str(path.readlink()) for path in Path("/proc/self/fd").iterdir() if path.is_symlink()}
    lines = [line.split() for line in Path("/proc/self/net/tcp").read_text().splitlines()[1:]]
    connected = [f"{fields[1]} to {fields[2]}" for fields in lines if f"socket:[{fields[9]}]" in held]
    return [thread.name for thread in threading.enumerate() if thread.name.startswith("hocket")] + connected


@pytest.mark.few(3)
@product(
    "count",
    count=[10, 1_000_000],
    place=[((1, 1), 1), ((1, 1, 1, 1), 1), ((2, 2), 3)],
    encrypted=["off", "on"],
)
def test_killed(pool: Pool, tmp_path: Path, count: int, place: tuple[tuple[int, ...], int], encrypted: str) -> None:
    hosts, dead = place
    size = sum(hosts)
    found = pool.outcomes_with_death(
        size, add_up, dead, str(tmp_path), dead, count, hosts=hosts, transport="tcp", tls=encrypted
    )
    told = [found[rank] for rank in range(size) if rank != dead]
    assert not any(isinstance(each, RemoteError) for each in told), told
    assert all(seconds < SOON + load.share() - 1 for seconds in told), told
    assert pool.run(size, left_over) == [[]] * size


def train(dead: int) -> int:
    """Rank 0 asks who wants to join or to leave, and is killed before it tells the others."""
    model: torch.nn.Module = torch.nn.Linear(2, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    loader: Any = DataLoader(TensorDataset(torch.randn(30, 2)), 2)
    model, optimizer, loader = hocket.distribute(model, optimizer, loader)
    group: Any = current().communicator
    if hocket.rank() == dead:
        group._coordinator.wanted = lambda *_: os.kill(os.getpid(), signal.SIGKILL)
    for _ in range(2):
        for (x,) in loader:
            model(x).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
    return hocket.size()


def test_rank_0_is_killed_when_it_asks_who_comes(pool: Pool) -> None:
    found = pool.outcomes_with_death(3, train, 0, 0, hosts=(1, 1, 1), transport="tcp", on_loss="continue", timeout=20.0)
    assert found[1:] == [2, 2], found
