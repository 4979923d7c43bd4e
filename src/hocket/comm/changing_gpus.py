"""The GPUs of workers whose group changes: connected anew in each generation."""

from __future__ import annotations

import functools

from hocket.comm.communicator import Communicator, ConnectGpus
from hocket.errors import WorkerLost


class ChangingGpus:
    """Connects the GPUs of each generation, once it is known how that is done."""

    def __init__(self) -> None:
        self.connect: ConnectGpus | None = None

    def join(self, group: Communicator, generation: int, former: Communicator | None = None) -> None:
        """Connect the GPUs of ``group``; what those of the former group had under way ends. Collective.

        Raises:
            WorkerLost: a worker was lost meanwhile.
        """
        if former is not None and former.nccl is not None:
            former.nccl.abort()
        if self.connect is not None and group.size > 1:
            group.nccl = self.connect(group.rank, group.size, generation, functools.partial(look_for_dead, group))


def look_for_dead(group: Communicator) -> None:
    """Raise if a worker of ``group`` on this host has ended without a word."""
    memory = group.memory
    if memory is not None and any(memory.gate.has_died(rank) for rank in range(group.size)):
        memory.gate.part()  # others may wait where the dead one has arrived
        loss = WorkerLost("a worker has ended, and others still hear from it: see its output")
        loss.died = True
        raise loss
