"""The contracts of this layer: collectives by hand, and the repeated average that training needs."""

from __future__ import annotations

import platform
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar

import torch

from hocket.comm.layout import Layout, Limits
from hocket.comm.topology import Topology
from hocket.comm.traffic import Traffic
from hocket.transport.gate import Description
from hocket.transport.nccl import NcclGroup
from hocket.transport.tensor_bytes import view_bytes


class Averager(ABC):
    """Averages the same set of tensors over all ranks, again and again.

    A caller writes its values, multiplied by ``scale``, to ``slots``, calls ``average`` and reads ``results``.
    """

    overlaps: bool = False
    """Whether it makes use of ``ready`` and ``progress``."""

    scale: float = 1.0
    """By which the caller multiplies its values."""

    idle: frozenset[int] = frozenset()
    """Buckets of which no rank has anything to average; the caller sets it, alike on all ranks."""

    slots: list[torch.Tensor]
    """Where this rank puts its values next, one flat tensor per bucket; ``average`` may change it.

    They may be the results themselves: what was averaged is then there until new values are put.
    """

    results: list[torch.Tensor]
    """The averages of the last call, one flat tensor per bucket; private to this rank unless it asked for others."""

    all_slots: list[list[torch.Tensor]]
    """Every list that ``slots`` can be, so that views can be made once."""

    _begun: tuple[int, int, Description]

    def ready(self, bucket: int) -> None:  # noqa: B027 - there may be nothing to do
        """This rank's part of ``bucket`` is complete before ``average`` is called; it may be sent off."""

    def progress(self) -> None:  # noqa: B027 - likewise
        """Move on what is under way, without waiting."""

    def close(self) -> None:  # noqa: B027 - likewise
        """Give back what only this averager needs; all ranks are done with it."""

    @abstractmethod
    def average(self, number: int, payload: int, what: Description) -> list[int]:
        """Average over all ranks; blocks until every rank is here with the same ``number``.

        Returns:
            The payloads of all ranks.
        """

    def begin(self, number: int, payload: int, what: Description) -> None:
        """The first half of ``average``: offer what is in ``slots``, and do not wait for anybody.

        Until ``finish``, slots and results are not touched, and ``progress`` may be called now and then. Averages of
        other averagers may begin and end meanwhile, and other collectives be called, in the same order on all ranks.
        """
        self._begun = number, payload, what

    def finish(self) -> list[int]:
        """The second half: wait until the results are there; the payloads of all ranks."""
        return self.average(*self._begun)


class Communicator(ABC):
    """A group of workers. Every method is called by all of them together, and blocks until they have."""

    rank: int
    size: int
    way: str
    """How bytes move, in words."""

    traffic: Traffic | None = None
    """What exchanges with other hosts took; None where there are none."""

    nccl: NcclGroup | None = None
    """What connects the GPUs of all ranks, if each has one."""

    @property
    def topology(self) -> Topology:
        """Who is where: all on this host, if nothing else is said."""
        return Topology(self.rank, (tuple(range(self.size)),), (platform.node(),))

    @property
    def on_host(self) -> Communicator:
        """The workers of this host."""
        return self

    @property
    @abstractmethod
    def waited(self) -> float:
        """Seconds that this rank has slept for others so far."""

    @abstractmethod
    def allreduce(self, tensor: torch.Tensor, operation: str) -> None:
        """Replace ``tensor`` (contiguous) on every rank by the result over all ranks."""

    @abstractmethod
    def allgather(self, tensor: torch.Tensor) -> torch.Tensor:
        """The tensors (contiguous, same shape) of all ranks, stacked in a new first dimension."""

    @abstractmethod
    def broadcast(self, tensor: torch.Tensor, root: int) -> None:
        """Replace ``tensor`` (contiguous) on every rank by that of ``root``."""

    @abstractmethod
    def barrier(self, what: str = "hocket.barrier()") -> None:
        """Wait until every rank is here."""

    @abstractmethod
    def meet(self, number: int, payload: int, what: Description) -> list[int]:
        """Wait until every rank is here with the same ``number``; the payloads of all ranks."""

    @abstractmethod
    def gather_bytes(self, data: bytes) -> list[bytes]:
        """The (small) data of all ranks; lengths may differ."""

    def collect(self, data: torch.Tensor, root: int) -> list[torch.Tensor]:
        """The flat bytes of all ranks, on rank ``root``; nothing on others. Lengths may differ."""
        parts = self.gather_bytes(bytes(view_bytes(data)))
        if self.rank != root:
            return []
        return [torch.frombuffer(bytearray(part + b"\0"), dtype=torch.uint8)[:-1] for part in parts]

    def limits(self, total: int) -> Limits | None:
        """How large buckets should be to average ``total`` bytes; None if all may be in one."""
        return None

    @abstractmethod
    def averager(self, layout: Layout, *, private: bool = True) -> Averager:
        """Prepare to average tensors laid out as ``layout``; if not ``private``, workers of a host share results."""

    def split_averager(self, layout: Layout) -> Averager:
        """The same, with halves between which data travels while this rank does other things."""
        return self.averager(layout)

    def on_loss(self, callback: Callable[[], None]) -> None:  # noqa: B027 - waits are woken by themselves
        """Have ``callback`` called, by another thread, when a rank is lost."""

    @abstractmethod
    def leave(self, failed: bool) -> None:
        """End this rank's part in the group; not collective."""


@contextmanager
def calling(call: str) -> Iterator[None]:
    """Within, messages about collectives name this call of the script; the outermost one, if there are several.

    None is named within ``calling("")``: what is due there, other ranks may do elsewhere.
    """
    token = _call.set(call and (_call.get() or call))
    try:
        yield
    finally:
        _call.reset(token)


def named(what: str) -> str:
    """A collective by the script's call of which it is a part; ranks in different calls do not do the same."""
    return f"{call}: {what}" if (call := _call.get()) else what


_call: ContextVar[str] = ContextVar("call", default="")


def describe(tensor: torch.Tensor) -> str:
    """Type and shape of a tensor, for messages."""
    return f"{str(tensor.dtype).removeprefix('torch.')}{list(tensor.shape)}"
