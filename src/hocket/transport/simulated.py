"""Simulated workers: threads of which one runs at a time, on a virtual clock, so that every run is the same."""

from __future__ import annotations

import heapq
import math
import sys
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any, Generic, TypeVar

from hocket.errors import JobError

T = TypeVar("T")


@dataclass(frozen=True)
class Speed:
    """The network between two simulated processes.

    Attributes:
        latency: Seconds that a message takes, however small it is.
        bandwidth: Bytes per second.
    """

    latency: float = 0.0
    bandwidth: float = math.inf

    def seconds(self, nbytes: int) -> float:
        """How long one message takes."""
        return self.latency + nbytes / self.bandwidth


class Simulation:
    """A virtual clock, and the simulated threads that live by it.

    A thread runs until it sleeps, waits or ends, and no time passes meanwhile. Then the thread with the earliest time
    goes on; of several, the one that was started first. What is to happen ``at`` a time happens before the threads of
    that time go on.

    Args:
        limit: Virtual seconds after which the simulation is taken to go on forever.
        keep: Called when a thread pauses; what it returns is called when that thread goes on. So each thread can have
            something of its own that the process has only one of, such as random numbers.
    """

    def __init__(self, limit: float = 1e6, keep: Callable[[], Callable[[], None]] | None = None) -> None:
        self._limit, self._keep = limit, keep
        self._events: list[tuple[float, int, Callable[[], None]]] = []
        self._scheduled = 0
        self._time = 0.0
        self._started = 0
        self._live: dict[SimulatedThread[Any], None] = {}  # in the order in which they were started
        self._ready: list[tuple[float, int, SimulatedThread[Any]]] = []  # when each goes on; may have outdated entries
        self.threads: set[threading.Thread] = set()  # threads that nobody has joined
        self.current: SimulatedThread[Any] | None = None
        self.failure: BaseException | None = None
        self._over = threading.Event()

    def run(self, functions: Sequence[Callable[[], T]]) -> list[T]:
        """Call every function in a simulated thread of its own; returns their results, when all threads have ended.

        Raises:
            Exception: the first that one of the functions raises; the others are ended where they wait.
            JobError: all threads wait for each other, or the limit was passed.
        """
        tasks = [self._make(function, f"worker {number}", True) for number, function in enumerate(functions)]
        if not tasks:
            return []
        self._over.clear()
        try:
            self._hand_over()
            self._over.wait()
        except BaseException as error:  # ctrl-C: the threads end when they wait next
            self.failure = self.failure or error
        self._over.wait()
        for thread in self.threads:
            thread.join()
        self.threads.clear()
        failure, self.failure = self.failure, None
        if failure is not None:
            raise failure
        return [task.result() for task in tasks]

    def now(self) -> float:
        """Virtual seconds since the beginning."""
        return self._time

    def sleep(self, seconds: float) -> None:
        """Let virtual time pass."""
        self.pause(self._time + max(seconds, 0.0))

    def start(self, function: Callable[[], T], name: str) -> SimulatedThread[T]:
        """Call a function in another simulated thread; ``result()`` raises what the function raises."""
        return self._make(function, name, False)

    def at(self, time: float, work: Callable[[], None]) -> None:
        """Have ``work``, which waits for nobody, called at a virtual time; in the order given if times are equal."""
        heapq.heappush(self._events, (max(time, self._time), self._scheduled, work))
        self._scheduled += 1

    def condition(self) -> SimulatedCondition:
        """A condition in which simulated threads wait."""
        return SimulatedCondition(self)

    def pause(self, until: float) -> None:
        """Let others run until a virtual time, or until somebody sets another one for this thread."""
        me = self.current
        assert isinstance(me, SimulatedThread), "only a simulated thread can wait"
        if self.failure is not None:
            raise _Ended
        me.ready, me.frame = until, sys._getframe(1)
        restore = None if self._keep is None else self._keep()
        self._hand_over()
        me.baton.acquire()
        me.frame = None
        if restore is not None:
            restore()
        if self.failure is not None:
            raise _Ended

    def note(self, ready: float, number: int, task: SimulatedThread[Any]) -> None:
        """The time at which a thread goes on has changed."""
        heapq.heappush(self._ready, (ready, number, task))

    def end(self, task: SimulatedThread[Any], error: BaseException | None) -> None:
        """A thread has ended: let the next one run."""
        del self._live[task]
        if error is not None and self.failure is None:
            self.failure = error
        if self._live:
            self._hand_over()
        else:
            self.current = None
            self._over.set()

    def _make(self, function: Callable[[], T], name: str, is_worker: bool) -> SimulatedThread[T]:
        task = SimulatedThread(self, function, name, self._started, is_worker)
        self._started += 1
        self._live[task] = None
        self.threads.add(task.thread)
        task.thread.start()
        return task

    def _hand_over(self) -> None:
        """Let the next thread run."""
        following = self._run_events()
        if self.failure is None and not following.ready < self._limit:
            self.failure = JobError(self._describe_stop(following.ready))
        if self.failure is not None:
            following = next(iter(self._live))  # threads end one after the other
        else:
            self._time = max(self._time, following.ready)
        self.current = following
        following.baton.release()

    def _run_events(self) -> SimulatedThread[Any]:
        """Call what is to happen before the next thread goes on; returns that thread."""
        while True:
            following = self._next()
            if not self._events or self._events[0][0] > min(following.ready, self._limit) or self.failure is not None:
                return following
            self._time, _, work = heapq.heappop(self._events)
            self.current = _NOBODY
            try:
                work()
            except BaseException as error:
                self.failure = error

    def _next(self) -> SimulatedThread[Any]:
        """The thread that goes on next; any thread, if none can go on."""
        while self._ready:
            ready, _, task = self._ready[0]
            if task in self._live and task.ready == ready:
                return task
            heapq.heappop(self._ready)  # the thread has ended, or its time has changed
        return next(iter(self._live))

    def _describe_stop(self, ready: float) -> str:
        waits = "; ".join(f"{task.name} in {task.place}" for task in self._live)
        if ready == math.inf:
            return f"at {self._time:g} s all wait for each other: {waits}"
        return f"no end after {self._limit:g} s: {waits}"


