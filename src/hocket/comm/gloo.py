"""Collectives over PyTorch's Gloo, for machines on which the shared-memory transport does not run."""

from __future__ import annotations

import torch

from hocket.comm.communicator import Averager, Communicator, Description
from hocket.comm.layout import Layout
from hocket.errors import MismatchError
from hocket.transport.process_group import ProcessGroup

_NARROW = (torch.bfloat16, torch.float16)


class GlooAverager(Averager):
    """One all-reduce per bucket."""

    def __init__(self, communicator: GlooCommunicator, layout: Layout) -> None:
        self._communicator = communicator
        self.slots = layout.allocate()
        self.all_slots = [self.slots]
        self.results = layout.allocate()

    def average(self, number: int, payload: int, what: Description) -> list[int]:
        payloads = self._communicator.compare(number, payload, what)
        for result, slot in zip(self.results, self.slots, strict=True):
            result.copy_(slot)
            self._communicator.reduce(result, "mean")
        return payloads


class GlooCommunicator(Communicator):
    """The workers of a job, over Gloo."""

    way = "Gloo"

    def __init__(self, group: ProcessGroup) -> None:
        self._group = group
        self.rank, self.size = group.rank, group.size

    @property
    def waited(self) -> float:
        return self._group.waited

    def allreduce(self, tensor: torch.Tensor, operation: str) -> None:
        what = f"allreduce of {tensor.dtype}{list(tensor.shape)}, {operation}"
        self._compare_text(what)
        self.reduce(tensor, operation)

    def allgather(self, tensor: torch.Tensor) -> torch.Tensor:
        self._compare_text(f"allgather of {tensor.dtype}{list(tensor.shape)}")
        return torch.stack(self._group.allgather(tensor))

    def broadcast(self, tensor: torch.Tensor, root: int) -> None:
        self._compare_text(f"broadcast of {tensor.dtype}{list(tensor.shape)} from rank {root}")
        self._group.broadcast(tensor, root)

    def barrier(self, what: str = "hocket.barrier()") -> None:
        self._compare_text(what)

    def gather_bytes(self, data: bytes) -> list[bytes]:
        lengths = [int(n) for n in self._group.allgather(torch.tensor([len(data)]))]
        padded = torch.tensor(list(data.ljust(max(lengths), b"\0")), dtype=torch.uint8)
        parts = self._group.allgather(padded) if max(lengths) else [padded] * self.size
        return [bytes(part[:length].tolist()) for part, length in zip(parts, lengths, strict=True)]

    def averager(self, layout: Layout) -> Averager:
        return GlooAverager(self, layout)

    def leave(self, failed: bool) -> None:
        """Close the connections: Gloo's peers notice."""
        self._group.close()

    def reduce(self, tensor: torch.Tensor, operation: str) -> None:
        """All-reduce without comparing first; types of less than 32 bits are summed in float32."""
        wide = tensor.float() if tensor.dtype in _NARROW else tensor
        self._group.allreduce(wide, "sum" if operation == "mean" else operation)
        if operation == "mean":
            wide /= self.size
        if wide is not tensor:
            tensor.copy_(wide)

    def compare(self, number: int, payload: int, what: Description) -> list[int]:
        """Check that all ranks came with ``number``; return their payloads."""
        rows = torch.stack(self._group.allgather(torch.tensor([number, payload])))
        if any(int(n) != number for n in rows[:, 0]):
            texts = self.gather_bytes((what if isinstance(what, str) else what()).encode())
            raise MismatchError(
                "the ranks do not do the same: "
                + "; ".join(f"rank {rank}: {text.decode()}" for rank, text in enumerate(texts))
                + ". All ranks must make the same calls in the same order, with the same shapes and types"
            )
        return [int(n) for n in rows[:, 1]]

    def _compare_text(self, what: str) -> None:
        import zlib

        self.compare(zlib.crc32(what.encode()), 0, what)
