"""Gossip in step: mixing with all neighbours of a round, in both orders, and push-sum."""

from __future__ import annotations

import json
from typing import Any

import torch

from hocket.comm.neighbour_rounds import Arrival, Rounds
from hocket.comm.pairs import squares
from hocket.specs import Gossip
from hocket.strategies.base import Context, Why
from hocket.strategies.gossip import GossipTraining, combine

_LEAST = 0.5  # the part of its weight in the beginning with which a worker of push-sum gives none of it away
_PASS = 1 << 24  # most rounds in a pass, so that rounds of different passes have different numbers


class _InStep(GossipTraining):
    """Gossip in rounds, in which neighbours wait for each other."""

    def _prepare(self) -> None:
        self._rounds = Rounds(self._peers, self.flats, self._timeout, pushes=self._spec.push_sum)

    def _begin(self) -> None:
        self._rounds.begin_pass(self._pass)
        self._publish()

    def _withdraw(self, *, for_good: bool) -> None:
        self._rounds.rest(for_good=for_good)

    def give(self) -> dict[str, Any]:
        return {**super().give(), "turn": self._rounds.when[1]}

    def _go_on(self, given: dict[str, Any]) -> None:
        self._rounds.go_on(self._pass, int(given["turn"]))
        super()._go_on(given)

    @property
    def _number(self) -> int:
        """The number of the round that is to begin, for graphs that change."""
        number, turn = self._rounds.when
        return number * _PASS + turn


class MixedTraining(_InStep):
    """Synchronous gossip with doubly stochastic weights.

    ``adapt_then_combine``: a step, then the parameters after it are mixed. ``adapt_while_combine`` is D-PSGD (Lian et
    al. 2017): x(k+1) = W x(k) − η g(x(k)); what is mixed travels while the gradient is computed.
    """

    def __init__(self, context: Context, spec: Gossip) -> None:
        super().__init__(context, spec)
        self._weights: dict[int, float] = {}
        self._is_begun = False  # whether an exchange travels while a batch is computed
        self._in_loop = False
        self._overlaps = self._spec.order == "adapt_while_combine"
        if self._overlaps:
            self._hooks.before_forward = self._begin_beside

    def begin_loop(self, epoch: int) -> None:
        self._in_loop = True
        if not self._is_begun:  # else a glance at the data has begun the first exchange
            super().begin_loop(epoch)

    def settle(self, why: Why) -> None:
        self._in_loop &= why not in (Why.END, Why.GLANCE)
        super().settle(why)

    def _begin(self) -> None:
        self._is_begun = False
        super()._begin()

    def _withdraw(self, *, for_good: bool) -> None:
        if self._is_begun:  # a batch was begun and never ended
            self._is_begun = False
            self._rounds.recycle(self._rounds.finish().values())
        super()._withdraw(for_good=for_good)

    def _begin_beside(self) -> None:
        """A batch begins that ends a round: the parameters travel while the batch is computed.

        Outside of training loops it is not known what a forward pass is for.
        """
        is_last = self._in_round == self._spec.period - 1 and self._in_loop
        if is_last and not self._is_begun and torch.is_grad_enabled() and not self.collector.rests:
            self._publish()
            self._start()
            self._is_begun = True

    def _start(self) -> None:
        rounds, members = self._rounds, self._rounds.members
        rank = self._client.rank
        self._weights = {} if rounds.rests else self._graph.neighbours(members, rank, self._number)
        rounds.start(self.flats, {other: {"weight": weight} for other, weight in self._weights.items()}, self._weights)
        self.sent += len(self._weights) * sum(flat.nbytes for flat in self.flats)

    @torch.no_grad()
    def _mix(self) -> None:
        if not self._overlaps:
            self._publish()
        if not self._is_begun:
            self._start()
        self._is_begun = False
        found = self._rounds.finish()
        moved = [p.cpu().sub_(v) for p, v in zip(self._parameters, self._views, strict=True)] if self._overlaps else []
        with self.lock:
            if found:
                self._measure(lambda: _apart(self.flats, found))
                used = {rank: min(self._weights[rank], arrival.head["weight"]) for rank, arrival in found.items()}
                pairs = [(used[rank], arrival.flats) for rank, arrival in found.items()]
                combine(self.flats, pairs, 1 - sum(used.values()))
            if moved:
                torch._foreach_add_(self._views, moved)
        self._rounds.recycle(found.values())
        self._take_over()

    def _collapse(self) -> None:
        """Nothing to do: all that counts is in the parameters."""


