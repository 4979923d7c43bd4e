"""Process sets: some of the ranks, in which operations have names of their own."""

from __future__ import annotations

from collections.abc import Sequence

from hocket.horovod import context
from hocket.horovod.negotiation import Request
from hocket.horovod.operation import Operation


class ProcessSet:
    """Some ranks of the job; ``add_process_set`` or ``init`` makes it usable.

    Args:
        ranks_or_comm: The ranks, in any order.

    Attributes:
        process_set_id: Its number; None until it is added.
        ranks: The ranks, in order.
    """

    process_set_id: int | None = None

    def __init__(self, ranks_or_comm: Sequence[int]) -> None:
        if not isinstance(ranks_or_comm, (list, tuple, range, set, frozenset)):
            raise ValueError(f"ProcessSet({ranks_or_comm!r}): give a list of ranks; there is no MPI here")
        self.ranks: list[int] | None = sorted(ranks_or_comm)
        self.mpi_comm = None

    def size(self) -> int:
        """How many ranks it has."""
        return len(context.current().ranks[self._number()])

    def rank(self) -> int:
        """The place of this rank in it."""
        found = context.current()
        rank, members = found.worker.config.rank, found.ranks[self._number()]
        if rank not in members:
            raise ValueError(f"rank {rank} is no member of {self}")
        return members.index(rank)

    def included(self) -> bool:
        """Whether this rank is one of its members."""
        found = context.current()
        return found.worker.config.rank in found.ranks[self._number()]

    def _number(self) -> int:
        number = self.process_set_id
        if number is None or number not in context.current().ranks:
            raise ValueError(f"{self} was not added: call hvd.add_process_set(), or give it to hvd.init()")
        return number

    def __str__(self) -> str:
        return f"ProcessSet(process_set_id={self.process_set_id}, ranks={self.ranks}, mpi_comm={self.mpi_comm})"

    __repr__ = __str__


class _Global(ProcessSet):
    """All ranks, whoever they are."""

    process_set_id = context.GLOBAL

    def __init__(self) -> None:
        self.mpi_comm = None

    @property
    def ranks(self) -> list[int] | None:  # type: ignore[override]
        return list(context.current().ranks[context.GLOBAL]) if context.is_started() else None


global_process_set: ProcessSet = _Global()


def add_process_set(process_set: ProcessSet | Sequence[int]) -> ProcessSet:
    """Make a process set usable; every rank must call this, those outside, too, with the same ranks."""
    made = process_set if isinstance(process_set, ProcessSet) else ProcessSet(process_set)
    found = context.current()
    members = context.members_of(made.ranks or (), found.worker.config.size)
    if made.process_set_id is not None and made.process_set_id in found.ranks:
        raise ValueError(f"{made} was added already")
    if members in found.ranks.values():
        raise ValueError(f"there is a process set of ranks {list(members)} already")
    _meet(f"add the process set of ranks {', '.join(map(str, members))}")
    made.ranks = list(members)
    made.process_set_id = found.open(members)
    return made


def remove_process_set(process_set: ProcessSet) -> bool:
    """Forget a process set; every rank must call this. Returns whether it was there: that of all ranks stays."""
    found, number = context.current(), process_set.process_set_id
    if number is None or number == context.GLOBAL or number not in found.ranks:
        return False
    _meet(f"remove the process set of ranks {', '.join(map(str, found.ranks[number]))}")
    found.remove(number)
    process_set.process_set_id = None
    return True


def process_set_ids() -> list[int]:
    """The number of every process set."""
    return sorted(context.current().ranks)


def _meet(what: str) -> None:
    """Wait until all ranks have come for this; an error on all if one comes for something else."""
    engine = context.current().engine(context.GLOBAL)
    operation = Operation(Request("barrier", "process sets", options=("sum", what)))
    engine.submit(operation)
    engine.wait(operation)
