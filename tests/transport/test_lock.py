"""Locks and turns between processes that share memory: one at a time, and the dead hold up nobody."""

import os
import signal
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import pytest

from hocket.errors import DeadlineExceeded
from hocket.transport.area import Area
from hocket.transport.lock import SharedLock
from hocket.transport.rota import Rota

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


def test_turns_pass_over_who_has_left_or_died(area: Area) -> None:
    mine = Rota(area, 0, 0, 3, 5.0)

    def be_dead_soon() -> None:
        Rota(area, 0, 2, 3, 5.0).begin([0, 2])

    with process(be_dead_soon):
        mine.wait()
        mine.pass_on()  # to rank 2, since rank 1 does not take part
    mine.wait()  # it is dead now
    mine.pass_on()
    mine.wait()  # there is nobody else
    mine.leave()
    mine.wait()


def test_who_keeps_a_turn_is_named(area: Area) -> None:
    mine = Rota(area, 0, 0, 2, 0.3)
    with process(lambda: Rota(area, 0, 1, 2, 5.0).begin([1, 0])):
        mine.wait()
        mine.pass_on()
        with pytest.raises(DeadlineExceeded, match=r"rank 1 did not take its turn within 0.3 s"):
            mine.wait()