class PushSumTraining(_InStep):
    """Push-sum (Assran et al. 2019): shares of x and of a mass w are sent on; gradients are taken at z = x / w.

    ``flats`` are x, and ``mass`` is w. The sums of both over all workers are preserved by every exchange, and when a
    newcomer gets half of what another worker has.
    """

    _least = _LEAST

    def give(self) -> dict[str, Any]:
        return {**super().give(), "mass": self.mass / 2}

    @torch.no_grad()
    def has_given(self) -> None:
        self._publish()
        with self.lock:
            for flat in self.flats:
                flat.mul_(0.5)
            self._hold(self.mass / 2)

    @torch.no_grad()
    def _go_on(self, given: dict[str, Any]) -> None:
        with self.lock:
            self._hold(float(given["mass"]))
            torch._foreach_copy_(self._views, self._parameters)
            for flat in self.flats:
                flat.mul_(self.mass)
        super()._go_on(given)

    def _hold(self, mass: float) -> None:
        """Have so much of w, of which most may be given away."""
        self.mass, self._least = mass, _LEAST * mass

    @torch.no_grad()
    def _publish(self) -> None:
        """Add the steps that z has made to x."""
        with self.lock:
            if self.mass == 1:
                torch._foreach_copy_(self._views, self._parameters)
                return
            for view, parameter in zip(self._views, self._parameters, strict=True):
                view.add_(parameter.cpu() - view / self.mass)

    @torch.no_grad()
    def _mix(self) -> None:
        rounds, rank = self._rounds, self._client.rank
        self._publish()
        if not rounds.rests:
            members = rounds.members
            # A worker that gives and gets nothing, as its graph is not that of others, would have no weight in the end.
            targets = self._graph.successors(members, rank, self._number) if self.mass > self._least else []
            share = 1 / (1 + len(targets))
            heads = {target: {"share": share, "mass": share * self.mass} for target in targets}
            rounds.start(self.flats, heads, self._graph.predecessors(members, rank, self._number))
            self.sent += len(targets) * sum(flat.nbytes for flat in self.flats)
            found = rounds.finish()
            if found:
                self._measure(lambda: self._apart(found))
            self._add(list(found.values()), share * (1 + rounds.unheard))
        self._add(rounds.take_late(), 1.0)
        self._show()

    def _collapse(self) -> None:
        said = json.dumps(self._rounds.pushed).encode()
        told = self._client.gather("gossip: what was pushed", said)
        here = str(self._client.rank)
        self._rounds.await_pushes({rank: json.loads(data).get(here, 0) for rank, data in told.items()})
        self._publish()
        self._add(self._rounds.take_late(), 1.0)
        self._show()

    def _begin(self) -> None:
        with self.lock:
            self._hold(1.0)
        super()._begin()

    def _add(self, found: list[Arrival], share: float) -> None:
        """Keep a share of x and w, and add what has come."""
        with self.lock:
            combine(self.flats, [(arrival.head["share"], arrival.flats) for arrival in found], share)
            self.mass = self.mass * share + sum(arrival.head["mass"] for arrival in found)
        self._rounds.recycle(found)

    @torch.no_grad()
    def _show(self) -> None:
        """Set the parameters to z."""
        with self.lock:
            torch._foreach_copy_(self._parameters, self._views)
            if self.mass != 1:
                torch._foreach_div_(self._parameters, self.mass)
        self._bump()

    def _apart(self, found: dict[int, Arrival]) -> float:
        here = [flat / self.mass for flat in self.flats]
        there = {
            rank: Arrival({}, [flat * (arrival.head["share"] / arrival.head["mass"]) for flat in arrival.flats])
            for rank, arrival in found.items()
        }
        return _apart(here, there)


def _apart(flats: list[torch.Tensor], found: dict[int, Arrival]) -> float:
    """Half the mean square of the distances from the vectors that have come."""
    total = sum(squares([a - b for a, b in zip(flats, arrival.flats, strict=True)]) for arrival in found.values())
    return total / len(found) / 2
