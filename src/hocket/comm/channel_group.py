"""A group of some workers over messages between any two of them: collectives that another thread can call."""

from __future__ import annotations

import base64
from collections.abc import Callable, Sequence
from typing import TypeVar

import torch

from hocket.comm import group_operations
from hocket.comm.channel import Channel
from hocket.comm.communicator import Communicator, describe, named, through_cpu
from hocket.comm.group_operations import Party
from hocket.transport.waiting import Description, say

T = TypeVar("T")
_SHORT = 300  # bytes of data that travel in the first message of a collective


class ChannelCommunicator(Communicator):
    """The workers that a channel connects.

    Args:
        channel: Carries their messages; nobody else uses it.
        rank: This worker's rank in the group.
        numbers: The rank of each member among all workers.
    """

    way = "messages between any two workers"

    def __init__(self, channel: Channel, rank: int, numbers: Sequence[int]) -> None:
        self.rank, self.size, self._channel, self._numbers = rank, len(numbers), channel, numbers

    @property
    def waited(self) -> float:
        return 0.0

    @through_cpu
    def allreduce(self, tensor: torch.Tensor, operation: str) -> None:
        what = f"allreduce of {describe(tensor)}, {operation}"
        tensor.copy_(self._do(what, tensor.nbytes, lambda p: group_operations.allreduce(p, tensor, operation)))

    @through_cpu
    def allgather(self, tensor: torch.Tensor) -> torch.Tensor:
        what = f"allgather of {describe(tensor)}"
        return self._do(what, tensor.nbytes, lambda party: group_operations.allgather(party, tensor))

    @through_cpu
    def broadcast(self, tensor: torch.Tensor, root: int) -> None:
        what = f"broadcast of {describe(tensor)} from rank {self._numbers[root]}"
        tensor.copy_(self._do(what, tensor.nbytes, lambda party: group_operations.broadcast(party, tensor, root)))

    def barrier(self, what: str = "hocket.barrier()") -> None:
        self._do(what, 0, group_operations.barrier)

    def meet(self, number: int, payload: int, what: Description) -> list[int]:
        said = self._do(say(what), 0, lambda party: party.agree(f"{say(what)}, {number}", [payload] * self.size))
        return [each.number for each in said]

    def gather_bytes(self, data: bytes) -> list[bytes]:
        what = named("an exchange of descriptions")
        brief = base64.b64encode(data).decode() if len(data) <= _SHORT else ""

        def gather(party: Party) -> list[bytes]:
            said = party.agree(what, [len(data)] * self.size, brief)
            if max(each.number for each in said) <= _SHORT:
                return [base64.b64decode(each.detail) for each in said]
            rows = torch.frombuffer(bytearray(data or b"\0"), dtype=torch.uint8)[: len(data)]
            everyone = bytes(group_operations.allgather_rows(party, rows).tolist())
            ends = [sum(each.number for each in said[: rank + 1]) for rank in range(self.size)]
            return [everyone[end - each.number : end] for each, end in zip(said, ends, strict=True)]

        return self._do(what, 0, gather)

    def open_channel(self, name: str, ranks: Sequence[int]) -> Channel:
        return self._channel

    def leave(self, failed: bool) -> None:
        self._channel.close()

    def _do(self, what: str, nbytes: int, carry_out: Callable[[Party], T]) -> T:
        found: list[T] = []
        choice = self._channel.choice
        self._channel.run(
            lambda links: found.append(carry_out(Party(links, self._numbers, "", self._numbers, choice))), nbytes, what
        )
        return found[0]
