"""A worker that is killed in the middle of a sum over TCP: the others are told at once, and keep nothing of it."""

import os
import signal
import threading
import time
from pathlib import Path

import load
import pytest
import torch
from pool import Pool, RemoteError
from products import product

import hocket
from hocket.errors import WorkerLost

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
