"""The one engine for every repeated exchange of the same tensors: each rank gives values, and gets their means."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import NamedTuple

import torch

from hocket.comm.bucket_layout import Layout
from hocket.transport.waiting import Description


class Ticket(NamedTuple):
    """What a rank comes with to one round of an exchange.

    Attributes:
        number: Ranks that come with different numbers do not do the same, and are told so.
        payload: A number for all ranks, which travels with the data.
        what: The round in words, for messages.
    """

    number: int
    payload: int
    what: Description


class Algorithm(ABC):
    """How the means over all ranks are made. One object serves one exchange, round after round.

    In each round the caller writes ``slots``, calls ``begin`` and then ``finish``, and reads ``results``.
    """

    slots: list[torch.Tensor]
    """Where this rank puts its values, one flat tensor per bucket."""

    results: list[torch.Tensor]
    """The means, one flat tensor per bucket. They may be the slots: means stay there until new values are written."""

    overlaps: bool = False
    """Whether ``ready`` sends a bucket off before ``begin``."""

    idle: frozenset[int] = frozenset()
    """Buckets for which no rank has values; the same on all ranks. They may be left out."""

    _ticket: Ticket

    def claim(self) -> None:  # noqa: B027 - most algorithms need not wait
        """Wait until this rank may write its slots: other ranks may still read the values of the last round."""

    def ready(self, bucket: int) -> None:  # noqa: B027 - there may be nothing to do
        """This rank's values of ``bucket`` are complete before ``begin``, and may be sent off."""

    def begin(self, ticket: Ticket) -> None:
        """Offer what is in ``slots``, and wait for nobody."""
        self._ticket = ticket

    def progress(self) -> None:  # noqa: B027 - there may be nothing to do
        """Move on what is under way, without waiting."""

    @abstractmethod
    def finish(self) -> list[int]:
        """Wait until ``results`` are there; returns the payloads of all ranks."""

    def end_round(self) -> bool:
        """The round that ``finish`` has finished is over on all ranks, and will not be made again.

        Returns:
            Whether there are means: with a codec, values that are not finite on some rank leave none.
        """
        return True

    def owed(self) -> list[torch.Tensor] | None:
        """What this rank has not sent so far, one flat tensor per bucket; None if everything is always sent."""
        return None

    def owe(self, values: Sequence[torch.Tensor], rounds: int) -> None:  # noqa: B027 - most send everything
        """Owe these values from now on, the same on all ranks, together with the others, after so many rounds."""

    def close(self) -> None:  # noqa: B027 - there may be nothing to do
        """Give back what only this algorithm needs; all ranks are done with it."""


class Alone(Algorithm):
    """One rank, whose values are their own mean."""

    def __init__(self, layout: Layout) -> None:
        self.slots = self.results = layout.allocate()

    def finish(self) -> list[int]:
        return [self._ticket.payload]


