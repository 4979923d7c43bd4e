"""The communicator of a script that nothing launched: a group of one."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from hocket.comm.channel import AloneChannel, Channel
from hocket.comm.communicator import Communicator
from hocket.transport.waiting import Description


class AloneCommunicator(Communicator):
    """A group of one worker: every collective returns at once."""

    rank, size, way = 0, 1, "none: one worker"

    @property
    def waited(self) -> float:
        return 0.0

    def allreduce(self, tensor: torch.Tensor, operation: str) -> None:
        """Nothing to do: there is nothing to add."""

    def allgather(self, tensor: torch.Tensor) -> torch.Tensor:
        return tensor.clone().unsqueeze(0)

    def broadcast(self, tensor: torch.Tensor, root: int) -> None:
        """Nothing to do: there is nobody to send to."""

    def barrier(self, what: str = "hocket.barrier()") -> None:
        """Nothing to do: there is nobody to wait for."""

    def meet(self, number: int, payload: int, what: Description) -> list[int]:
        return [payload]

    def gather_bytes(self, data: bytes) -> list[bytes]:
        return [data]

    def open_channel(self, name: str, ranks: Sequence[int]) -> Channel:
        return AloneChannel()

    def open_group(self, name: str, ranks: Sequence[int]) -> Communicator | None:
        return AloneCommunicator()

    def leave(self, failed: bool) -> None:
        """Nothing to do: there is nobody to tell."""
