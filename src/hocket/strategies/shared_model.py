"""The one copy of a model's parameters that all processes of a host update, in memory of the job's coordinator."""

from __future__ import annotations

import torch

from hocket.comm.communicator import Communicator
from hocket.comm.layout import Layout
from hocket.errors import SharedCopyError, StrategyError
from hocket.server.client import Client
from hocket.strategies.members import Members
from hocket.transport.area import aligned


class SharedModel:
    """Shared memory for the parameters of ``members``, with rank 0's values, and some bytes beside them.

    Attributes:
        area: The memory; it begins with ``beside`` bytes for other purposes, all zero.
        homes: Where each parameter is in it, with a storage of its own each.
    """

    def __init__(self, client: Client, communicator: Communicator, members: Members, beside: int) -> None:
        _check(client, communicator, members)
        self._client, self._members = client, members
        layout = Layout(members.parameters)
        offsets, nbytes = [], aligned(beside)
        for bucket in layout.buckets:
            offsets.append(nbytes)
            nbytes += aligned(bucket.nbytes)
        self.area = client.share(nbytes)
        self.homes = []
        for place in layout.places:
            dtype = layout.buckets[place.bucket].dtype
            flat = self.area.tensor(offsets[place.bucket] + place.start * dtype.itemsize, place.count, dtype)
            self.homes.append(flat.as_strided(place.shape, place.stride))

    def fill(self) -> None:
        """Let the shared parameters be those of rank 0 (or the first that is left); collective."""
        writer: int | None = None
        found: list[int] = [0]
        while writer not in found:  # it may have died before it was done
            writer = min(found)
            if self._client.rank == writer:
                self.write()
            found = list(self._client.gather("hocket.distribute()", b""))

    @torch.no_grad()
    def write(self) -> None:
        """This worker's parameters become the shared ones."""
        for home, parameter in zip(self.homes, self._members.parameters, strict=True):
            if home.data_ptr() != parameter.data_ptr():
                home.copy_(parameter)

    def show(self, tensors: list[torch.Tensor]) -> None:
        """Let the model's parameters be these, of the same shapes and types."""
        for tensor, parameter in zip(tensors, self._members.parameters, strict=True):
            parameter.data = tensor
        self._pointers = [parameter.data_ptr() for parameter in self._members.parameters]

    def check(self) -> None:
        """Raise if a parameter is no longer where it was shown; looks at no values."""
        if list(map(torch.Tensor.data_ptr, self._members.parameters)) != self._pointers:
            members = zip(self._members.names, self._members.parameters, self._pointers, strict=True)
            name = next(name for name, parameter, pointer in members if parameter.data_ptr() != pointer)
            raise SharedCopyError(
                f"parameter {name!r} has left the copy that strategy 'hogwild' shares: do not call model.to(…), "
                "share_memory() or load_state_dict(assign=True), nor set p.data, after hocket.distribute()"
            )


def _check(client: Client, communicator: Communicator, members: Members) -> None:
    hosts = len(communicator.topology.hosts)
    if hosts > 1:
        raise StrategyError(
            f"strategy 'hogwild' shares memory, and the workers are on {hosts} hosts: have all of them on one, or use "
            "--servers 1 --strategy asynchronous"
        )
    if not client.first.is_local:
        raise StrategyError(
            "strategy 'hogwild' needs shared memory, and this job uses TCP: leave out --transport gloo, or use "
            "--servers 1 --strategy asynchronous"
        )
    if any(parameter.device.type != "cpu" for parameter in members.parameters):
        raise StrategyError(
            "strategy 'hogwild' shares memory of the CPU, and this model is on a GPU: use --strategy mirrored, or "
            "--servers 1 --strategy asynchronous"
        )