class Exchange:
    """Averages tensors laid out as ``layout`` over all ranks, round after round; made by ``Communicator.exchange``.

    In each round a rank writes its values (by ``put``, or to ``slots`` after ``claim``), calls ``begin``, which does
    not wait, and then ``finish``, which does. Between these two nobody touches slots or results, other exchanges may
    begin and end, and other collectives may be called, in the same order on all ranks. Values are given as they are:
    what an algorithm needs to make a mean of a sum is its own matter.

    Args:
        layout: Where each tensor lies in the buckets.
        algorithms: How means are made. With two of them, the rounds take turns: the next values can be written, and the
            last means read, while a round is under way.

    Attributes:
        slots: Where this rank writes its next values, one flat tensor per bucket.
        slot_views: The slots, as one view per tensor.
        results: The means of the last finished round, one flat tensor per bucket. They may be the slots.
        result_views: The results, as one view per tensor.
        overlaps: Whether buckets that are ``ready`` travel before ``begin``.
        is_under_way: Whether a round has begun that is not finished.
    """

    def __init__(self, layout: Layout, algorithms: Sequence[Algorithm]) -> None:
        self.layout = layout
        self._turns = [_Turn(algorithm, layout) for algorithm in algorithms]
        self.overlaps = algorithms[0].overlaps
        self.is_under_way = False
        self._show_slots()
        self._show_results()

    @property
    def idle(self) -> frozenset[int]:
        """Buckets for which no rank has values; set alike on all ranks, between two rounds."""
        return self._turns[0].algorithm.idle

    @idle.setter
    def idle(self, buckets: frozenset[int]) -> None:
        for turn in self._turns:
            turn.algorithm.idle = buckets

    def claim(self) -> None:
        """Wait until this rank may write ``slots``: other ranks may still read what was there. Seldom takes time."""
        self._turns[0].algorithm.claim()

    @torch.no_grad()
    def put(self, tensors: Sequence[torch.Tensor | None], weight: float = 1.0) -> None:
        """Write ``tensors``, one for each place of the layout, to the slots; None counts as zeros.

        Args:
            tensors: This rank's values.
            weight: The factor for this rank's values. In a weighted mean, all weights have the mean 1.
        """
        self.claim()
        pairs = [(view, tensor) for view, tensor in zip(self.slot_views, tensors, strict=True) if tensor is not None]
        if pairs:
            views = [view for view, _ in pairs]
            torch._foreach_copy_(views, [tensor for _, tensor in pairs])
            if weight != 1:
                torch._foreach_mul_(views, weight)
        if len(pairs) < len(tensors):
            torch._foreach_zero_([v for v, tensor in zip(self.slot_views, tensors, strict=True) if tensor is None])

    def ready(self, bucket: int) -> None:
        """This rank's values of ``bucket`` are complete before ``begin``; the bucket may be sent off."""
        self._turns[0].algorithm.ready(bucket)

    def begin(self, ticket: Ticket) -> None:
        """Offer what is in ``slots``, and wait for nobody. With two algorithms, ``slots`` are others afterwards."""
        assert not self.is_under_way
        self.is_under_way = True
        self._turns[0].algorithm.begin(ticket)
        if len(self._turns) > 1:
            self._turns.reverse()
            self._show_slots()

    def progress(self) -> None:
        """Move on what is under way, or was ``ready`` before ``begin``, without waiting."""
        for turn in self._turns:
            turn.algorithm.progress()

    def finish(self) -> list[int]:
        """Wait for the round that has begun, whose means are in ``results`` then; returns all payloads.

        Raises:
            MismatchError: The ranks' tickets have different numbers.
        """
        assert self.is_under_way
        self.is_under_way = False
        payloads = self._turns[-1].algorithm.finish()
        if not self._turns[-1].algorithm.end_round():
            for view in self._turns[-1].result_views:
                view.fill_(float("nan"))
        if len(self._turns) > 1:
            self._show_results()
        return payloads

    def owed(self) -> list[torch.Tensor] | None:
        """What this rank has not sent so far of each tensor; None if everything is always sent."""
        found = [owed for turn in self._turns if (owed := turn.algorithm.owed()) is not None]
        return self.layout.views([torch.stack(parts).sum(0) for parts in zip(*found, strict=True)]) if found else None

    def owe(self, values: Sequence[torch.Tensor], rounds: int) -> None:
        """Owe ``values`` from now on, one for each tensor, the same on all ranks and once together with the others.

        Args:
            values: What was not sent.
            rounds: How many rounds there have been.
        """
        flats = self.layout.allocate()
        torch._foreach_copy_(self.layout.views(flats), list(values))
        for turn in self._turns:
            turn.algorithm.owe(flats, rounds)
            for flat in flats:
                flat.zero_()

    def close(self) -> None:
        """Give back what only this exchange needs; all ranks are done with it."""
        for turn in self._turns:
            turn.algorithm.close()

    def _show_slots(self) -> None:
        self.slots, self.slot_views = self._turns[0].algorithm.slots, self._turns[0].slot_views

    def _show_results(self) -> None:
        self.results, self.result_views = self._turns[-1].algorithm.results, self._turns[-1].result_views


class _Turn:
    """An algorithm, and the tensors in its buckets."""

    def __init__(self, algorithm: Algorithm, layout: Layout) -> None:
        self.algorithm = algorithm
        self.slot_views = layout.views(algorithm.slots)
        same = algorithm.results is algorithm.slots
        self.result_views = self.slot_views if same else layout.views(algorithm.results)
