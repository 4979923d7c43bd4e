"""How the workers of a generation are connected: on one host, through memory that the coordinator keeps for them."""

from __future__ import annotations

import os
from collections.abc import Collection, Sequence
from typing import Any, Protocol

from hocket.comm.alone import AloneCommunicator
from hocket.comm.communicator import Communicator
from hocket.comm.coordinator_group import Meets
from hocket.comm.shared import SharedCommunicator
from hocket.transport.area import Area
from hocket.transport.shared_memory import SharedMemory


class Shares(Meets, Protocol):
    """A worker's end of the coordinator, which keeps memory for the workers of its host, and knows who wants to join.

    See ``Coordinator`` for what the methods do.
    """

    def begin_generation(self, generation: int) -> None:
        """The workers that are left share other memory from now on."""

    def share(self, nbytes: int, purpose: str) -> Area:
        """Memory that is the same for all workers that ask in the same order."""
        ...

    def keep(self, answers: bytes, failure: str = "") -> None: ...
    def kept(self) -> tuple[bytes, str]: ...
    def join(self) -> tuple[dict[str, Any], bytes]: ...
    def admit(self, numbers: Sequence[int], told: dict[str, Any]) -> object: ...
    def leave(self) -> bool: ...
    def wanted(self, members: Collection[int] | None = None) -> dict[str, list[int]]: ...


class Connector(Protocol):
    """Connects the workers of a generation.

    Attributes:
        spreads: Whether the workers may be on several hosts.
    """

    spreads: bool

    def describe(self) -> dict[str, Any]:
        """What the others must know of this worker to be connected with it in the next generation; plain data."""
        ...

    def connect(self, generation: int, members: Sequence[int], said: dict[int, dict[str, Any]]) -> Communicator:
        """The communicator of ``members``, who all call this, from what each has said.

        Raises:
            WorkerLost: a member was lost meanwhile.
        """
        ...

    def leave(self, failed: bool) -> None:
        """This worker ends."""


class OneHost:
    """Connects the workers of one host, through memory that the coordinator keeps for them."""

    spreads = False

    def __init__(self, coordinator: Shares, timeout: float) -> None:
        self._coordinator, self._timeout = coordinator, timeout

    def describe(self) -> dict[str, Any]:
        return {"process": os.getpid()}

    def connect(self, generation: int, members: Sequence[int], said: dict[int, dict[str, Any]]) -> Communicator:
        self._coordinator.begin_generation(generation)
        if len(members) == 1:
            return AloneCommunicator()
        processes = [int(said[member]["process"]) for member in members]
        rank = members.index(self._coordinator.rank)
        memory = SharedMemory.share(self._coordinator.share, rank, processes, self._timeout)
        memory.gate.numbers = list(members)
        return SharedCommunicator(memory)

    def leave(self, failed: bool) -> None:
        pass
