"""``gossip``: every worker takes steps of its own, and mixes its parameters with those of neighbours only.

Parameters travel from worker to worker. The job's coordinator deals out the batches, knows who is alive, and is where
all meet at the end of a training loop.
"""

from __future__ import annotations

import json
import math
import time
from abc import abstractmethod
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch

from hocket.comm.bucket_layout import Layout
from hocket.comm.graphs import Graph
from hocket.comm.neighbour_rounds import Flats
from hocket.comm.pairs import squares
from hocket.comm.snapshots import Snapshots
from hocket.comm.spectrum import gap
from hocket.specs import Gossip
from hocket.strategies.averaging import average_once
from hocket.strategies.base import Context, Why
from hocket.strategies.local_training import LocalTraining
from hocket.updates.update import Step

CONSENSUS = "distance from consensus"
NEIGHBOURS = "distance from neighbours"
_EVERY = 1.0  # seconds between two measurements


class GossipTraining(LocalTraining):
    """What all kinds of gossip have in common: the vector of all parameters, its neighbours, and the ends of loops.

    ``flats`` hold what others may see of this worker, in memory of the CPU; ``lock`` guards them. Parameters alone are
    mixed; floating-point buffers are averaged with them at the end of a training loop and in checkpoints.

    Attributes:
        rounds: How many exchanges there have been.
        distance: The distance from consensus at the end of the last loop: the root mean square of ‖x − mean‖ / ‖mean‖.
        mass: How much this worker counts in a mean over all; other than 1 in push-sum only.
    """

    def __init__(self, context: Context, spec: Gossip) -> None:
        client = context.client
        assert client is not None
        super().__init__(context, spec)
        self._client, self._spec, self._timeout = client, spec, client.link.timeout
        self._peers = client.make_peers()
        self._graph = Graph(spec.topology, spec.seed)
        self._parameters = [parameter.detach() for parameter in context.members.parameters]
        layout = Layout(self._parameters)
        self.flats: Flats = layout.allocate_here()
        self._views = layout.on_cpu().views(self.flats)
        self.lock = self._peers.condition()
        self.rounds, self._in_round, self.mass = 0, 0, 1.0
        self._pass, self.distance = 0, 0.0
        self._is_merging = False
        self._measures: dict[str, float] = {}
        self._facts: dict[str, Any] = {}
        self._next_measure = 0.0
        self._has_changed = False  # whether the graph has changed
        GossipTraining._publish(self)
        self._snapshots = Snapshots(self._peers, self._snapshot)
        self._prepare()
        for changes in (self._peers.on_loss, self._peers.on_join):
            changes.append(lambda _: self._note_change())
        client.on_close.append(self._peers.close)
        self._peers.join(client.gather)
        self._describe()

    def state(self) -> dict[str, Any]:
        return {**super().state(), "in round": self._in_round, "rounds": self.rounds}

    def load_state(self, state: dict[str, Any]) -> None:
        super().load_state(state)
        self._in_round, self.rounds = state.get("in round", 0), state.get("rounds", 0)
        self._begin()

    @property
    def can_give(self) -> bool:
        return set(self._client.live()) <= set(self._peers.live)  # it has to tell where all others are

    def give(self) -> dict[str, Any]:
        where = {str(rank): where for rank, where in self._peers.where().items()}
        return {"pass": self._pass, "rounds": self.rounds, "where": where}

    def take(self, given: dict[str, Any]) -> None:
        """Be where the giver is, and have all others know."""
        self._pass, self.rounds, self._is_settled = int(given["pass"]), int(given["rounds"]), False
        self._go_on(given)
        self._peers.enter({int(rank): where for rank, where in given["where"].items()})
        self._describe()

    def _go_on(self, given: dict[str, Any]) -> None:
        """Take part, as a newcomer, in what goes on."""
        self._publish()

    def begin_loop(self, epoch: int) -> None:
        if self._is_settled:
            self._begin()  # the script may have loaded other parameters since

    def settle(self, why: Why) -> None:
        super().settle(why)
        if why is Why.IDLE:
            self._withdraw(
                for_good=not self._is_settled
            )  # before the first batch, the loop may turn out to be a glance
        elif why is Why.REJOIN:
            self._begin()
        elif why is Why.REFRESH and self._is_merging:
            self._take_mean()

    def _settle(self) -> None:
        """Meet all live workers, whether they had a batch or not."""
        begin = time.perf_counter()
        self._withdraw(for_good=True)
        self._make_equal()
        self._note_settled()
        self._note_exchange(begin)

    def _take_mean(self) -> None:
        """For a checkpoint, take the mean over all workers' snapshots: their threads answer, and nobody waits."""
        found = [(self.mass, self._own()), *((head["mass"], flats) for head, flats in self._ask())]
        total = math.fsum(mass for mass, _ in found)
        for i, flat in enumerate(found[0][1]):
            wide = sum(flats[i].to(_wide(flat)) * (mass / total) for mass, flats in found)
            flat.copy_(torch.as_tensor(wide))
        self._put(found[0][1])

    @contextmanager
    def merged(self) -> Iterator[None]:
        """The means of parameters and buffers, as ``Why.REFRESH`` finds them, and this worker's optimizer state."""
        self._catch_up()
        tensors = [tensor.detach() for tensor in self._tensors()]
        own = [tensor.clone() for tensor in tensors]
        self._is_merging = True
        try:
            yield
        finally:
            self._is_merging = False
            with torch.no_grad():
                torch._foreach_copy_(tensors, own)

    def take_measures(self) -> dict[str, float]:
        found, self._measures = self._measures, {}
        return found

    def take_facts(self) -> dict[str, Any]:
        found, self._facts = self._facts, {}
        return found

    @abstractmethod
    def _prepare(self) -> None:
        """Set handlers, before there are links."""

    @abstractmethod
    def _begin(self) -> None:
        """A pass begins with the parameters as they are now; all workers have met."""

    @abstractmethod
    def _mix(self) -> None:
        """Exchange parameters, at the end of a batch that ends a round."""

    @abstractmethod
    def _withdraw(self, *, for_good: bool) -> None:
        """There are no more batches in this pass, as far as this worker knows: nobody is to wait for it."""

    @abstractmethod
    def _collapse(self) -> None:
        """Bring all that is under way to the parameters, which then count ``mass`` in the mean over all workers."""

    def _catch_up(self) -> None:
        """Bring the parameters up to date with what others have sent."""

    def _exchange(self, batches: int, samples: int) -> None:
        self._in_round += batches
        if self._in_round >= self._spec.period:
            self._in_round = 0
            self.rounds += 1
            if self._has_changed:  # workers that finish are gone, too, but after the last round
                self._describe()
            waited = time.perf_counter()
            self._mix()
            self._client.waited += time.perf_counter() - waited
        else:
            self._publish()

    @torch.no_grad()
    def _make_equal(self) -> None:
        """Replace the parameters by the mean over all workers, and measure how far from it this worker was."""
        self._collapse()
        before = [parameter.clone() for parameter in self._parameters]
        average_once(self._communicator, self._tensors(), self.mass if self._spec.push_sum else None)
        self.mass, self._in_round = 1.0, 0
        apart = squares([b - p for b, p in zip(before, self._parameters, strict=True)])
        length = squares(self._parameters)
        said = json.dumps({"pass": self._pass, "apart": apart, "lost": sorted(self._peers.lost)})
        told = self._client.gather("gossip: the end of a loop", said.encode())
        by_rank = {rank: json.loads(data) for rank, data in told.items()}
        found = list(by_rank.values())
        broken = [(rank, other) for rank, each in by_rank.items() for other in each["lost"] if other in by_rank]
        if broken:
            self._peers.repair(broken, self._client.gather)
            self._describe()
        self._pass = max(each["pass"] for each in found) + 1
        apart = math.fsum(each["apart"] for each in found) / len(found)
        self.distance = self._measures[CONSENSUS] = math.sqrt(apart / length) if length else 0.0
        self._begin()

    def step(self, original: Step, closure: Callable[[], Any] | None = None, **options: Any) -> Any:
        result = super().step(original, closure, **options)
        self._note_learned()
        return result

    @torch.no_grad()
    def _publish(self) -> None:
        """Let others see the parameters as they are now."""
        with self.lock:
            torch._foreach_copy_(self._views, self._parameters)

    @torch.no_grad()
    def _take_over(self) -> None:
        """Set the parameters to ``flats``, which others see."""
        with self.lock:
            torch._foreach_copy_(self._parameters, self._views)
        self._bump()

    def _bump(self) -> None:
        torch.autograd.graph.increment_version(self._members.parameters)

    def _measure(self, square: Callable[[], float]) -> None:
        """About once a second, measure half the mean square of the distance from neighbours: that from the mean."""
        now = self._peers.now()
        if now >= self._next_measure:
            self._next_measure = now + _EVERY
            length = squares(self.flats)
            self._measures[NEIGHBOURS] = math.sqrt(square() / length) if length else 0.0

    def _describe(self) -> None:
        """What is to be said of the graph, when it begins and when it has changed."""
        self._has_changed = False
        count = len(self._peers.live)
        found = gap(self._graph, count, push_sum=self._spec.push_sum)
        self._facts = {"gossip": f"{_NAMES[self._spec.topology]} of {count}", "spectral gap": round(found, 4)}

    def _note_change(self) -> None:
        self._has_changed = True

    def _snapshot(self) -> tuple[dict[str, Any], Flats]:
        """What others get for a checkpoint: parameters that count ``mass``, and floating-point buffers."""
        with self.lock:
            vector = [flat / self.mass for flat in self.flats] if self.mass != 1 else [f.clone() for f in self.flats]
            return {"mass": self.mass}, [*vector, *_flatten(self._buffers)]

    @torch.no_grad()
    def _own(self) -> Flats:
        """The snapshot of this worker itself, as it is now."""
        flats = [torch.empty_like(flat) for flat in self.flats]
        torch._foreach_copy_(Layout(self._parameters).on_cpu().views(flats), self._parameters)
        return [*flats, *_flatten(self._buffers)]

    @torch.no_grad()
    def _put(self, flats: Flats) -> None:
        count = len(self.flats)
        torch._foreach_copy_(self._parameters, Layout(self._parameters).on_cpu().views(flats[:count]))
        for buffer, flat in zip(self._buffers, flats[count:], strict=True):
            buffer.copy_(flat.view(buffer.shape))
        self._bump()

    def _ask(self) -> list[tuple[dict[str, Any], Flats]]:
        return self._snapshots.collect(self._timeout)


_NAMES = {
    "ring": "a ring",
    "torus": "a torus",
    "exponential": "an exponential graph",
    "complete": "a complete graph",
    "pairs": "random pairs",
}


def combine(flats: Flats, weights: Sequence[tuple[float, Flats]], own: float) -> None:
    """Replace a vector by a weighted sum of itself and others, in place."""
    for i, flat in enumerate(flats):
        wide = flat if _wide(flat) == flat.dtype else flat.to(_wide(flat))
        wide.mul_(own)
        for weight, others in weights:
            wide.add_(others[i].to(wide.dtype), alpha=weight)
        if wide is not flat:
            flat.copy_(wide)


def _wide(tensor: torch.Tensor) -> torch.dtype:
    """The type in which sums are taken."""
    return tensor.dtype if tensor.dtype.itemsize >= 4 else torch.float32


def _flatten(tensors: Sequence[torch.Tensor]) -> Flats:
    """Copies of ``tensors``, flat and on the CPU."""
    return [tensor.detach().cpu().clone(memory_format=torch.contiguous_format).view(-1) for tensor in tensors]
