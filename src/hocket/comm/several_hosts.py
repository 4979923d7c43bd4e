"""Collectives over several hosts: Gloo or TCP between them, shared memory inside each.

Every collective begins with one message of a fixed length to all ranks, in which they compare what they came for.
Small tensors travel in that message. Large ones are first added up on each host, and local rank i carries slice i of
the sum to local rank i of the other hosts.
"""

from __future__ import annotations

import itertools
import struct
import sys
from collections.abc import Callable, Sequence
from typing import Any

import torch

from hocket.comm.algorithm_choice import MOST
from hocket.comm.algorithms.network_reductions import Lane, NetworkTimes
from hocket.comm.bucket_layout import cut
from hocket.comm.channel import Channel, Channels
from hocket.comm.communicator import Communicator, describe, named, through_cpu
from hocket.comm.kernels import NARROW, reduce_into
from hocket.comm.link_measurement import measure
from hocket.comm.link_model import LinkModel
from hocket.comm.tcp_group import TcpGroup
from hocket.comm.topology import Topology
from hocket.errors import MismatchError, UsageError
from hocket.transport.gate import signature
from hocket.transport.network_group import NetworkGroup, Watcher
from hocket.transport.waiting import Description, ranks, say

_MESSAGE = 1024  # bytes of the first message
_HEAD = struct.Struct("<qqq8x")  # signature, payload, length of the data that follows
_ROOM = _MESSAGE - _HEAD.size
_GLOO = (torch.float32, torch.float64, torch.int32, torch.int64, torch.uint8, torch.int8)
_HAND = "collectives"
_FEW = 16  # hosts up to which a run's record has the rate of each link
_WORTH_MEASURING = 1 << 20  # bytes of an exchange from which on the links are measured
_OVER_LONG_LINKS = 3  # buckets of an exchange that are under way at once: one stream does not fill a long link

Groups = Callable[[str, list[int]], NetworkGroup]
"""Makes a group of some ranks by a name of its own; called by all of them."""


