"""A board on which workers leave short messages for each other: what torch.distributed calls a store."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence

from hocket.errors import JobError
from hocket.transport.waiting import Condition, Note, doze

_MOST_VALUE = 1 << 20  # bytes of one value
_MOST = 64 << 20  # bytes of all keys and values


class Board:
    """Values by key. Every method may be called by any thread.

    Args:
        condition: Guards everything here; whoever waits for a key sleeps in it.
        clock: Tells the time.
    """

    def __init__(self, condition: Condition, clock: Callable[[], float] = time.monotonic) -> None:
        self._condition, self._clock = condition, clock
        self._values: dict[str, bytes] = {}
        self._nbytes = 0

    def set(self, key: str, value: bytes) -> None:
        """Give ``key`` a value."""
        with self._condition:
            self._put(key, value)

    def get(self, key: str, seconds: float, note: Note) -> bytes | None:
        """The value of ``key``; waits for it until the timeout."""
        return self._values.get(key) if self.wait([key], seconds, note) else None

    def wait(self, keys: Sequence[str], seconds: float, note: Note) -> bool:
        """Whether all ``keys`` have a value; waits for them until the timeout, or until who has asked is gone."""
        deadline = self._clock() + seconds
        with self._condition:
            while not all(key in self._values for key in keys):
                left = deadline - self._clock()
                if left <= 0:
                    return False
                doze(self._condition, note, left)
            return True

    def add(self, key: str, amount: int) -> int:
        """Add to the number at ``key``, which is 0 at first; returns the sum."""
        with self._condition:
            total = int(self._values.get(key, b"0")) + amount
            self._put(key, str(total).encode())
            return total

    def compare_set(self, key: str, expected: bytes, desired: bytes) -> bytes:
        """Replace the value ``expected`` (empty for none) of ``key`` by ``desired``; returns the value it has then."""
        with self._condition:
            if self._values.get(key, b"") == expected:
                self._put(key, desired)
            return self._values.get(key, expected)

    def delete(self, key: str) -> bool:
        """Take a key away; whether it had a value."""
        with self._condition:
            value = self._values.pop(key, None)
            self._nbytes -= 0 if value is None else len(key) + len(value)
            return value is not None

    def __len__(self) -> int:
        return len(self._values)

    def _put(self, key: str, value: bytes) -> None:
        before = self._values.get(key)
        nbytes = self._nbytes + len(key) + len(value) - (0 if before is None else len(key) + len(before))
        if len(value) > _MOST_VALUE or nbytes > _MOST:
            raise JobError(
                f"{len(value):,} bytes for {key!r}, and the coordinator keeps {_MOST_VALUE:,} for a key and {_MOST:,} "
                "in all: use hocket.allgather() or hocket.broadcast() for data"
            )
        self._values[key], self._nbytes = value, nbytes
        self._condition.notify_all()
