"""A real exchange between two processes over shared memory, to find out whether it works here; without torch."""

from __future__ import annotations

import contextlib
import ctypes
import mmap
import os
import signal
import time

from hocket.transport import futex


def exchange(rounds: int = 200, seconds: float = 3.0) -> float:
    """Hand a word to and fro between this process and a child that it forks; call it with one thread only.

    Returns:
        The median of the seconds that one way takes.

    Raises:
        OSError: this machine gives no shared memory.
        TimeoutError: the other process was not heard in time.
    """
    assert futex.supported()
    descriptor = os.memfd_create("hocket-trial", os.MFD_CLOEXEC)
    try:
        os.ftruncate(descriptor, mmap.PAGESIZE)
        os.posix_fallocate(descriptor, 0, mmap.PAGESIZE)
        memory = mmap.mmap(descriptor, mmap.PAGESIZE)
    finally:
        os.close(descriptor)
    words = (ctypes.c_uint32 * 32).from_buffer(memory)  # two of them are used, on two lines of the cache
    deadline = time.monotonic() + seconds
    child = os.fork()
    if child == 0:
        with contextlib.suppress(BaseException):
            for turn in range(1, rounds + 1):
                _await(words, 0, turn, deadline)
                _say(words, 16, turn)
        os._exit(0)
    try:
        times = []
        for turn in range(1, rounds + 1):
            begun = time.perf_counter()
            _say(words, 0, turn)
            _await(words, 16, turn, deadline)
            times.append(time.perf_counter() - begun)
    finally:
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)
    return sorted(times)[rounds // 2] / 2


def _say(words: ctypes.Array[ctypes.c_uint32], index: int, turn: int) -> None:
    words[index] = turn
    futex.wake(ctypes.addressof(words) + 4 * index)


def _await(words: ctypes.Array[ctypes.c_uint32], index: int, turn: int, deadline: float) -> None:
    while (seen := int(words[index])) != turn:
        if time.monotonic() > deadline:
            raise TimeoutError("the other process was not heard")
        futex.wait(ctypes.addressof(words) + 4 * index, seen, 0.1)
