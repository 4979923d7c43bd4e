"""The contract of a group of workers: collectives by hand, and the exchanges that training repeats."""

from __future__ import annotations

import functools
import json
import platform
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from contextvars import ContextVar
from typing import Any, TypeVar, cast

import torch

from hocket.comm.algorithms import choose
from hocket.comm.algorithms.network_reductions import Lane, NetworkTimes
from hocket.comm.bucket_layout import Layout, Limits, bucket_limits
from hocket.comm.channel import Channel
from hocket.comm.exchange import Algorithm, Exchange
from hocket.comm.topology import Topology
from hocket.errors import UsageError
from hocket.specs.codecs import CodecSpec
from hocket.transport.nccl import NcclGroup
from hocket.transport.shared_memory import SharedMemory
from hocket.transport.tensor_bytes import view_bytes
from hocket.transport.waiting import Description

T = TypeVar("T")


ConnectGpus = Callable[[int, int, int, Callable[[], None] | None], NcclGroup]
"""Connects the GPUs of a rank, of so many, in a generation; the last argument looks whether all workers live."""


class Communicator(ABC):
    """A group of workers. Every method is called by all workers together, and blocks until all have called it."""

    rank: int
    size: int
    way: str
    """How bytes move, in words."""

    changes: bool = False
    """Whether the group goes on, with fewer workers, when a worker dies, and others may come."""

    parts: bool = False
    """Whether workers that are to leave do so in ``look``: those alone where the others go on, else all together."""

    has_newcomers: bool = False
    """Whether some workers have just come to the group, and nobody is in the middle of a batch."""

    generation: int = 0
    """How often the workers of the group have changed."""

    traffic: NetworkTimes | None = None
    """The times of exchanges with other hosts; None if there are no other hosts."""

    nccl: NcclGroup | None = None
    """What connects the GPUs of all ranks, if each has one."""

    @property
    def members(self) -> tuple[int, ...]:
        """The number of each worker in the job, by rank; these numbers stay when others are lost."""
        return tuple(range(self.size))

    @property
    def topology(self) -> Topology:
        """Which rank is on which host; by default all are on this host."""
        return Topology(self.rank, (tuple(range(self.size)),), (platform.node(),))

    @property
    def on_host(self) -> Communicator:
        """The workers of this host."""
        return self

    @property
    def memory(self) -> SharedMemory | None:
        """The shared memory of the workers of this host, if they have any."""
        return None

    @property
    def spreads(self) -> bool:
        """Whether workers are on several hosts, or may come to be; the same for all workers, and for ever."""
        return self.traffic is not None

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

    def open_channel(self, name: str, ranks: Sequence[int]) -> Channel:
        """This rank's end of the messages between some ranks, which connect when they first need it; not collective.

        Args:
            name: A name that no other channel of this communicator has; the same on all of ``ranks``.
            ranks: This rank and the others, in the same order on all of them.
        """
        raise UsageError(f"groups of workers, and messages between two, are not possible here ({self.way})")

    def open_group(self, name: str, ranks: Sequence[int]) -> Communicator | None:
        """A group of some of the workers, on which another thread can call collectives; None for those outside.

        Args:
            name: A name that no other group or channel of this communicator has; the same on all workers.
            ranks: The ranks of the members, in order.
        """
        from hocket.comm.alone import AloneCommunicator
        from hocket.comm.channel_group import ChannelCommunicator

        if self.rank not in ranks:
            return None
        if len(ranks) == 1:
            return AloneCommunicator()
        return ChannelCommunicator(self.open_channel(name, ranks), ranks.index(self.rank), ranks)

    def gather_data(self, mine: Any) -> list[Any]:
        """The plain data of all ranks; that of ranks which say the same is one object."""
        parts = self.gather_bytes(json.dumps(mine).encode())
        read = {part: json.loads(part) for part in set(parts)}
        return [read[part] for part in parts]

    def collect(self, data: torch.Tensor, root: int) -> list[torch.Tensor]:
        """The flat bytes of all ranks, on rank ``root``; nothing on others. Lengths may differ."""
        parts = self.gather_bytes(bytes(view_bytes(data)))
        if self.rank != root:
            return []
        return [torch.frombuffer(bytearray(part + b"\0"), dtype=torch.uint8)[:-1] for part in parts]

    def now(self) -> float:
        """The time in seconds; a simulation has a clock of its own."""
        return time.monotonic()

    def open_lane(self, nbytes: int = 0) -> Lane | None:
        """What one more exchange, of so many bytes, needs to cross hosts; None if all workers are on one host."""
        return None

    def lay_out(
        self,
        tensors: Sequence[torch.Tensor],
        order: Sequence[int] | None = None,
        limits: Callable[[int], Limits] | None = None,
    ) -> Layout:
        """Where ``tensors`` lie in the buckets of an exchange; not collective.

        What crosses a network, or leaves a GPU, travels in several buckets, so that the first can be under way while
        gradients of the last are made.

        Args:
            tensors: What is to be exchanged.
            order: The order in which the tensors lie in the buckets; by default that of ``tensors``.
            limits: How large buckets are for so many bytes, where that has been measured.
        """
        on_gpu = any(tensor.is_cuda for tensor in tensors[:1])
        travels = self.spreads or (on_gpu and (self.size > 1 or self.nccl is not None))
        limits = limits or bucket_limits
        nbytes = sum(tensor.nbytes for tensor in tensors)
        return Layout(tensors, order=order, limits=limits(nbytes) if travels else None)

    def exchange(
        self,
        layout: Layout,
        *,
        background: bool = False,
        turns: int = 1,
        private: bool = True,
        codec: CodecSpec | None = None,
    ) -> Exchange:
        """Prepare to average tensors laid out as ``layout``, again and again.

        Args:
            layout: Where each tensor lies, and on which device.
            background: Whether this rank does other things between ``begin`` and ``finish``; data then travels
                meanwhile.
            turns: 2 if values are written, or means read, while a round is under way; that takes twice the memory.
            private: Whether this rank has the means for itself. Else workers of a host share them, nobody writes to
                them, and the slots are left as they are.
            codec: How values travel between hosts in fewer bytes; means are those of what was sent then.
        """

        def make() -> Algorithm:
            return choose(self, layout, background=background, private=private, codec=codec)

        return Exchange(layout, [make() for _ in range(turns)])

    def persist(self, call: Callable[[], T]) -> T:
        """The result of ``call``, which is collective; it is called again if workers die meanwhile, and others go on.

        What ``call`` needs must be the same when it is called again.
        """
        return call()

    def stay(self, why: str) -> None:  # noqa: B027 - most groups never change
        """The workers of the group cannot change, for a reason in words with its remedy; not collective.

        Raises:
            UsageError: the user has asked for a group that changes.
        """

    def begin(self) -> None:  # noqa: B027 - most groups never change
        """Training begins; not collective."""

    def aside(self) -> AbstractContextManager[None]:
        """Workers that join later do not make the calls inside this context; they get what follows from them."""
        return nullcontext()

    def look(self) -> None:  # noqa: B027 - most groups never change
        """Between two batches: notice whether workers are gone, or are to join or leave, and go on with those left."""

    def connect_gpus(self, connect: ConnectGpus) -> None:
        """Connect the GPUs of all ranks, and again whenever the ranks have changed; collective."""
        self.nccl = connect(self.rank, self.size, self.generation, None)
        self.on_loss(self.nccl.abort)

    def on_loss(self, callback: Callable[[], None]) -> None:  # noqa: B027 - waits are woken by themselves
        """Have ``callback`` called, by another thread, when a rank is lost."""

    @abstractmethod
    def leave(self, failed: bool) -> None:
        """End this rank's part in the group; not collective."""


