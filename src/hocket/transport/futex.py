"""Sleep until a 32-bit word in shared memory changes, without holding a core.

Only for x86-64 Linux: the word is written by plain stores, which that architecture keeps in order, and the
system call has number 202 there. ``supported`` says whether this machine is one.
"""

from __future__ import annotations

import ctypes
import os
import platform
import sys
import threading

_FUTEX = 202
_WAIT, _WAKE = 0, 1
_EVERYONE = 2**31 - 1


class _Timespec(ctypes.Structure):
    _fields_ = (("seconds", ctypes.c_long), ("nanoseconds", ctypes.c_long))


def supported() -> bool:
    """Whether this machine has the memory order and the system call that the shared-memory transport needs."""
    return sys.platform == "linux" and platform.machine() in ("x86_64", "AMD64") and hasattr(os, "memfd_create")


if supported():
    _syscall = ctypes.CDLL(None, use_errno=True).syscall
    _syscall.restype = ctypes.c_long
    _syscall.argtypes = (ctypes.c_long, ctypes.c_void_p, ctypes.c_int, ctypes.c_uint32, ctypes.c_void_p)


def wait(address: int, seen: int, seconds: float) -> None:
    """Sleep while the word at ``address`` holds ``seen``, at most ``seconds``.

    Returns for any reason (a change, a wake-up, a signal, the time); the caller looks at the word again.
    """
    limit = _Timespec(int(seconds), int(seconds % 1 * 1e9))
    _syscall(_FUTEX, address, _WAIT, seen, ctypes.addressof(limit))


def wake(address: int, count: int = _EVERYONE) -> None:
    """Wake ``count`` sleepers, by default all, on the word at ``address``."""
    _syscall(_FUTEX, address, _WAKE, count, None)


_fence_lock = threading.Lock()


def fence() -> None:
    """Make this process's stores visible before its next load.

    x86-64 lets a load overtake an earlier store to another address. Taking a lock executes a locked
    instruction, which does not let anything pass, at a twentieth of the price of a system call.
    """
    _fence_lock.acquire()
    _fence_lock.release()
