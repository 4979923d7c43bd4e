"""Averages tensors over all ranks in place: parameters, buffers, the state of optimizers."""

from __future__ import annotations

import itertools
import zlib
from collections.abc import Sequence

import torch
from torch import nn

from hocket.comm.communicator import Communicator
from hocket.comm.exchange import Ticket
from hocket.transport.gate import signature
from hocket.transport.waiting import Description

_AT_ONCE = 64 << 20  # bytes that are averaged at once


class InPlaceAverage:
    """Replaces the same tensors by their means over all ranks, again and again.

    Attributes:
        nbytes: Bytes of the tensors on each rank.
    """

    def __init__(self, communicator: Communicator, tensors: Sequence[torch.Tensor]) -> None:
        self._communicator = communicator
        self._make([tensor.detach() for tensor in tensors])

    def _make(self, tensors: list[torch.Tensor]) -> None:
        communicator, self._tensors, self._kinds = self._communicator, tensors, _kinds(tensors)
        self._exchange = communicator.exchange(communicator.lay_out(tensors)) if tensors else None
        self._number = zlib.crc32(repr([(t.dtype, list(t.shape)) for t in self._tensors]).encode()) << 1
        self.nbytes = sum(tensor.nbytes for tensor in self._tensors)

    def take(self, tensors: Sequence[torch.Tensor]) -> None:
        """Average these tensors from now on; collective if their shapes or types differ from those before."""
        found = [tensor.detach() for tensor in tensors]
        if _kinds(found) == self._kinds:
            self._tensors = found
        else:
            self.close()
            self._make(found)

    def average(self, what: Description, payload: int = 0, weight: float = 1.0) -> list[int]:
        """Replace the tensors by their means over all ranks; returns the payloads of all.

        Args:
            what: What is averaged, in words.
            payload: A number for all ranks.
            weight: How much this rank's tensors count; all weights have the mean 1.
        """
        return self._communicator.persist(lambda: self._average(Ticket(self._number, payload, what), weight))

    def average_by(self, mass: int, what: str) -> None:
        """Replace the tensors by their means over all ranks, of which each counts as much as its ``mass``.

        If a rank is lost meanwhile, it counts as all others know it, or not at all. If all masses are 0, nothing
        happens.
        """

        def average() -> None:
            masses = self._communicator.meet(signature(what), mass, what)
            if total := sum(masses):
                self._average(Ticket(self._number, 0, what), mass * len(masses) / total)

        self._communicator.persist(average)

    @torch.no_grad()
    def _average(self, ticket: Ticket, weight: float) -> list[int]:
        if self._exchange is None:
            return self._communicator.meet(*ticket)
        self._exchange.put(self._tensors, weight)
        self._exchange.begin(ticket)
        payloads = self._exchange.finish()
        torch._foreach_copy_(self._tensors, self._exchange.result_views)
        return payloads

    def regroup(self) -> None:
        """Go on with the workers that the communicator has now; collective."""
        self.close()
        self._make(self._tensors)

    def close(self) -> None:
        """Give the buffers back."""
        if self._exchange is not None:
            self._exchange.close()


@torch.no_grad()
def average_once(communicator: Communicator, tensors: Sequence[torch.Tensor], mass: float | None = None) -> None:
    """Replace ``tensors`` by their means over all ranks, without memory that stays, in as few messages as possible.

    Args:
        communicator: The communicator of all workers.
        tensors: Changed in place.
        mass: How much this rank counts, if ranks do not count alike. The mass travels with the tensors, so that means
            are right even if a rank is lost on the way.
    """
    groups: dict[tuple[torch.dtype, torch.device], list[torch.Tensor]] = {}
    for tensor in tensors:
        groups.setdefault((tensor.dtype, tensor.device), []).append(tensor.detach())
    for group in groups.values():
        while group:
            nbytes = itertools.accumulate(tensor.nbytes for tensor in group)
            count = max(1, sum(total <= _AT_ONCE for total in nbytes))
            flat = torch.cat([tensor.reshape(-1) for tensor in group[:count]])
            if mass is None:
                communicator.allreduce(flat, "mean")
            else:
                flat = _average_by_mass(communicator, flat, mass)
            for tensor, values in zip(group, flat.split([t.numel() for t in group[:count]]), strict=False):
                tensor.copy_(values.view(tensor.shape))
            del group[:count]


@torch.no_grad()
def copy_to(tensors: Sequence[torch.Tensor], values: Sequence[torch.Tensor]) -> None:
    """Copy ``values`` to ``tensors``; both may be empty."""
    if tensors:
        torch._foreach_copy_([tensor.detach() for tensor in tensors], list(values))


def _average_by_mass(communicator: Communicator, flat: torch.Tensor, mass: float) -> torch.Tensor:
    wide = flat if flat.dtype.itemsize >= 4 else flat.float()
    both = torch.cat([wide * mass, wide.new_tensor([mass])])
    communicator.allreduce(both, "sum")
    return both[:-1] / both[-1]


def _kinds(tensors: Sequence[torch.Tensor]) -> list[object]:
    return [(tensor.dtype, tensor.device, tensor.shape, tensor.stride()) for tensor in tensors]


Places = list[tuple[nn.Module, str]]


def floating_buffers(model: nn.Module) -> Places:
    """The places of the buffers that have a mean, which a mask of infinite numbers has not."""
    found: dict[int, tuple[nn.Module, str]] = {}
    for module in model.modules():
        for name, buffer in module._buffers.items():
            if buffer is not None and buffer.is_floating_point() and bool(torch.isfinite(buffer).all()):
                found.setdefault(id(buffer), (module, name))
    return list(found.values())


def look_up(places: Places) -> list[torch.Tensor]:
    """The buffers as they are now: a module may have replaced them."""
    found = [module._buffers.get(name) for module, name in places]
    return [buffer for buffer in found if buffer is not None]
