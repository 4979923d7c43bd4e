"""``diloco``: local steps, and an outer optimizer on the averaged displacement (Douillard et al. 2023).

With several fragments (streaming DiLoCo, Douillard et al. 2025) each part of the model has its own time in a round. The
exchange of a part begins after one batch and is taken over some batches later; local steps between are kept.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch

from hocket.specs import DiLoCo
from hocket.strategies.base import Context, Why
from hocket.strategies.fragments import Fragment, divide
from hocket.strategies.local_training import LocalTraining
from hocket.updates.update import Step


class DiLoCoTraining(LocalTraining):
    """Rounds of ``period`` batches, in which every fragment is exchanged once.

    In the middle of a round, a checkpoint has the average of the parameters and the anchors of the round: workers that
    resume from it have the displacement that those who saved it had on average. An exchange that was under way is kept
    where its average is there already, as where workers may be lost; else it is made in the next round.

    Attributes:
        rounds: How many rounds have ended.
    """

    def __init__(self, context: Context, spec: DiLoCo) -> None:
        super().__init__(context, spec)
        communicator, members = context.communicator, context.members
        self._spec, self._in_round, self.rounds = spec, 0, 0
        divided = divide([parameter.nbytes for parameter in members.parameters], spec.fragments)
        self._fragments = [
            Fragment(
                communicator,
                [members.names[i] for i in part],
                [members.parameters[i] for i in part],
                self._places if part is divided[-1] else [],
            )
            for part in divided
        ]
        self._due: list[tuple[int, Fragment]] = []  # fragments under way, and the batch after which each is taken over
        self._is_loaded = False
        self._hooks.watch_loading(context.model, lambda: None, self._loaded)

    def state(self) -> dict[str, Any]:
        return {
            **super().state(),
            "in round": self._in_round,
            "rounds": self.rounds,
            "settled": self._is_settled,
            "fragments": [each.state(self._due_of(each)) for each in self._fragments],
            "anchor": {n: t for each in self._fragments for n, t in zip(each.names, each.anchor, strict=True)},
            "momentum": {n: t for each in self._fragments for n, t in zip(each.names, each.momentum, strict=True)},
        }

    def load_state(self, state: dict[str, Any]) -> None:
        super().load_state(state)
        self._in_round = state.get("in round", 0) % self._spec.period  # rounds may have been longer
        self.rounds = state.get("rounds", 0)
        self._is_settled, self._unsettled = not self._in_round, self._in_round
        self._take_anchors()
        anchor, momentum = state.get("anchor", {}), state.get("momentum", {})
        for each in self._fragments:
            for i, name in enumerate(each.names):
                if name in anchor and name in momentum:
                    each.anchor[i].copy_(anchor[name])
                    each.momentum[i].copy_(momentum[name])
        known = state.get("fragments", [])
        if [each.names for each in self._fragments] == [each["names"] for each in known]:  # else they are others now
            self._is_settled = state["settled"]
            self._due = [
                (found["due"], fragment)
                for fragment, found in zip(self._fragments, known, strict=True)
                if fragment.load_state(found)
            ]
            self._due.sort(key=lambda due: due[0])

    @property
    def exchanges(self) -> int:
        return sum(each.exchanges for each in self._fragments)

    def regroup(self, weight: float) -> None:
        for fragment in self._fragments:
            fragment.regroup()

    @contextmanager
    def merged(self) -> Iterator[None]:
        self._heed_loading()
        with super().merged():
            yield

    def settle(self, why: Why) -> None:
        super().settle(why)
        if why is Why.SWITCH_TO:
            self._in_round = 0
            self._take_anchors()

    def step(self, original: Step, closure: Callable[[], Any] | None = None, **options: Any) -> Any:
        self._heed_loading()
        return super().step(original, closure, **options)

    def captured(self) -> None:
        super().captured()
        for _, fragment in self._due:
            fragment.progress()

    def _exchange(self, batches: int, samples: int) -> None:
        before, self._in_round = self._in_round, self._in_round + batches
        self._take_over(until=self.batches)
        delay = self._spec.batches_under_way
        for number, fragment in enumerate(self._fragments, start=1):
            if before < number * self._spec.period // len(self._fragments) <= self._in_round:
                self._begin(fragment, waits=not delay)
                self._due.append((self.batches + delay, fragment))
        self._take_over(until=self.batches)
        for _, fragment in self._due:
            fragment.progress()
        if self._in_round >= self._spec.period:
            self._in_round = 0
            self.rounds += 1
        if not self._due and all(each.batch == self.batches for each in self._fragments):
            self._note_settled()

    def _make_equal(self) -> None:
        """End the round now: take over what is under way, and exchange what has had local steps since."""
        self._heed_loading()
        self._take_over(until=None)
        late = [each for each in self._fragments if each.batch != self.batches]
        for fragment in late:
            self._begin(fragment, waits=True)
        for fragment in late:
            fragment.take_over(self._spec.outer_lr, self._spec.outer_momentum)
        self.rounds += self._in_round > 0
        self._in_round = 0

    def _begin(self, fragment: Fragment, *, waits: bool) -> None:
        batches = self.batches
        fragment.begin(batches, lambda: f"the exchange of displacements after {batches} batches", waits=waits)
        self.sent += fragment.nbytes

    def _due_of(self, fragment: Fragment) -> int | None:
        """The batch after which a fragment that is under way is taken over."""
        return next((due for due, each in self._due if each is fragment), None)

    def _take_over(self, until: int | None) -> None:
        while self._due and (until is None or self._due[0][0] <= until):
            _, fragment = self._due.pop(0)
            if fragment.is_under_way:
                fragment.take_over(self._spec.outer_lr, self._spec.outer_momentum)

    def _loaded(self) -> None:
        self._is_loaded = True

    def _heed_loading(self) -> None:
        """Begin the next round at the parameters that the script has loaded, on all ranks."""
        if self._is_loaded:
            self._take_anchors()

    @torch.no_grad()
    def _take_anchors(self) -> None:
        self._is_loaded = False
        self._due.clear()
        for fragment in self._fragments:
            fragment.take_anchor()
