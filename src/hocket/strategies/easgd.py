"""``easgd``, synchronous: every rank holds a copy of the centre (Zhang et al. 2015, equations 2 and 3)."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import nn
from torch.optim import Optimizer

from hocket.comm.communicator import Communicator
from hocket.strategies.blend import Blend, average_once
from hocket.strategies.choices import EASGD
from hocket.strategies.elastic import ElasticTraining
from hocket.strategies.members import Members
from hocket.strategies.optimizer_state import merged_state


class EASGDTraining(ElasticTraining):
    """All workers pull at the same time; the centre's copies are equal, bit for bit.

    Attributes:
        centre: One tensor for each parameter.
    """

    def __init__(
        self,
        communicator: Communicator,
        model: nn.Module,
        optimizer: Optimizer,
        members: Members,
        choice: EASGD,
        on_nan: str,
        *,
        rests: bool = False,
    ) -> None:
        super().__init__(communicator, model, optimizer, members, choice, on_nan, rests=rests)
        self.centre = [parameter.detach().clone() for parameter in members.parameters]
        self._differences = [torch.zeros_like(tensor) for tensor in self.centre]
        self._blend = Blend(communicator, self._differences)

    def rest(self) -> None:
        self._is_settled &= self._shows
        super().rest()
        self._shows, self._aside = False, None

    def rise(self) -> None:
        super().rise()
        self._in_round = 0
        self._loaded()
        self._heed_loading()

    @contextmanager
    def merged(self) -> Iterator[None]:
        with super().merged(), merged_state(self._communicator, self._optimizer):
            yield

    @torch.no_grad()
    def _pull(self) -> None:
        own = [parameter.detach() for parameter in self._members.parameters]
        torch._foreach_copy_(self._differences, own)
        torch._foreach_sub_(self._differences, self.centre)
        torch._foreach_add_(own, self._differences, alpha=-self.alpha)
        self._blend.average(f"the elastic pull after {self.batches} batches")
        torch._foreach_add_(self.centre, self._differences, alpha=self.alpha * self._communicator.size)
        self.sent += self._blend.nbytes

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
