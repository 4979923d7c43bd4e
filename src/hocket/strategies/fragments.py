"""The parts in which ``diloco`` exchanges a model, each with an anchor and an outer optimizer."""

from __future__ import annotations

import zlib
from collections.abc import Sequence
from typing import Any

import torch
from torch import nn

from hocket.comm.communicator import Communicator
from hocket.comm.exchange import Ticket
from hocket.errors import StrategyError
from hocket.strategies.averaging import Places, look_up
from hocket.transport.waiting import Description


class Fragment:
    """Some parameters, their anchor (what they were after the last outer step) and the outer momentum.

    Where workers may be lost, the average is made when an exchange begins, and taken over as late as always: the
    displacement of a lost worker counts for all others or for none.

    Attributes:
        names: The names of the parameters.
        anchor: One tensor per parameter, the same on all ranks.
        momentum: One tensor per parameter, the same on all ranks.
        nbytes: How much each rank hands to an exchange.
        batch: The batch after which the last exchange began; -1 if there was none.
        is_under_way: Whether an exchange has begun and was not taken over.
        exchanges: How many averages there have been.
    """

    def __init__(
        self,
        communicator: Communicator,
        names: Sequence[str],
        parameters: Sequence[nn.Parameter],
        places: Places | None = None,
    ) -> None:
        self.names, self._parameters, self._places = list(names), list(parameters), places or []
        tensors = self._tensors()
        self._communicator = communicator
        self._exchange = communicator.exchange(communicator.lay_out(tensors), background=not communicator.changes)
        self._number = zlib.crc32(repr([(t.dtype, list(t.shape)) for t in tensors]).encode()) << 1
        self.nbytes = sum(tensor.nbytes for tensor in tensors)
        self.anchor = [parameter.detach().clone() for parameter in parameters]
        self.momentum = [torch.zeros_like(tensor) for tensor in self.anchor]
        self.batch, self.is_under_way, self.exchanges = -1, False, 0
        self._means: list[torch.Tensor] = []
        self._start: list[torch.Tensor] | None = None

    def state(self, due: int | None) -> dict[str, Any]:
        """Where this fragment is; ``due`` is when the exchange is taken over that is under way."""
        is_known = self.is_under_way and bool(self._means)
        means = {str(number): mean for number, mean in enumerate(self._means)} if is_known else {}
        return {
            "names": self.names,
            "batch": self.batch,
            "exchanges": self.exchanges,
            "due": due if is_known else None,
            "means": means,
        }

    @torch.no_grad()
    def load_state(self, state: dict[str, Any]) -> bool:
        """Go on where ``state`` was taken, with its anchor; returns whether an exchange is under way.

        This rank's displacement then, when the exchange began, was the average one.
        """
        self.exchanges, means = state["exchanges"], state["means"]
        if state["due"] is None:
            self.batch = state["batch"]
            return False
        if len(means) != len(self._parameters) + len(self._places):
            return False  # it has other buffers: the exchange is made in the next round
        self._means = [means[str(number)].to(tensor) for number, tensor in enumerate(self._tensors())]
        self._start = [anchor - mean for anchor, mean in zip(self.anchor, self._means, strict=False)]
        self.batch, self.is_under_way = state["batch"], True
        return True

    def take_anchor(self) -> None:
        """Take the parameters as they are now as the anchor; an exchange that is under way will be dropped."""
        self.drop()
        self.batch = -1
        torch._foreach_copy_(self.anchor, self._own())
        torch._foreach_zero_(self.momentum)

    @torch.no_grad()
    def begin(self, batch: int, what: Description, *, waits: bool) -> None:
        """Offer this rank's displacement to the others.

        Args:
            batch: The batch after which the exchange begins; the same on all ranks.
            what: What is exchanged, in words.
            waits: Whether there are no local steps until the average is taken over.
        """
        own = self._own()
        self._exchange.put([*self.anchor, *look_up(self._places)])
        torch._foreach_sub_(self._exchange.slot_views[: len(own)], own)
        self._start = None if waits else [tensor.clone() for tensor in own]
        self.batch, self.is_under_way = batch, True
        self._ticket = Ticket(self._number + 2 * batch, 0, what)
        if self._communicator.changes:
            self._communicator.persist(self._take_part)
            self._receive()
        else:
            self._exchange.begin(self._ticket)

    def regroup(self) -> None:
        """Go on with the workers that the communicator has now, also with an average that is being made; collective."""
        before = self._exchange
        self._exchange = self._communicator.exchange(before.layout)
        for value, slot in zip(before.slots, self._exchange.slots, strict=True):
            slot.copy_(value)
        before.close()

    def _take_part(self) -> list[int]:
        self._exchange.begin(self._ticket)
        return self._exchange.finish()

    def _finish(self) -> None:
        if self._exchange.is_under_way:
            self._exchange.finish()
            self._receive()

    def _receive(self) -> None:
        self._means = self._exchange.result_views
        self.exchanges += 1

    def progress(self) -> None:
        """Move on what is under way, without waiting."""
        self._exchange.progress()

    @torch.no_grad()
    def take_over(self, rate: float, momentum: float) -> None:
        """Wait for the average, take an outer step with it, and go on from there with the local steps since ``begin``.

        The outer step is that of ``torch.optim.SGD(nesterov=True)``, whose gradient is the average displacement.
        """
        self._finish()
        self.is_under_way = False
        own, (start, self._start) = self._own(), (self._start, None)
        means, self._means = self._means, []
        gradient = means[: len(own)]
        if momentum:
            torch._foreach_mul_(self.momentum, momentum)
            torch._foreach_add_(self.momentum, gradient)
            torch._foreach_add_(gradient, self.momentum, alpha=momentum)
        torch._foreach_add_(self.anchor, gradient, alpha=-rate)
        if start is None:
            torch._foreach_copy_(own, self.anchor)
        else:
            torch._foreach_sub_(own, start)
            torch._foreach_add_(own, self.anchor)
        if self._places:
            torch._foreach_copy_(look_up(self._places), means[len(own) :])

    def drop(self) -> None:
        """Wait for the exchange that is under way, and ignore its result."""
        if self.is_under_way:
            self._finish()
            self.is_under_way, self._start = False, None

    def _tensors(self) -> list[torch.Tensor]:
        return [*self._own(), *look_up(self._places)]

    def _own(self) -> list[torch.Tensor]:
        return [parameter.detach() for parameter in self._parameters]


def divide(sizes: Sequence[int], parts: int) -> list[list[int]]:
    """Which tensors are in which part: the largest first, each to the smallest part, so that neighbours are apart."""
    if parts > len(sizes):
        raise StrategyError(
            f"fragments={parts}, but the model has {len(sizes)} tensors of parameters, and a fragment has one or more: "
            f"use fragments={max(1, len(sizes))} or less"
        )
    divided: list[list[int]] = [[] for _ in range(parts)]
    totals = [0] * parts
    for index in sorted(range(len(sizes)), key=lambda i: -sizes[i]):
        part = min(range(parts), key=lambda each: (totals[each], len(divided[each])))
        divided[part].append(index)
        totals[part] += sizes[index]
    return [sorted(part) for part in divided]
