"""Collectives between hosts over the job's own connections, which can be left in the middle of any of them.

How a sum is made is picked for its size, by what was measured of the links (see ``algorithm_choice``). Who waits for a
collective carries it out. A group has one thread for large sums that travel while the script computes;
those that the thread has not begun when somebody waits are done by the one who waits. Whatever goes wrong ends all
connections of the group at once, so that the other members notice, too.
"""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from queue import SimpleQueue
from typing import Any

import torch

from hocket.comm.algorithm_choice import Choice
from hocket.comm.algorithms.collective_algorithm import gather
from hocket.comm.algorithms.direct import Direct
from hocket.comm.algorithms.network_reductions import Use
from hocket.comm.algorithms.ring import Ring
from hocket.comm.algorithms.star import Star
from hocket.errors import DeadlineExceeded, JobError, WorkerLost
from hocket.messages import WireError
from hocket.transport.member_links import Links
from hocket.transport.network_group import START, Wait, Watcher, Way, Work
from hocket.transport.point_to_point import PointToPoint
from hocket.transport.waiting import Description
from hocket.transport.wire import Closed

_SMALL = 1 << 17  # bytes that the root of a broadcast sends to all others together, instead of round the ring
_LATER = 1 << 16  # bytes of a sum up to which it is left to who waits for it
_LOOK = 0.1  # seconds between two looks at whether the group was ended
_COUNTING = threading.Lock()  # held by the thread that counts a sum: several groups have one count
_BROKEN = (Closed, WireError, OSError)  # what a connection raises

Meet = Callable[[dict[str, Any], Wait], Sequence[dict[str, Any]]]
"""Tells the other members what this one has said, waits as it is told, and returns what each has said, by rank."""


class Sum:
    """A collective that has begun; see ``Work``.

    Attributes:
        error: Why it failed, if it did.
    """

    def __init__(self, call: Callable[[], None]) -> None:
        self._call: Callable[[], None] | None = call
        self._under_way = threading.Lock()
        self._under_way.acquire()
        self.error: Exception | None = None

    def run(self) -> None:
        """Carry it out, in the calling thread."""
        assert self._call is not None
        self._call()

    def end(self, error: Exception | None) -> None:
        """It is over; nothing of it touches a tensor from now on."""
        self.error, self._call = error, None
        self._under_way.release()

    def is_completed(self) -> bool:
        return not self._under_way.locked()

    def wait(self, seconds: float) -> bool:
        """Wait until it is over, up to ``seconds``; returns whether it is."""
        if not self._under_way.acquire(timeout=seconds):
            return False
        self._under_way.release()
        return True


