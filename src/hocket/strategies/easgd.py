"""``easgd``, synchronous: every rank holds a copy of the centre (Zhang et al. 2015, equations 2 and 3)."""

from __future__ import annotations

import zlib
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch

from hocket.errors import ReplicaError
from hocket.specs import EASGD
from hocket.strategies.averaging import InPlaceAverage, average_once
from hocket.strategies.base import Context, Why
from hocket.strategies.elastic import ElasticTraining
from hocket.strategies.optimizer_state import merged_state
from hocket.transport.tensor_bytes import view_bytes

_SAMPLE = 1 << 16  # bytes of the centre that are compared in each pull


class EASGDTraining(ElasticTraining):
    """Synchronous ``easgd``: all workers pull at the same time; the copies of the centre are equal, bit for bit.

    Attributes:
        centre: The centre, as one tensor for each parameter.
    """

    def __init__(self, context: Context, spec: EASGD) -> None:
        super().__init__(context, spec)
        self.centre = [parameter.detach().clone() for parameter in context.members.parameters]
        self._sampled = -1  # the tensor of the centre that was looked at last
        self._differences = [torch.zeros_like(tensor) for tensor in self.centre]
        self._average = InPlaceAverage(context.communicator, self._differences)

    def state(self) -> dict[str, Any]:
        return {**super().state(), "settled": self._is_settled}

    def load_state(self, state: dict[str, Any]) -> None:
        super().load_state(state)
        self._is_settled = state.get("settled", True)  # a newcomer settles when the others do

    def settle(self, why: Why) -> None:
        if why is Why.SWITCH_AWAY:
            self._is_settled &= self._shows
        super().settle(why)
        if why is Why.SWITCH_AWAY:
            self._shows, self._aside = False, None
        elif why is Why.SWITCH_TO:
            self._in_round = 0
            self._loaded()
            self._heed_loading()

    @property
    def exchanges(self) -> int:
        return self.pulls

    def regroup(self, weight: float) -> None:
        self._average.regroup()
        self.alpha = self._find_alpha()

    @contextmanager
    def merged(self) -> Iterator[None]:
        with super().merged(), merged_state(self._communicator, self._optimizer):
            yield

    @torch.no_grad()
    def _pull(self) -> None:
        own = [parameter.detach() for parameter in self._members.parameters]
        torch._foreach_copy_(self._differences, own)
        torch._foreach_sub_(self._differences, self.centre)
        # Where a worker is lost, some know of it before they come here and others not: each brings what it has moved.
        torch._foreach_mul_(self._differences, self.alpha)
        torch._foreach_sub_(own, self._differences)
        payloads = self._average.average(f"the elastic pull after {self.batches} batches", self._sample())
        if len(set(payloads)) > 1:
            raise ReplicaError(
                f"after {self.batches} batches the workers' copies of the centre are not equal any more: the script "
                "has written to the parameters, or loaded some, on some ranks only; do the same on every rank"
            )
        torch._foreach_add_(self.centre, self._differences, alpha=self._communicator.size)
        self.sent += self._average.nbytes

    def _sample(self) -> int:
        """A number for a part of the centre, another one in each pull; of all of it, if it is small."""
        number = nbytes = 0
        while nbytes < min(_SAMPLE, self._average.nbytes):
            self._sampled = (self._sampled + 1) % len(self.centre)
            flat = self.centre[self._sampled].reshape(-1)
            most = max(1, _SAMPLE // flat.itemsize)
            start = self.pulls * most % max(1, len(flat) - most)
            number = zlib.crc32(view_bytes(flat[start : start + most].cpu()), number)
            nbytes += flat.nbytes
        return number

    def _make_equal(self) -> None:
        super()._make_equal()
        average_once(self._communicator, self._buffers)

    def _centre(self) -> list[torch.Tensor]:
        return self.centre

    @torch.no_grad()
    def _merge(self) -> None:
        torch._foreach_copy_([parameter.detach() for parameter in self._members.parameters], self.centre)
        differing = [] if self._shows else self._buffers
        average_once(self._communicator, differing)

    @torch.no_grad()
    def _take_centre(self) -> None:
        torch._foreach_copy_(self.centre, [parameter.detach() for parameter in self._members.parameters])
