"""Locks and turns between processes that share memory: one at a time, and the dead hold up nobody."""

import os
import signal
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import pytest

from hocket.errors import DeadlineExceeded
from hocket.transport.area import Area
from hocket.transport.lock import SharedLock

COUNTS = 2048  # where in the area the test keeps numbers of its own


@pytest.fixture
def area() -> Iterator[Area]:
    made = Area.create(4096, "test")
    yield made
    made.close_descriptor()


@contextmanager
def process(work: Callable[[], None]) -> Iterator[int]:
    """A process that works and then waits to be killed; when it has done its work, it says so."""
    reader, writer = os.pipe()
    pid = os.fork()
    if pid == 0:
        try:
            work()
            os.write(writer, b"x")
            signal.pause()
        finally:
            os._exit(1)
    os.close(writer)
    try:
        assert os.read(reader, 1) == b"x"
        yield pid
    finally:
        os.close(reader)
        os.kill(pid, signal.SIGKILL)
        os.waitpid(pid, 0)


def test_one_at_a_time(area: Area) -> None:
    numbers = area.words[COUNTS : COUNTS + 8].cast("Q")

    def count(rank: int, times: int) -> None:
        lock = SharedLock(area, 0, rank, 20.0)
        for _ in range(times):
            with lock:
                numbers[0] = numbers[0] + 1

    pid = os.fork()
    if pid == 0:
        try:
            count(1, 3000)
        finally:
            os._exit(0)
    count(0, 3000)
    os.waitpid(pid, 0)
    assert numbers[0] == 6000


def test_the_lock_of_a_dead_process_is_free_and_that_of_a_stopped_one_is_named(area: Area) -> None:
    mine = SharedLock(area, 0, 0, 0.3)
    text = r"rank 3 has kept the lock on shared parameters for 0.3 s"
    with process(lambda: SharedLock(area, 0, 3, 5.0).__enter__()), pytest.raises(DeadlineExceeded, match=text):
        mine.__enter__()
    with mine:
        pass
