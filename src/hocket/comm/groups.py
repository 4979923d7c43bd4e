"""The groups of one worker: what is done in each, one after the other, while the script waits or computes.

A group is known by the numbers that its members had when the job began, and has a channel of its own in each
generation. When workers have been lost, the others tell each other of how many of a group's tasks they have the
results. What all of them have is over; the rest is done again, in the same order, among those who are left. So in a
group that changes, a task is over for a member only when it has heard from all others that they have the result.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Sequence
from typing import Any, Generic, TypeVar

from hocket.comm.channel import AloneChannel, Begun, Channel
from hocket.comm.communicator import Communicator
from hocket.comm.generation import Change
from hocket.comm.group_operations import Gone, Party
from hocket.errors import DeadlineExceeded, MismatchError
from hocket.transport.point_to_point import PointToPoint

T = TypeVar("T")

ALL = "all"
"""The name of the group of all workers, who may be more when the job goes on."""


class Task(Generic[T]):
    """Something that the members of a group do together, as often as it takes until all have the result.

    Args:
        what: What it is, in words.
        nbytes: How much it sends, about.
        carry_out: Does it, among the members that there are; it must change nothing that is needed to do it again.
        waits: Whether the script does nothing else meanwhile.
        call: The script's call, for messages; empty if the members make different ones.

    Attributes:
        number: Which task of its group it is, in this generation.
        commits: Whether it is over only when all have the result.
        work: What its channel does of it, if it was begun there.
    """

    def __init__(self, what: str, nbytes: int, carry_out: Callable[[Party], T], *, waits: bool, call: str = "") -> None:
        self.what, self.nbytes, self.waits, self.call = what, nbytes, waits, call
        self._carry_out = carry_out
        self.number, self.commits, self.is_over = 0, False, False
        self.work: Begun | None = None
        self._results: list[T] = []
        self._error: Exception | None = None

    def attempt(self, party: Party) -> None:
        """Do it with the other members; what all of them raise alike is kept for ``result``."""
        try:
            self._results = [self._carry_out(party)]
        except (MismatchError, Gone) as error:
            self._error = error

    def forget(self) -> None:
        """It has to be done again."""
        self._results, self._error, self.work = [], None, None

    def result(self) -> T:
        """What it gave, or raise what it raised."""
        if self._error is not None:
            raise self._error
        return self._results[0]


class Line:
    """The tasks of a group, one after the other.

    Attributes:
        numbers: The number of each member that is left.
        channel: Their channel in this generation, once it was needed.
        begun: How many tasks there were in this generation.
        have: Of how many this worker has the result.
        open: The tasks that are not known to be over.
    """

    def __init__(self, numbers: Sequence[int]) -> None:
        self.numbers = list(numbers)
        self.channel: Channel | None = None
        self.begun = self.have = 0
        self.open: deque[Task[Any]] = deque()

    def carry_out(
        self, task: Task[Any], ranks: Sequence[int], numbers: Sequence[int]
    ) -> Callable[[PointToPoint], None]:
        """What the channel of the members with these ranks and numbers has to do for a task."""
        choice = None if self.channel is None else self.channel.choice

        def carry(links: PointToPoint) -> None:
            party = Party(links, ranks, task.call, numbers, choice)
            task.attempt(party)
            self.have = task.number
            if task.commits:  # without the call: those who made different ones have been told, and go on
                Party(links, ranks, "", numbers, choice).agree(f"the end of {task.number}")

        return carry

    def begin_anew(self, numbers: Sequence[int], over: int) -> None:
        """Another generation has begun, with so many members left; all of them have the results of ``over`` tasks."""
        self.numbers = list(numbers)
        left = [task for task in self.open if task.number > over]
        for task in self.open:
            task.is_over = task.number <= over
        for number, task in enumerate(left, start=1):
            task.forget()
            task.number = number
        self.open, self.begun, self.have = deque(left), len(left), 0


class Groups:
    """All groups of one worker.

    Args:
        communicator: The workers of the job.

    Attributes:
        numbers: The number of each worker of the job, by rank.
    """

    def __init__(self, communicator: Communicator) -> None:
        self._communicator = communicator
        self.numbers = tuple(range(communicator.size))
        self._lines: dict[str, Line] = {}

    def line(self, name: str, numbers: Sequence[int] | None = None) -> Line:
        """The tasks of a group with this name, which is the same on all members; of all workers, if none are given."""
        if name not in self._lines:
            self._lines[name] = Line(self.numbers if numbers is None else numbers)
        return self._lines[name]

    def add(self, line: Line, task: Task[Any]) -> None:
        """One more task, which begins now if the script does other things meanwhile."""
        line.begun += 1
        task.number, task.commits = line.begun, self._communicator.changes
        line.open.append(task)
        if not task.waits:
            self._go_on(line)

    def finish(self, line: Line, task: Task[T], timeout: float | None = None) -> T:
        """Wait until a task is over, and all before it; returns what it gave.

        Raises:
            DeadlineExceeded: it is not over after ``timeout`` seconds; it goes on.
        """
        if timeout is not None and not task.is_over:
            self._go_on(line)
            if task.work is not None and not task.work.wait(timeout):
                raise DeadlineExceeded(f"{task.what} is not over after {timeout:g} s: it goes on, so wait for it again")
        self._settle(line, task)
        return task.result()

    def drain(self, line: Line) -> None:
        """Wait until all that was begun is over; who waits for a task is told how it ended."""
        while line.open:
            self._settle(line, line.open[-1])

    def unfinished(self, seconds: float) -> list[str]:
        """What is still under way after so many seconds, in words."""
        deadline = time.monotonic() + seconds
        found = [(task.what, task.work) for line in self._lines.values() for task in line.open]
        return [
            what for what, work in found if work is not None and not work.wait(max(0.0, deadline - time.monotonic()))
        ]

    def tell(self) -> dict[str, int]:
        """End this generation; returns of how many tasks of each group this worker has the result."""
        for line in self._lines.values():
            channel, line.channel = line.channel, None
            if channel is not None:
                channel.close()
        return {name: line.have for name, line in self._lines.items()}

    def regroup(self, change: Change) -> None:
        """Go on in another generation, in which the workers have said of themselves what ``tell`` gave."""
        said = dict(zip(change.now, change.said, strict=True))
        for name, line in self._lines.items():
            left = [number for number in line.numbers if number in said]
            over = min((int(said[number]["groups"].get(name, 0)) for number in left), default=0)
            line.begin_anew(change.now if name == ALL else left, over)
        self.numbers = change.now

    def _settle(self, line: Line, task: Task[Any]) -> None:
        """Wait until a task is over for all members; again and again, while members are lost."""

        def attempt() -> None:
            if task.is_over:
                return
            channel = self._go_on(line)
            if task.work is None:
                channel.run(self._carry_out(line, task), task.nbytes, task.what)
            else:
                channel.wait(task.work, task.what)

        if not task.is_over:
            self._communicator.persist(attempt)
        while not task.is_over:
            line.open.popleft().is_over = True

    def ranks(self, line: Line) -> list[int]:
        """The rank of each member of a group that is left."""
        return sorted(self.numbers.index(number) for number in line.numbers)

    def _carry_out(self, line: Line, task: Task[Any]) -> Callable[[PointToPoint], None]:
        ranks = self.ranks(line)
        return line.carry_out(task, ranks, [self.numbers[rank] for rank in ranks])

    def _go_on(self, line: Line) -> Channel:
        """The channel of a group, in which all that was begun is under way."""
        if line.channel is None:
            ranks = self.ranks(line)
            name = next(name for name, each in self._lines.items() if each is line)
            line.channel = AloneChannel() if len(ranks) == 1 else self._communicator.open_channel(name, ranks)
        for task in line.open:
            if task.work is None and not task.waits:
                task.work = line.channel.start(self._carry_out(line, task))
        return line.channel
