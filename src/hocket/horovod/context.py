"""This worker between ``hvd.init()`` and ``hvd.shutdown()``: its process sets, and the engine of each."""

from __future__ import annotations

import atexit
import itertools
import os
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from weakref import WeakKeyDictionary

from hocket import config
from hocket.comm.changing_group import RegroupingCommunicator
from hocket.comm.communicator import Communicator
from hocket.events import Stage
from hocket.horovod.cycles import Cycles, Pace
from hocket.horovod.exceptions import HorovodInternalError
from hocket.horovod.execution import FUSION
from hocket.job import worker as workers
from hocket.job.worker import Worker

GLOBAL = 0
"""The number of the process set of all ranks."""


class Context:
    """The process sets of this worker, by number.

    Args:
        worker: The worker.
    """

    def __init__(self, worker: Worker) -> None:
        self.worker, self.process = worker, os.getpid()
        self.pace = read_pace(worker.config.timeout)
        self.ranks: dict[int, tuple[int, ...]] = {}
        self._engines: dict[int, Cycles] = {}
        self._numbers = itertools.count()
        self.open(range(worker.config.size))

    @property
    def communicator(self) -> Communicator:
        """The workers of this generation."""
        found = self.worker.communicator
        return found.group if isinstance(found, RegroupingCommunicator) else found

    def open(self, ranks: Iterable[int]) -> int:
        """Make a process set of these ranks; all workers call this. Returns its number."""
        number, members = next(self._numbers), tuple(sorted(ranks))
        group = self.worker.communicator.persist(
            lambda: self.communicator.open_group(self._new_name(), self._members(number, members))
        )
        self.ranks[number] = members = self._members(number, members)
        if group is not None:
            self._engines[number] = Cycles(group, members, self.pace, f"process set {number}")
        return number

    def _new_name(self) -> str:
        """A name that no other group of this generation has had, on all workers."""
        generation = self.worker.communicator.generation
        opened = _opened.setdefault(self.worker, Counter())
        opened[generation] += 1
        return f"horovod {generation}.{opened[generation]}"

    def _members(self, number: int, ranks: Sequence[int]) -> tuple[int, ...]:
        """The ranks of a process set: all, of that of all, also if workers were lost a moment ago."""
        return tuple(range(self.worker.config.size)) if number == GLOBAL else tuple(ranks)

    def engine(self, number: int) -> Cycles:
        """The engine of a process set that this worker is a member of."""
        if number not in self.ranks:
            raise ValueError(f"process set {number} is not known here: add it with hvd.add_process_set()")
        if number not in self._engines:
            raise ValueError(
                f"rank {self.worker.config.rank} is no member of process set {number}, which has ranks "
                f"{', '.join(map(str, self.ranks[number]))}: let only its members make this call"
            )
        if os.getpid() != self.process:
            raise HorovodInternalError(
                f"process {os.getpid()} was forked from worker {self.process}, and is none: let that make this call"
            )
        return self._engines[number]

    def remove(self, number: int) -> None:
        """Forget a process set; all workers call this."""
        engine = self._engines.pop(number, None)
        del self.ranks[number]
        if engine is not None:
            engine.close()

    def close(self) -> None:
        """End all engines."""
        if os.getpid() == self.process:
            for engine in self._engines.values():
                engine.close()
        self._engines.clear()
        self.ranks.clear()


_context: Context | None = None
_opened: WeakKeyDictionary[Worker, Counter[int]] = WeakKeyDictionary()  # groups so far, in each generation
on_stop: list[Callable[[], None]] = []
"""Called before a context ends."""
on_start: list[Callable[[], None]] = []
"""Called when a context has begun."""


def start() -> Context:
    """Become a worker, and open the process set of all ranks; all workers call this."""
    global _context
    if _context is None:
        workers.init()
        worker = workers.current()
        if isinstance(worker.communicator, RegroupingCommunicator) and not worker.communicator.is_in:
            worker.communicator.join()  # the job goes on already; the others are at a commit
            worker.sink.put(Stage("joined"))
        worker.forgotten.has_met = True  # the script trains by Horovod's means
        _context = Context(worker)
        for call in on_start:
            call()
        atexit.register(stop)
    return _context


def stop() -> None:
    """End what ``start`` has begun; it may be called again."""
    global _context
    if _context is not None:
        for call in on_stop:
            call()
        context, _context = _context, None
        atexit.unregister(stop)
        context.close()


def current() -> Context:
    """What ``start`` has begun."""
    if _context is None:
        raise ValueError("Horovod has not been initialized; use hvd.init().")
    return _context


def is_started() -> bool:
    """Whether this worker is between ``hvd.init()`` and ``hvd.shutdown()``."""
    return _context is not None


def read_pace(timeout: float) -> Pace:
    """When things are done, by Horovod's variables; a worker that is alive is waited for up to ``timeout``."""
    environment = config.environment()

    def number(name: str, default: float) -> float:
        try:
            return float(environment.get(name) or default)
        except ValueError:
            raise ValueError(f"{name}={environment[name]!r} is no number") from None

    stall = number("HOROVOD_STALL_CHECK_TIME_SECONDS", 60.0)
    if environment.get("HOROVOD_STALL_CHECK_DISABLE", "0") not in ("", "0"):
        stall = 0.0
    return Pace(
        cycle=number("HOROVOD_CYCLE_TIME", 1.0) / 1000,
        threshold=int(number("HOROVOD_FUSION_THRESHOLD", FUSION)),
        stall=stall,
        give_up=number("HOROVOD_STALL_SHUTDOWN_TIME_SECONDS", 0.0) or timeout,
    )


def members_of(ranks: Sequence[int], size: int) -> tuple[int, ...]:
    """The ranks of a process set, in order, after a look at them."""
    found = sorted(ranks)
    if not found or len(set(found)) < len(found) or any(not 0 <= rank < size for rank in found):
        raise ValueError(f"a process set of ranks {list(ranks)}: give at least one, each once, of 0 to {size - 1}")
    return tuple(found)