@contextmanager
def calling(call: str) -> Iterator[None]:
    """Inside this context, messages about collectives name this call of the script, or the outermost of several.

    No call is named inside ``calling("")``: other ranks may make its collectives elsewhere.
    """
    token = _call.set(call and (_call.get() or call))
    try:
        yield
    finally:
        _call.reset(token)


def named(what: str) -> str:
    """The name of a collective with the script's call that it is part of, so that ranks in other calls are noticed."""
    return f"{call}: {what}" if (call := _call.get()) else what


_call: ContextVar[str] = ContextVar("call", default="")


Method = TypeVar("Method", bound=Callable[..., Any])


def through_cpu(method: Method) -> Method:
    """Let a collective that takes a tensor of the CPU, and changes it or returns another, take one of a GPU, too."""

    @functools.wraps(method)
    def collective(self: Any, tensor: torch.Tensor, *args: Any, **options: Any) -> Any:
        if tensor.device.type == "cpu":
            return method(self, tensor, *args, **options)
        staged = tensor.cpu()
        result = method(self, staged, *args, **options)
        if result is not None:
            return result.to(tensor.device)
        tensor.copy_(staged)
        return None

    return cast(Method, collective)


def describe(tensor: torch.Tensor) -> str:
    """Type and shape of a tensor, for messages."""
    return f"{str(tensor.dtype).removeprefix('torch.')}{list(tensor.shape)}"
