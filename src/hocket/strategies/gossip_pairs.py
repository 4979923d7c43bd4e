"""Asynchronous gossip (AD-PSGD, Lian et al. 2018): averages with one neighbour at a time, and nobody waits."""

from __future__ import annotations

import random

import torch

from hocket.comm.pairs import Pairs
from hocket.strategies.gossip import GossipTraining


class PairedTraining(GossipTraining):
    """Asynchronous gossip: the vector that is exchanged is not the parameters that are used for computing.

    A batch is computed with a copy of the vector; what the step changes is added to the vector, which others may have
    changed meanwhile; then an average with a neighbour is begun that is drawn at random, and the next batch gets a copy
    of the vector as it is. If an average before is still under way, none is begun.
    """

    def _prepare(self) -> None:
        self._pairs = Pairs(self._peers, self.flats, self.lock)
        self._random = random.Random(f"{self._spec.seed} {self._client.rank}")
        self._copies = [view.clone() for view in self._views]  # the vector with which the batch at work began

    def begin_loop(self, epoch: int) -> None:
        if self._pairs.is_open:
            self._publish()  # others may have changed the vector: it must not be replaced
        else:
            super().begin_loop(epoch)
            self._pairs.open(self._pass)

    @torch.no_grad()
    def _begin(self) -> None:
        """The vector is this worker's alone until its next loop begins."""
        self._pairs.close(self._timeout)
        with self.lock:
            super()._publish()
            torch._foreach_copy_(self._copies, self._views)

    @torch.no_grad()
    def _publish(self) -> None:
        """Add this worker's steps to the vector, and set the parameters to the vector."""
        for parameter, copy in zip(self._parameters, self._copies, strict=True):
            torch.sub(parameter.cpu(), copy, out=copy)  # in place: memory that comes and goes costs more than the sum
        with self.lock:
            torch._foreach_add_(self._views, self._copies)
            torch._foreach_copy_(self._copies, self._views)
        torch._foreach_copy_(self._parameters, self._copies)
        self._bump()

    def _mix(self) -> None:
        self._publish()
        self._pairs.open(self._pass)  # without training loops, nothing else opens them
        if self._pairs.distance is not None:
            square, self._pairs.distance = self._pairs.distance, None
            self._measure(lambda: square)
        others = list(self._graph.neighbours(self._peers.live, self._client.rank, 0))
        if self._spec.topology == "pairs":
            others = [rank for rank in self._peers.live if rank != self._client.rank]
        if others and self._pairs.average(self._random.choice(others)):
            self.sent += sum(flat.nbytes for flat in self.flats)

    def _catch_up(self) -> None:
        self._publish()

    def _withdraw(self, *, for_good: bool) -> None:
        """Nothing to do: the worker's threads go on averaging, and nobody waits for it anyway."""

    def _collapse(self) -> None:
        self._pairs.close(self._timeout)
        self._publish()
