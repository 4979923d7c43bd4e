"""Groups of workers as a script sees them, and what is done in a group: at once, or while the script computes."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Generic, TypeVar

from hocket import spans
from hocket.comm.group_operations import Party
from hocket.comm.groups import ALL, Groups, Line, Task
from hocket.errors import UsageError
from hocket.job.worker import Worker, current, meeting

T = TypeVar("T")


class Group:
    """Some workers of the job, made by ``hocket.group``; when ranks change, it has the same workers that are left.

    Attributes:
        numbers: The ranks that the members had when the job began.
    """

    def __init__(self, groups: Groups, numbers: Sequence[int]) -> None:
        self._groups, self.numbers = groups, tuple(numbers)

    @property
    def ranks(self) -> tuple[int, ...]:
        """The ranks of the members, as they are now."""
        return tuple(sorted(rank for rank, number in enumerate(self._groups.numbers) if number in self.numbers))

    @property
    def size(self) -> int:
        """How many members there are now."""
        return len(self.ranks)

    def __repr__(self) -> str:
        return f"hocket.group({list(self.ranks)})"


class Handle(Generic[T]):
    """Something that goes on while the script computes."""

    def __init__(self, worker: Worker, line: Line, task: Task[Any], finish: Callable[[Any], T]) -> None:
        self._worker, self._line, self._task, self._finish = worker, line, task, finish
        self._results: list[T] = []

    def done(self) -> bool:
        """Whether it is over, so that ``wait`` returns, or raises, without waiting for others."""
        return self._task.is_over or (self._task.work is not None and self._task.work.is_completed())

    def wait(self, timeout: float | None = None) -> T:
        """Wait until it is over, and return the result, as the call would have done; again if called again.

        Args:
            timeout: Seconds to wait. If that is too short, ``DeadlineExceeded`` is raised, which is a TimeoutError;
                it goes on nevertheless, and may be waited for again. By default the deadline of the job holds.
        """
        if not self._results:
            self._worker.owner.check("wait()")
            with spans.span(spans.EXCHANGE, self._task.what):
                self._results = [self._finish(self._worker.groups.finish(self._line, self._task, timeout))]
        return self._results[0]


class Place:
    """A group in which the calling worker is about to do something, for one call.

    Attributes:
        worker: The calling worker.
        is_all: Whether it is the group of all workers, for good.
        ranks: The ranks of the members.

    Args:
        call: The script's call.
        group: The group; None for all workers.
    """

    def __init__(self, call: str, group: Group | None) -> None:
        self.worker, self._call = current(), call
        groups, size = self.worker.groups, self.worker.config.size
        self.is_all = group is None
        self.ranks: Sequence[int] = range(size)
        if group is None:
            self.line = groups.line(ALL)
            return
        if not isinstance(group, Group):
            raise UsageError(f"{call}: group={group!r} is no group: write group=hocket.group({_listed(group)})")
        self.ranks = group.ranks
        if self.worker.config.rank not in self.ranks:
            raise UsageError(
                f"{call} in the group of ranks {', '.join(map(str, self.ranks))}, which rank {self.worker.config.rank} "
                "is no member of: let only the members make this call"
            )
        self.is_all = len(self.ranks) == size and not self.worker.communicator.changes
        if self.is_all:
            self.line = groups.line(ALL)
        else:
            self.line = groups.line(",".join(map(str, group.numbers)), group.numbers)

    def root(self, root: int) -> int:
        """The number of the member with this rank in the job."""
        if not hasattr(root, "__index__") or root not in self.ranks:
            raise UsageError(f"{self._call}: root {root!r} is none of the ranks {', '.join(map(str, self.ranks))}")
        return self.worker.groups.numbers[root]

    def enter(self) -> Worker:
        """Before something that all workers do at once: let loops of theirs come to their end, and all before it."""
        worker = meeting()
        worker.groups.drain(self.line)
        return worker

    def do(
        self, what: str, nbytes: int, carry_out: Callable[[Party], Any], finish: Callable[[Any], T], *, wait: bool
    ) -> Any:
        """Do something in the group: now, or begin it and return a handle."""
        if self.is_all:
            meeting()
        task = Task(f"{self._call}: {what}", nbytes, carry_out, waits=wait, call=self._call)
        return perform(self.worker, self.line, task, finish)


def perform(worker: Worker, line: Line, task: Task[Any], finish: Callable[[Any], T]) -> T | Handle[T]:
    """Carry out a task, or begin it and return a handle."""
    worker.groups.add(line, task)
    if not task.waits:
        return Handle(worker, line, task, finish)
    with spans.span(spans.EXCHANGE, task.what):
        return finish(worker.groups.finish(line, task))


def group(ranks: Sequence[int]) -> Group:
    """The group of the workers with these ranks, for collectives in which only they take part.

    Communicates with nobody, so that not all workers need to call it, and a worker may make groups of others. Whoever
    makes the group of the same ranks has the same group. Collectives in a group are called by all its members, in the
    same order, and by nobody else.

    Args:
        ranks: Ranks of the job, in any order: members are always in the order of their ranks.
    """
    worker = current()
    found = list(ranks)
    wrong = [rank for rank in found if not isinstance(rank, int) or not 0 <= rank < worker.config.size]
    if wrong or not found or len(set(found)) < len(found):
        raise UsageError(
            f"hocket.group({found}): give at least one rank, each once, of ranks 0 to {worker.config.size - 1}"
        )
    return Group(worker.groups, [worker.groups.numbers[rank] for rank in sorted(found)])


def _listed(group: object) -> str:
    return str(list(group)) if isinstance(group, (list, tuple, range, set)) else "[0, 2]"
