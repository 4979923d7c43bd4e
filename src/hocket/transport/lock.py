"""A lock between processes that map the same memory; the kernel takes it from a process that dies.

A record lock on the ``memfd`` says which process has the lock, and a futex wakes those that wait. The descriptor of the
area must stay open, and be the only one of this process for that memory: closing another one would give up the lock.
"""

from __future__ import annotations

import fcntl
import time

from hocket.errors import DeadlineExceeded
from hocket.transport import futex
from hocket.transport.area import LINE, Area

_SLICE = 0.1  # seconds of sleep between two looks
_NEWS, _HOLDER = 0, 1  # words: one changes with every release; one names the last holder


class SharedLock:
    """A lock in one line of ``area``; used in a ``with`` statement, by one thread of each process.

    Args:
        area: The memory that all ranks map.
        offset: Where the lock's line begins in the area.
        rank: The rank of this process.
        timeout: Seconds to wait at most.
    """

    def __init__(self, area: Area, offset: int, rank: int, timeout: float) -> None:
        self._area, self._offset, self._rank, self._timeout = area, offset, rank, timeout
        self._words = area.words[offset : offset + LINE].cast("I")
        self._address = area.address() + offset
        self._releases = 0
        self.waited = 0.0  # seconds that this process has waited for the lock

    def __enter__(self) -> None:
        """Take the lock.

        Raises:
            DeadlineExceeded: another rank, which is named, has kept the lock too long.
        """
        if not try_record(self._area, self._offset):
            self._wait()
        self._words[_HOLDER] = self._rank

    def __exit__(self, *_: object) -> None:
        free_record(self._area, self._offset)
        # A number that no release has written before, so that a process that saw another one does not fall asleep.
        self._releases += 1
        self._words[_NEWS] = (self._rank << 22 | self._releases & (1 << 22) - 1) & 0xFFFFFFFF
        futex.fence()
        futex.wake(self._address, 1)

    def _wait(self) -> None:
        begin = time.monotonic()
        while True:
            seen = self._words[_NEWS]
            if try_record(self._area, self._offset):
                break
            futex.wait(self._address, seen, _SLICE)
            if time.monotonic() - begin > self._timeout:
                raise DeadlineExceeded(
                    f"rank {self._words[_HOLDER]} has kept the lock on shared parameters for {self._timeout:g} s: is "
                    "its process stopped? If that is honest work, raise --timeout"
                )
        self.waited += time.monotonic() - begin


def try_record(area: Area, offset: int) -> bool:
    """Lock one byte of ``area`` for this process, unless another one has it."""
    try:
        fcntl.lockf(area.descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB, 1, offset)
    except (BlockingIOError, PermissionError):
        return False
    return True


def free_record(area: Area, offset: int) -> None:
    """Unlock one byte of ``area``."""
    fcntl.lockf(area.descriptor, fcntl.LOCK_UN, 1, offset)