class TcpGroup:
    """Some ranks of the job, over connections of its own wire. See ``NetworkGroup``.

    Args:
        links: Connections between the members; closed with the group.
        watch: Tells which member is missing.
        algorithm: The name of the algorithm for sums, or ``auto``.
        connect: Makes the connections, before the first collective; it waits as it is told.

    Attributes:
        choice: Picks algorithms for sums.
        uses: What sums have taken so far, by the name of the algorithm.
    """

    def __init__(
        self, links: Links, watch: Watcher, algorithm: str = "auto", connect: Callable[[Wait], None] | None = None
    ) -> None:
        self.rank, self.size = links.rank, links.size
        self.choice, self.uses = Choice(algorithm, links.size), dict[str, Use]()
        self._links, self._watch, self._connect = links, watch, connect
        self._begun: deque[Sum] = deque()  # those that nobody carries out yet, or one that somebody does, and others
        self._turn = threading.Lock()  # held by who carries one out
        self._calls: SimpleQueue[bool] = SimpleQueue()
        self._thread: threading.Thread | None = None
        self._error: Exception | None = None
        self._is_closed = False

    @classmethod
    def connect(cls, links: Links, watch: Watcher, meet: Meet, algorithm: str = "auto") -> TcpGroup:
        """A group over ``links``, which are connected now; collective.

        Args:
            links: This member's end of the connections.
            watch: Tells which member is missing.
            meet: Tells the others where this member is.
            algorithm: The name of the algorithm for sums, or ``auto``.
        """

        def wait(done: Callable[[float], bool]) -> None:
            watch.wait(done, START)

        try:
            links.connect(meet(links.said, wait), wait)
        except BaseException:
            links.close()
            raise
        return cls(links, watch, algorithm)

    @classmethod
    def connect_later(
        cls, links: Links, watch: Watcher, meet: Meet, look: Callable[[], None], algorithm: str = "auto"
    ) -> TcpGroup:
        """A group over ``links``, which are connected before its first collective; not collective itself.

        Args:
            links: This member's end of the connections.
            watch: Tells which member is missing.
            meet: Tells the others where this member is.
            look: Raises if a member has ended, and will never come; any thread may call it.
            algorithm: The name of the algorithm for collectives, or ``auto``.
        """

        def connect(wait: Wait) -> None:
            def wait_and_look(done: Callable[[float], bool]) -> None:
                def is_done(seconds: float) -> bool:
                    if done(seconds):
                        return True
                    look()
                    return False

                wait(is_done)

            links.connect(meet(links.said, wait_and_look), wait_and_look)

        return cls(links, watch, algorithm, connect)

    def run(self, call: Callable[[PointToPoint], None], nbytes: int, what: Description) -> None:
        """Carry out ``call``, which does something with all members, after all that was begun; blocks until then.

        Args:
            call: Sends and receives; a failure of it ends the group.
            nbytes: How much it sends, about.
            what: What it is, in words.
        """
        self._do(lambda: call(self._links), what)

    def start(self, call: Callable[[PointToPoint], None]) -> Sum:
        """Begin to carry out ``call`` in the group's thread, after all that was begun; see ``run``."""
        work = self._start(lambda: call(self._links))
        self._have_done()
        return work

    def start_sum(
        self, tensor: torch.Tensor, note: Callable[[], None] | None = None, way: Way | None = None
    ) -> Sum:
        def call() -> None:
            if note is not None:
                note()
            self._reduce(tensor, "sum", way)

        work = self._start(call)
        if tensor.nbytes > _LATER and self.choice.travels_aside:
            self._have_done()
        return work

    def allreduce(self, tensor: torch.Tensor, operation: str, what: Description) -> None:
        self._do(lambda: self._reduce(tensor, operation), what)

    def allgather(self, tensor: torch.Tensor, what: Description) -> list[torch.Tensor]:
        count = tensor.numel()
        whole = tensor.new_empty(self.size * count)
        whole[self.rank * count :][:count] = tensor.view(-1)
        bounds = [(rank * count, (rank + 1) * count) for rank in range(self.size)]
        self._do(lambda: Direct().allgather(self._links, whole, bounds), what)
        return [whole[start:end].view(tensor.shape) for start, end in bounds]

    def gather(self, tensor: torch.Tensor, root: int, what: Description) -> list[torch.Tensor]:
        flat, is_root = tensor.view(-1), self.rank == root
        parts = [torch.empty_like(flat) if is_root and each != root else flat for each in range(self.size)]
        self._do(lambda: gather(self._links, parts, root), what)
        return [part.view(tensor.shape) for part in parts] if is_root else []

    def broadcast(self, tensor: torch.Tensor, root: int, what: Description) -> None:
        self._do(lambda: self._spread(tensor, root), what)

    def confirm(self, number: int, what: Description) -> bool:
        """Wait until all members are here; returns whether all came with the same ``number``."""
        found: list[bool] = []
        self._do(lambda: found.append(_confirm(self._links, number)), what)
        return found[0]

    def wait(self, work: Work, what: Description) -> None:
        assert isinstance(work, Sum)
        while not work.is_completed():
            if self._turn.acquire(blocking=False):
                try:
                    self._carry_out(what)
                finally:
                    self._turn.release()
            else:
                self._wait_for_another(what)
        if isinstance(work.error, _BROKEN) and not isinstance(work.error, DeadlineExceeded):
            raise self._watch.explain(work.error, what) from work.error
        if work.error is not None:
            raise work.error

    def ended(self) -> list[int]:
        """Members that have ended their connections to this one; does not wait."""
        return self._links.ended()

    def close(self) -> None:
        """End the group; what is under way in it fails, and touches no tensor after this."""
        if self._is_closed:
            return
        self._is_closed = True
        if self._begun:
            self._break(JobError("the group was closed"))
        self._join()
        self._links.close()

    def _do(self, call: Callable[[], None], what: Description) -> None:
        """Carry out a collective, after those that have begun before."""
        self.wait(self._start(call), what)

    def _start(self, call: Callable[[], None]) -> Sum:
        if self._is_closed:
            raise WorkerLost("this worker has left the group")
        work = Sum(call)
        self._begun.append(work)
        return work

    def _have_done(self) -> None:
        """Have the thread carry out all that has begun."""
        if self._thread is None:
            self._thread = threading.Thread(target=self._run, name="hocket-group", daemon=True)
            self._thread.start()
        self._calls.put(True)

    def _run(self) -> None:
        while self._calls.get():
            while self._begun:
                with self._turn:
                    self._carry_out(None)

    def _carry_out(self, what: Description | None) -> None:
        """Carry out what has begun first: in the thread of the group, or in that of who waits in ``what``.

        What goes wrong is told to who waits for it; an interrupt of the script's thread is raised here.
        """
        if not self._begun:
            return
        work, error = self._begun[0], self._error
        if error is None:
            self._links.wait = None if what is None else lambda done: self._watch.wait(done, what)
            try:
                self._prepare(self._links.wait or self._wait_on)
                with torch.no_grad():
                    work.run()
                self._links.flush()
            except Exception as failure:  # a message may have been read in part
                error = failure
                self._break(error)
            except BaseException as interrupt:
                self._break(interrupt)
                self._end(work, self._error)
                raise
        self._end(work, error)

    def _prepare(self, wait: Wait) -> None:
        """Make the connections, if there are none yet."""
        connect, self._connect = self._connect, None
        if connect is not None:
            connect(wait)

    def _wait_on(self, done: Callable[[float], bool]) -> None:
        """Wait in the group's thread; whoever waits for it has the patience, and ends the group if that is over."""
        while not done(_LOOK):
            if self._error is not None:
                raise self._error

    def _end(self, work: Sum, error: Exception | None) -> None:
        self._begun.popleft()
        work.end(error)

    def _wait_for_another(self, what: Description) -> None:
        """Wait until another thread, most often that of the group, has carried out what it is doing."""
        try:
            current = self._begun[0]
        except IndexError:
            return
        try:
            self._watch.wait(lambda seconds: current.wait(seconds) or not self._turn.locked(), what)
        except Exception as error:
            self._break(error)
            self._join()  # nothing is written into a tensor after this
            raise

    def _break(self, error: BaseException) -> None:
        """End the connections: the group is of no use any more, and the others are to notice."""
        if self._error is None:
            self._error = error if isinstance(error, Exception) else JobError(f"interrupted by {error!r}")
        self._links.hang_up()

    def _join(self) -> None:
        thread, self._thread = self._thread, None
        if thread is not None:
            self._calls.put(False)
            thread.join()
        with self._turn:  # somebody who waits may carry one out
            while self._begun:
                self._end(self._begun[0], self._error)

    def _reduce(self, tensor: torch.Tensor, operation: str, way: Way | None = None) -> None:
        pick, begin = self.choice.pick(tensor.nbytes), time.perf_counter()
        before = 0 if way is None else way.nbytes
        if way is None:
            pick.allreduce(self._links, tensor.view(-1), operation)
        else:
            way.add_up(self._links, tensor.view(-1))
        seconds = time.perf_counter() - begin
        with _COUNTING:
            use = self.uses.setdefault(pick.algorithm.name if way is None else way.name, Use())
            use.times += 1
            use.sent += 0 if way is None else way.nbytes - before
            use.nbytes += tensor.nbytes
            use.least, use.most = min(use.least or tensor.nbytes, tensor.nbytes), max(use.most, tensor.nbytes)
            use.seconds += seconds
            if pick.seconds is not None and way is None:
                use.predicted += pick.seconds
                use.told += 1

    def _spread(self, tensor: torch.Tensor, root: int) -> None:
        algorithm = Star() if tensor.nbytes * (self.size - 1) <= _SMALL else Ring()
        algorithm.broadcast(self._links, tensor.view(-1), root)


def _confirm(links: PointToPoint, number: int) -> bool:
    """Whether all members have the same number: what each has heard goes to those 1, 2, 3, then 4, 8, 12 … further."""
    rank, size, distance, is_same = links.rank, links.size, 1, True
    while distance < size:
        steps = range(distance, min(4 * distance, size), distance)
        mine, theirs = torch.tensor([number, is_same]), torch.empty(len(steps), 2, dtype=torch.int64)
        for step in steps:
            links.send((rank + step) % size, mine)
        for step, row in zip(steps, theirs.unbind(), strict=True):
            links.receive((rank - step) % size, row)
        is_same = is_same and theirs.tolist() == [[number, True]] * len(steps)
        distance *= 4
    return is_same
