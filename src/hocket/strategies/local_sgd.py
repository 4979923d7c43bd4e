"""``local_sgd``: every worker takes steps of its own, and parameters are averaged at the end of each round."""

from __future__ import annotations

import math
import sys
from typing import Any

from hocket.specs import LocalSGD
from hocket.strategies.averaging import InPlaceAverage
from hocket.strategies.base import Context, Why
from hocket.strategies.local import LocalTraining
from hocket.strategies.optimizer_state import CommonState


class LocalSGDTraining(LocalTraining):
    """Rounds of so many batches."""

    def __init__(self, context: Context, spec: LocalSGD) -> None:
        super().__init__(context, spec)
        self._spec = spec
        self._in_round = self.rounds = 0
        self._average = InPlaceAverage(context.communicator, self._tensors())
        self._state_average = InPlaceAverage(context.communicator, []) if spec.optimizer_state else None

    @property
    def period(self) -> int:
        """Of the round that is going on."""
        spec = self._spec
        try:
            grown = spec.period * spec.growth ** ((self.batches - self._in_round) // spec.every)
        except OverflowError:
            grown = math.inf
        return int(min(grown, spec.most if spec.most is not None else sys.maxsize))

    def state(self) -> dict[str, Any]:
        return {**super().state(), "in round": self._in_round, "rounds": self.rounds}

    def load_state(self, state: dict[str, Any]) -> None:
        super().load_state(state)
        self._in_round, self.rounds = state.get("in round", 0), state.get("rounds", 0)

    def settle(self, why: Why) -> None:
        super().settle(why)
        if why is Why.SWITCH_TO:
            self._in_round = 0

    def _exchange(self, batches: int, samples: int) -> None:
        self._in_round += batches
        if self._in_round >= self.period:
            self._make_equal()
            self._note_settled()

    def _make_equal(self) -> None:
        self._in_round = 0
        self.rounds += 1
        self._average.take(self._tensors())
        self._average.average(self._describe)
        self.sent += self._average.nbytes
        if self._state_average is not None:
            self._state_average.take(CommonState(self._communicator, self._optimizer).means)
            self._state_average.average(f"the average of the optimizer's state after {self.batches} batches")

    def _describe(self) -> str:
        return f"the average of parameters after {self.batches} batches"
