"""One copy of a model's parameters per host, in memory that all of its workers map."""

from __future__ import annotations

import operator
from typing import NoReturn

import torch

from hocket.capture.members import Members
from hocket.comm.layout import Layout
from hocket.comm.shared import SharedCommunicator
from hocket.errors import SharedCopyError


class SharedParameters:
    """Moves the parameters of ``members`` to shared memory, in place, with rank 0's values.

    Attributes:
        flats: All parameters as flat tensors, one per bucket of the layout.
    """

    def __init__(self, communicator: SharedCommunicator, members: Members, layout: Layout) -> None:
        self._members = members
        self.flats = []
        homes: list[torch.Tensor] = []
        for number, bucket in enumerate(layout.buckets):
            places = [place for place in layout.places if place.bucket == number]
            flat, views = communicator.one_copy(bucket.dtype, bucket.count, places, "parameters")
            self.flats.append(flat)
            homes += views
        # Buckets are filled in the order of the parameters; bring the views back to it.
        by_bucket = sorted(range(len(layout.places)), key=lambda i: layout.places[i].bucket)
        homes = [home for _, home in sorted(zip(by_bucket, homes, strict=True), key=lambda pair: pair[0])]
        if communicator.rank == 0:
            for home, parameter in zip(homes, members.parameters, strict=True):
                home.copy_(parameter.detach())
        communicator.barrier("hocket.distribute()")
        for home, parameter in zip(homes, members.parameters, strict=True):
            parameter.data = home
        self._turn = 0
        self._pointers = [parameter.data_ptr() for parameter in members.parameters]
        self.accept_writes()

    def accept_writes(self) -> None:
        """Take the parameters as they are now: every rank has written the same to them, as in load_state_dict."""
        self._versions = list(map(_version, self._members.parameters))
        self._sample = self._take_sample()

    def mark_updated(self) -> None:
        """Tell autograd that the values have changed, so that a graph from before is not used again."""
        torch.autograd.graph.increment_version(self._members.parameters)
        self._turn += 1
        self.accept_writes()

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
            f"parameter {name!r} was written to in place by the script, which with strategy 'central' every worker "
            "does to the same copy: write before hocket.distribute(), in load_state_dict(), or use --strategy mirrored"
        )


_SAMPLE = 1 << 14  # elements
_version = operator.attrgetter("_version")