class HostsCommunicator(Communicator):
    """The workers of a job on several hosts.

    Args:
        topology: Which rank is on which host.
        local: The workers of this host.
        watch: Tells which rank is missing.
        groups: Makes groups of ranks on different hosts.
        channels: Makes what carries messages between any ranks.
        between: How bytes move in these groups, in words.

    Attributes:
        traffic: The times of this worker's exchanges.
    """

    def __init__(
        self,
        topology: Topology,
        local: Communicator,
        watch: Watcher,
        groups: Groups,
        channels: Channels,
        between: str = "Gloo",
    ) -> None:
        self._topology, self._local = topology, local
        self.traffic: NetworkTimes = NetworkTimes(topology.name_of(topology.rank))
        self.rank, self.size = topology.rank, topology.size
        self.way = between if max(map(len, topology.hosts)) == 1 else f"shared memory, and {between} between hosts"
        self._watch, self._groups, self._channels = watch, groups, channels
        self._number = itertools.count()
        self._made: list[NetworkGroup] = []
        self._open: list[tuple[Channel, Sequence[int]]] = []  # with the ranks between which it carries messages
        self._model: LinkModel | None = None
        self._world = self._group("all", list(range(self.size)))
        self._column = self._new_column()

    @property
    def topology(self) -> Topology:
        return self._topology

    @property
    def on_host(self) -> Communicator:
        return self._local

    @property
    def waited(self) -> float:
        return sum(self.traffic.waited_for.values())

    @through_cpu
    def allreduce(self, tensor: torch.Tensor, operation: str) -> None:
        what = named(f"allreduce of {describe(tensor)}, {operation}")
        flat = tensor.view(-1)
        if tensor.nbytes <= _ROOM:
            parts = [_as(row, flat) for row in self._meet(what, 0, flat)]
            reduce_into(flat, parts, operation)
            return
        rows = self._meet(what, int(self._would_lose_nan(flat, operation)))
        if tensor.dtype in (*_GLOO, *NARROW) and not any(map(_payload, rows)):
            self._allreduce_large(flat, operation, what)
        else:
            reduce_into(flat, list(self._allgather_large(flat, what)), operation)

    def _would_lose_nan(self, flat: torch.Tensor, operation: str) -> bool:
        """Whether this rank has a NaN that is not in Gloo's maximum or minimum, which passes over them."""
        is_gloo = operation in ("max", "min") and not isinstance(self._world, TcpGroup)
        return is_gloo and flat.is_floating_point() and bool(flat.isnan().any())

    @through_cpu
    def allgather(self, tensor: torch.Tensor) -> torch.Tensor:
        what = named(f"allgather of {describe(tensor)}")
        flat = tensor.view(-1)
        if tensor.nbytes <= _ROOM:
            gathered = torch.stack([_as(row, flat) for row in self._meet(what, 0, flat)])
        else:
            self._meet(what)
            gathered = self._allgather_large(flat, what)
        return gathered.view(self.size, *tensor.shape)

    @through_cpu
    def broadcast(self, tensor: torch.Tensor, root: int) -> None:
        what = named(f"broadcast of {describe(tensor)} from rank {root}")
        flat = tensor.view(-1)
        if tensor.nbytes <= _ROOM:
            flat.copy_(_as(self._meet(what, 0, flat)[root], flat))
        else:
            self._meet(what)
            self._broadcast_large(flat, root, what)

    def barrier(self, what: str = "hocket.barrier()") -> None:
        self._meet(what)

    def meet(self, number: int, payload: int, what: Description) -> list[int]:
        self._watch.enter(_HAND)
        rows = self._exchange(number, payload, None, what)
        self._compare([int(row[:8].view(torch.int64)) for row in rows], what)
        return [_payload(row) for row in rows]

    def confirm(self, number: int, what: Description) -> None:
        """Wait until every rank is here with the same ``number``: as ``meet``, for less; only with ``TcpGroup``.

        Raises:
            MismatchError: another rank came with another number.
        """
        self._watch.enter(_HAND)
        is_same = True
        if self._local.size > 1:
            self._local.meet(number, 0, what)
        if self.topology.local_rank == 0:
            assert isinstance(self._column, TcpGroup)
            is_same = self._column.confirm(number, what)
        if self._local.size > 1:
            is_same = self._local.meet(number, is_same, what)[0] == 1
        if not is_same:
            self.meet(number, 0, what)  # which says who does what

    def gather_bytes(self, data: bytes) -> list[bytes]:
        what = named("an exchange of descriptions")
        mine = torch.frombuffer(bytearray(data or b"\0"), dtype=torch.uint8)[: len(data)]
        rows = self._meet(what, len(data), mine if len(data) <= _ROOM else None)
        lengths = [_HEAD.unpack(bytes(row[: _HEAD.size].tolist()))[1] for row in rows]
        if max(lengths) > _ROOM:
            padded = torch.zeros(max(lengths), dtype=torch.uint8)
            padded[: len(data)] = mine
            parts = list(self._allgather_large(padded, what))
        else:
            parts = [row[_HEAD.size :] for row in rows]
        return [bytes(part[:length].tolist()) for part, length in zip(parts, lengths, strict=True)]

    def collect(self, data: torch.Tensor, root: int) -> list[torch.Tensor]:
        what = named(f"a collection on rank {root}")
        rows = self._meet(what, data.numel(), data if data.numel() <= _ROOM else None)
        lengths = [_payload(row) for row in rows]
        if max(lengths) > _ROOM:
            padded = torch.zeros(max(lengths), dtype=torch.uint8)
            padded[: data.numel()] = data
            parts = self._world.gather(padded, root, what)
        else:
            parts = [row[_HEAD.size :] for row in rows]
        return [part[:length] for part, length in zip(parts, lengths, strict=True)] if self.rank == root else []

    def open_lane(self, nbytes: int = 0) -> Lane:
        name, column = f"exchange {next(self._number)}", self._new_column()
        groups = [] if column is None else [column]
        # Not before a large exchange, unless sites are needed in any case.
        if isinstance(column, TcpGroup) and (nbytes > _WORTH_MEASURING or column.choice.asked == "hierarchical"):
            self._learn_links(column)
            if nbytes > _WORTH_MEASURING and self._model is not None and self._model.is_long:
                groups += [self._same_column(f"{name}, {number}") for number in range(1, _OVER_LONG_LINKS)]
        return Lane(self.topology, groups, self.traffic, lambda: self._watch.enter(name), self._compare)

    def _same_column(self, name: str) -> NetworkGroup:
        """One more group of the ranks that carry the same slice, whose links were measured."""
        number = self.topology.local_rank
        group = self._group(f"column {number} of {name}", list(self.topology.columns[number]))
        assert isinstance(group, TcpGroup) and self._model is not None
        group.choice.learn(self._model)
        return group

    def _learn_links(self, column: TcpGroup) -> None:
        """Have sums take the algorithms that suit the links between the members of ``column``, who all call this."""
        if not 1 < column.size <= MOST:
            return
        if self._model is None:
            found: list[LinkModel] = []
            column.run(lambda links: found.append(measure(links)), 0, "measuring the links between the hosts")
            self._model = found[0]
            self.traffic.links = self._model.describe()
            if column.choice.asked == "hierarchical" and not self._model.has_sites and self.rank == 0:
                print(
                    "hocket: --algorithm hierarchical: no host is closer to some hosts than to others "
                    f"({self.traffic.links}), so sums go round one ring of all hosts",
                    file=sys.stderr,
                    flush=True,
                )
            if self._model.size <= _FEW:
                self.traffic.rates = [[round(rate / 1e6, 1) for rate in row] for row in self._model.rates]
        for group in (column, self._column, self._world):
            if isinstance(group, TcpGroup) and group.size == column.size:
                group.choice.learn(self._model)
        for channel, ranks_ in self._open:
            self._teach(channel, ranks_)

    def _teach(self, channel: Channel, ranks_: Sequence[int]) -> None:
        """Have collectives between some ranks take what suits their links, if the links of all of them are known."""
        column = self.topology.columns[self.topology.local_rank] if self._model is not None else ()
        if self._model is not None and set(ranks_) <= set(column):
            channel.choice.learn(self._model.of([column.index(rank) for rank in ranks_]))

    def open_channel(self, name: str, ranks: Sequence[int]) -> Channel:
        channel = self._channels(name, ranks)
        self._open.append((channel, ranks))
        self._teach(channel, ranks)
        return channel

    def on_loss(self, callback: Callable[[], None]) -> None:
        self._watch.on_loss = callback

    def leave(self, failed: bool) -> None:
        self._watch.leave(failed)
        for group in self._made:
            group.close()
        for channel, _ in self._open:
            channel.close()
        self._made.clear()
        self._open.clear()
        self._groups = self._channels = _no_more_groups  # which also lets go of the store
        self._local.leave(failed)

    def _group(self, name: str, members: list[int]) -> NetworkGroup:
        made = self._groups(name, members)
        if isinstance(made, TcpGroup):
            made.uses = self.traffic.uses
        self._made.append(made)
        return made

    def _new_column(self) -> NetworkGroup | None:
        """A new group of the ranks that carry the same slice as this rank; None if this rank carries none."""
        number = next(self._number)
        for i, column in enumerate(self.topology.columns):
            if self.rank in column:
                return self._group(f"column {i} of {number}", column)
        return None

    def _meet(self, what: str, payload: int = 0, data: torch.Tensor | None = None) -> list[torch.Tensor]:
        """Compare what the ranks came for; returns the messages of all ranks, which bring small data along."""
        self._watch.enter(_HAND)
        number = signature(what)
        rows = self._exchange(number, payload, data, what)
        self._compare([int(row[:8].view(torch.int64)) for row in rows], what)
        return rows

    def _exchange(self, number: int, payload: int, data: torch.Tensor | None, what: Description) -> list[torch.Tensor]:
        length = 0 if data is None else data.nbytes
        message = torch.zeros(_MESSAGE, dtype=torch.uint8)
        message[: _HEAD.size] = torch.frombuffer(bytearray(_HEAD.pack(number, payload, length)), dtype=torch.uint8)
        if data is not None and length:
            message[_HEAD.size : _HEAD.size + length] = data.detach().contiguous().view(torch.uint8)
        return self._world.allgather(message, what)

    def _compare(self, numbers: list[int], what: Description) -> None:
        """Raise on all ranks if they did not come for the same."""
        if len(set(numbers)) == 1:
            return
        text = say(what).encode()[:_ROOM]
        rows = self._exchange(0, 0, torch.frombuffer(bytearray(text), dtype=torch.uint8), "a comparison")
        said: dict[str, list[int]] = {}
        for rank, row in enumerate(rows):
            length = int(row[16:24].view(torch.int64))
            words = bytes(row[_HEAD.size : _HEAD.size + length].tolist()).decode(errors="replace")
            said.setdefault(words, []).append(rank)
        raise MismatchError(
            "the ranks do not do the same: "
            + "; ".join(f"{ranks(who)}: {words}" for words, who in said.items())
            + ". All ranks must make the same calls in the same order, with the same shapes and types"
        )

    def _allreduce_large(self, flat: torch.Tensor, operation: str, what: str) -> None:
        wide = flat.float() if flat.dtype in NARROW else flat
        plain = "sum" if operation == "mean" else operation
        if self._local.size > 1:
            self._local.allreduce(wide, plain)
        if self._column is not None:
            start, end = self._slices(wide)[self.topology.local_rank]
            self._column.allreduce(wide[start:end], plain, what)
        self._spread(wide)
        if operation == "mean":
            wide /= self.size
        if wide is not flat:
            flat.copy_(wide)

    def _allgather_large(self, flat: torch.Tensor, what: str) -> torch.Tensor:
        parts = self._world.allgather(flat.view(torch.uint8), what)
        return torch.stack(parts).view(flat.dtype)

    def _broadcast_large(self, flat: torch.Tensor, root: int, what: str) -> None:
        home = self.topology.host_of[root]
        if home == self.topology.host and self._local.size > 1:
            self._local.broadcast(flat, self.topology.local.index(root))
        if self._column is not None:
            start, end = self._slices(flat)[self.topology.local_rank]
            self._column.broadcast(flat[start:end].view(torch.uint8), home, what)
        if home != self.topology.host:
            self._spread(flat)

    def _spread(self, flat: torch.Tensor) -> None:
        """Give everyone on this host the slices that the others carried."""
        if self._local.size > 1:
            for carrier, (start, end) in enumerate(self._slices(flat)):
                if end > start:
                    self._local.broadcast(flat[start:end], carrier)

    def _slices(self, flat: torch.Tensor) -> list[tuple[int, int]]:
        return cut(flat.numel(), flat.dtype, len(self.topology.columns))


def _no_more_groups(name: str, members: Sequence[int]) -> Any:
    raise UsageError("this worker has left the job")


def _payload(row: torch.Tensor) -> int:
    """The number that a rank has told all others."""
    return int(row[8:16].view(torch.int64))


def _as(row: torch.Tensor, like: torch.Tensor) -> torch.Tensor:
    """The data of a message as a flat tensor with the elements of ``like``."""
    return row[_HEAD.size : _HEAD.size + like.nbytes].view(like.dtype)