class _Ended(BaseException):
    """Ends a simulated thread where it waits; nothing but the thread's own end catches it."""


class SimulatedThread(Generic[T]):
    """A simulated thread."""

    def __init__(self, simulation: Simulation, function: Callable[[], T], name: str, number: int, is_worker: bool):
        self._simulation, self._function, self._is_worker = simulation, function, is_worker
        self.name, self._number = name, number
        self.ready = simulation.now()
        self.frame: Any = None  # the frame in which the thread waits
        self.baton = threading.Lock()  # released when this thread may run
        self.baton.acquire()
        self._is_done = False
        self._found: list[T] = []
        self._error: BaseException | None = None
        self._waiting: list[SimulatedThread[Any]] = []
        self.thread = threading.Thread(target=self._run, name=f"simulated-{number}", daemon=True)

    @property
    def ready(self) -> float:
        """When the thread goes on; infinity if somebody has to wake it."""
        return self._ready

    @ready.setter
    def ready(self, time: float) -> None:
        self._ready = time
        if time < math.inf:
            self._simulation.note(time, self._number, self)

    @property
    def place(self) -> str:
        """Where the thread waits, for a reader."""
        frame = self.frame
        while frame is not None and frame.f_code.co_filename == __file__:
            frame = frame.f_back
        if frame is None:
            return "the beginning"
        return f"{frame.f_code.co_qualname} ({Path(frame.f_code.co_filename).name}:{frame.f_lineno})"

    def result(self) -> T:
        """What the function returned, or raise what it raised; blocks the simulated thread that asks."""
        while not self._is_done:
            assert self._simulation.current is not None
            self._waiting.append(self._simulation.current)
            self._simulation.pause(math.inf)
        self.thread.join()  # the thread has nothing left to do
        self._simulation.threads.discard(self.thread)
        if self._error is not None:
            raise self._error
        return self._found[0]

    def _run(self) -> None:
        self.baton.acquire()
        try:
            if self._simulation.failure is None:
                self._found.append(self._function())
        except _Ended:
            pass
        except BaseException as error:
            self._error = error
        self._is_done = True
        for each in self._waiting:
            each.ready = self._simulation.now()
        self._simulation.end(self, self._error if self._is_worker else None)


_NOBODY: Any = object()  # runs what happens ``at`` a time: it is no thread, so nothing there can wait


class SimulatedCondition:
    """Like ``threading.Condition``: a lock that its owner can take again, in which threads wait to be notified.

    A thread that sleeps, or waits elsewhere, keeps the lock.
    """

    def __init__(self, simulation: Simulation) -> None:
        self._simulation = simulation
        self._owner: SimulatedThread[Any] | None = None
        self._depth = 0
        self._entering: list[SimulatedThread[Any]] = []
        self._waiting: list[SimulatedThread[Any]] = []

    def __enter__(self) -> bool:
        self._take(1)
        return True

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None, /
    ) -> None:
        if self._owner is self._simulation.current and self._depth:  # else the thread was ended in ``wait``
            self._depth -= 1
            if not self._depth:
                self._free()

    def wait(self, timeout: float | None = None) -> bool:
        """Give up the lock until somebody notifies, or virtual seconds have passed; returns whether somebody did."""
        me = self._simulation.current
        assert me is not None and self._owner is me and self._depth, "wait inside of the with block"
        depth = self._depth
        self._waiting.append(me)
        self._free()
        try:
            self._simulation.pause(math.inf if timeout is None else self._simulation.now() + timeout)
        finally:
            notified = me not in self._waiting
            if not notified:
                self._waiting.remove(me)
        self._take(depth)
        return notified

    def wait_for(self, predicate: Callable[[], bool], timeout: float | None = None) -> bool:
        """Wait until ``predicate`` is true, or virtual seconds have passed; returns whether it is true."""
        deadline = math.inf if timeout is None else self._simulation.now() + timeout
        while not predicate():
            left = deadline - self._simulation.now()
            if left <= 0:
                return False
            self.wait(left if left < math.inf else None)
        return True

    def notify_all(self) -> None:
        """Wake all waiting threads; they go on one after the other, when the lock is free."""
        self._wake(self._waiting)

    def _take(self, depth: int) -> None:
        me = self._simulation.current
        while self._depth and self._owner is not me:
            assert me is not None
            self._entering.append(me)
            self._simulation.pause(math.inf)
        self._owner, self._depth = me, self._depth + depth

    def _free(self) -> None:
        self._owner, self._depth = None, 0
        self._wake(self._entering)

    def _wake(self, tasks: list[SimulatedThread[Any]]) -> None:
        for each in tasks:
            each.ready = self._simulation.now()
        tasks.clear()
