"""Ranks of one host do something in turns: 0, 1, …, and 0 again; who is out, or has died, is passed over."""

from __future__ import annotations

import time
from collections.abc import Collection

from hocket.errors import DeadlineExceeded
from hocket.transport import futex
from hocket.transport.area import LINE, Area, aligned
from hocket.transport.lock import SharedLock, free_record, try_record

_SLICE = 0.1  # seconds of sleep between two looks at whether the others live
_NEWS, _TURN, _IN = 0, 1, 2  # words: changes with every turn; whose it is; from here on, who takes part
_NOBODY = 0xFFFFFFFF


class Rota:
    """Whose turn it is, in ``area`` from ``offset`` on; nobody takes part before ``begin``.

    A process shows that it lives by a record lock on a byte of its own, which ends with it.

    Args:
        area: That all ranks map; its descriptor must stay open.
        offset: Where in it.
        rank: Of this process, of ``size``.
        size: Likewise.
        timeout: Seconds to wait for one rank at most.
    """

    @staticmethod
    def nbytes(size: int) -> int:
        """How much of the area is needed."""
        return LINE + aligned(size) + aligned(4 * (_IN + size))

    def __init__(self, area: Area, offset: int, rank: int, size: int, timeout: float) -> None:
        self._area, self._rank, self._size, self._timeout = area, rank, size, timeout
        self._lock = SharedLock(area, offset, rank, timeout)
        self._signs = offset + LINE
        table = self._signs + aligned(size)
        self._words = area.words[table : table + aligned(4 * (_IN + size))].cast("I")
        self._address = area.address() + table
        self.waited = 0.0  # seconds so far
        try_record(area, self._signs + rank)

    def begin(self, ranks: Collection[int]) -> None:
        """These take part, from the first of them on; all of them say the same, and none waits for its turn yet."""
        with self._lock:
            for rank in range(self._size):
                self._words[_IN + rank] = rank in ranks
            self._give(min(ranks))

    def wait(self) -> None:
        """Until it is this rank's turn; takes part again, if it did not.

        Raises:
            DeadlineExceeded: a rank, which is named, has kept its turn too long.
        """
        words, mine = self._words, self._rank
        if not words[_IN + mine]:
            with self._lock:
                words[_IN + mine] = 1
                if words[_TURN] == _NOBODY:
                    self._give(mine)
        begin = since = time.monotonic()
        holder = mine
        while True:
            seen, turn = words[_NEWS], words[_TURN]
            if turn == mine:
                break
            if turn != holder:
                holder, since = turn, time.monotonic()
            futex.wait(self._address, seen, _SLICE)
            waited = time.monotonic() - since
            if waited > _SLICE and holder < self._size and words[_TURN] == holder:
                self._pass_over_dead(holder)
            if waited > self._timeout:
                raise DeadlineExceeded(
                    f"rank {holder} did not take its turn within {self._timeout:g} s: see its output, or give it more "
                    "time with --timeout"
                )
        self.waited += time.monotonic() - begin

    def pass_on(self) -> None:
        """This rank has taken its turn."""
        with self._lock:
            self._give(self._next(self._rank))

    def leave(self) -> None:
        """This rank takes no turns until it waits for one."""
        with self._lock:
            self._words[_IN + self._rank] = 0
            if self._words[_TURN] == self._rank:
                self._give(self._next(self._rank))

    def _pass_over_dead(self, rank: int) -> None:
        if not try_record(self._area, self._signs + rank):
            return
        free_record(self._area, self._signs + rank)
        with self._lock:
            self._words[_IN + rank] = 0
            if self._words[_TURN] == rank:
                self._give(self._next(rank))

    def _next(self, rank: int) -> int:
        """Who comes after ``rank``; itself, if it is the only one."""
        order = [(rank + step) % self._size for step in range(1, self._size + 1)]
        return next((each for each in order if self._words[_IN + each]), _NOBODY)

    def _give(self, rank: int) -> None:
        """The lock is held."""
        self._words[_TURN] = rank
        self._words[_NEWS] = self._words[_NEWS] + 1 & 0xFFFFFFFF
        futex.fence()
        futex.wake(self._address)
