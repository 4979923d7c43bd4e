"""The one copy of a model's parameters on a host, and the memory of the host's workers, in which the copy lies."""

from __future__ import annotations

import operator
from collections.abc import Sequence
from typing import NoReturn

import torch

from hocket.capture.members import Members
from hocket.comm.algorithms.memory_reductions import SharedBuffer
from hocket.comm.bucket_layout import Layout, Place
from hocket.comm.communicator import Communicator
from hocket.errors import SharedCopyError
from hocket.transport.area import Area
from hocket.transport.gate import signature
from hocket.transport.waiting import Description


class HostMemory:
    """The memory of the workers of this host, of whatever generation they are; one worker alone has its own.

    Nothing here goes on by itself when a worker is lost: what has to be repeated then is more than one meeting.
    """

    def __init__(self, communicator: Communicator) -> None:
        self._communicator = communicator.on_host

    @property
    def rank(self) -> int:
        """The number of this worker among those of this host."""
        return 0 if self._communicator.memory is None else self._communicator.rank

    @property
    def size(self) -> int:
        """How many workers this host has."""
        return 1 if self._communicator.memory is None else self._communicator.size

    def meet(self, number: int, payload: int, what: Description) -> list[int]:
        """Wait until every worker of this host is here with the same ``number``; the payloads of all."""
        memory = self._communicator.memory
        return [payload] if memory is None else memory.meet(number, payload, what)

    def barrier(self, what: str = "hocket.barrier()") -> None:
        """Wait until every worker of this host is here."""
        self.meet(signature(what), 0, what)

    def one_copy(
        self, dtype: torch.dtype, count: int, places: Sequence[Place], purpose: str
    ) -> tuple[torch.Tensor, list[torch.Tensor]]:
        """``count`` elements, all zero, that every worker maps: flat, and as one tensor for each of ``places``.

        Those tensors have storages of their own, so that ``torch.save`` writes each in its plain size.
        """
        memory = self._communicator.memory
        if memory is None:
            area = Area.create(count * dtype.itemsize, purpose)
            area.close_descriptor()
        else:
            area = memory.allocate(count * dtype.itemsize, purpose)
        tensors = [area.tensor(p.start * dtype.itemsize, p.count, dtype).as_strided(p.shape, p.stride) for p in places]
        return area.tensor(0, count, dtype), tensors

    def slots(self, layout: Layout, purpose: str) -> list[list[torch.Tensor]]:
        """One slot for each worker, by bucket."""
        memory = self._communicator.memory
        if memory is None:
            return [layout.allocate_here()]
        return SharedBuffer(memory, layout.buckets, purpose, result=False).slots


class SharedParameters:
    """The parameters of ``members`` in shared memory, with rank 0's values.

    The script's parameters are this copy. Those on a GPU cannot be: they stay where they are, and get the values of the
    copy whenever it has changed.

    Attributes:
        flats: All parameters as flat tensors, one per bucket of the layout.
        stands_apart: Whether the script's parameters are not the copy itself.
    """

    def __init__(self, host: HostMemory, members: Members, layout: Layout) -> None:
        self._host, self._members, self._layout = host, members, layout
        self.stands_apart = stands_apart(layout)
        self._turn = 0
        self.offer()
        host.barrier("hocket.distribute()")
        self.move()

    def offer(self) -> list[torch.Tensor]:
        """Copy rank 0's values to memory of the workers that there are now; collective.

        Returns:
            The copy, flat. It is complete when all workers have met once more, and used from ``move`` on.
        """
        flats: list[torch.Tensor] = []
        homes: list[torch.Tensor] = []
        places = self._layout.places
        for number, bucket in enumerate(self._layout.buckets):
            inside = [place for place in places if place.bucket == number]
            flat, views = self._host.one_copy(bucket.dtype, bucket.count, inside, "parameters")
            flats.append(flat)
            homes += views
        # Buckets are filled in the order of the parameters; bring the views back to that order.
        by_bucket = sorted(range(len(places)), key=lambda i: places[i].bucket)
        homes = [home for _, home in sorted(zip(by_bucket, homes, strict=True), key=lambda pair: pair[0])]
        if self._host.rank == 0:
            for home, parameter in zip(homes, self._members.parameters, strict=True):
                home.copy_(parameter.detach())
        self._offered = flats, homes
        return flats

    def move(self) -> None:
        """Let the parameters be the copy that was offered last."""
        self.flats, self._homes = self._offered
        if self.stands_apart:
            self._fetch()
        else:
            for home, parameter in zip(self._homes, self._members.parameters, strict=True):
                parameter.data = home
        self._pointers = [parameter.data_ptr() for parameter in self._members.parameters]
        self._note()

    def accept_writes(self) -> None:
        """Take the parameters as they are now: every rank has written the same to them, as in load_state_dict."""
        if self.stands_apart and self._host.rank == 0:  # the others read the copy after the next update
            for home, parameter in zip(self._homes, self._members.parameters, strict=True):
                home.copy_(parameter.detach())
        self._note()

    def mark_updated(self) -> None:
        """The copy has changed: so do the parameters, and autograd does not use a graph from before again."""
        if self.stands_apart:
            self._fetch()
        else:
            torch.autograd.graph.increment_version(self._members.parameters)
        self._turn += 1
        self._note()

    @torch.no_grad()
    def _fetch(self) -> None:
        """Bring the values of the copy to parameters that stand apart, bucket by bucket."""
        brought = self._layout.views([flat.to(self._layout.device) for flat in self.flats])
        torch._foreach_copy_(list[torch.Tensor](self._members.parameters), brought)

    def _note(self) -> None:
        self._versions = list(map(_version, self._members.parameters))
        self._sample = self._take_sample()

    def check(self) -> None:
        """Raise if a parameter has left the shared copy or was written to by the script."""
        members = self._members
        if list(map(torch.Tensor.data_ptr, members.parameters)) != self._pointers:
            self._raise_left()
        if list(map(_version, members.parameters)) != self._versions:
            self._raise_written()
        # Writing to p.data leaves no trace in the versions, so one parameter's values are looked at, each time another.
        if self._take_sample() != self._sample:
            self._raise_written(self._turn % len(members.parameters))

    def _raise_left(self) -> NoReturn:
        members = zip(self._members.names, self._members.parameters, self._pointers, strict=True)
        name = next(name for name, parameter, pointer in members if parameter.data_ptr() != pointer)
        raise SharedCopyError(
            f"parameter {name!r} has left the copy that strategy 'central' shares: do not call model.to(…), "
            "share_memory() or load_state_dict(assign=True), nor set p.data, after hocket.distribute()"
        )

    def _take_sample(self) -> str:
        parameter = self._members.parameters[self._turn % len(self._members.parameters)]
        return repr(float(parameter.detach().view(-1)[:_SAMPLE].sum())) if parameter.is_contiguous() else ""

    def _raise_written(self, index: int | None = None) -> NoReturn:
        members = zip(self._members.names, self._members.parameters, self._versions, strict=True)
        name = (
            next(name for name, parameter, version in members if parameter._version != version)
            if index is None
            else self._members.names[index]
        )
        raise SharedCopyError(
            f"parameter {name!r} was written to in place by the script, and strategy 'central' has one copy of it for "
            "all workers: write before hocket.distribute(), in load_state_dict(), or use --strategy mirrored"
        )


def stands_apart(layout: Layout) -> bool:
    """Whether tensors laid out as ``layout`` cannot be in memory that workers share, because they are on a GPU."""
    return layout.device.type != "cpu"


_SAMPLE = 1 << 14  # elements of a parameter that are looked at
_version = operator.attrgetter("_version")
