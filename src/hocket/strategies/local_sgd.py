"""``local_sgd``: every worker takes steps of its own, and parameters are averaged at the end of each round."""

from __future__ import annotations

import math
import sys
from typing import Any

from torch import nn
from torch.optim import Optimizer

from hocket.comm.communicator import Communicator
from hocket.strategies.blend import Blend
from hocket.strategies.choices import LocalSGD
from hocket.strategies.local import LocalTraining
from hocket.strategies.members import Members
from hocket.strategies.optimizer_state import CommonState


class LocalSGDTraining(LocalTraining):
    """Rounds of so many batches."""

    def __init__(
        self,
        communicator: Communicator,
        model: nn.Module,
        optimizer: Optimizer | None,
        members: Members,
        choice: LocalSGD,
        on_nan: str,
    ) -> None:
        super().__init__(communicator, model, optimizer, members, on_nan)
        self._choice = choice
        self._in_round = self.rounds = 0
        self._blend = Blend(communicator, self._tensors())
        self._state_blend = Blend(communicator, []) if choice.optimizer_state else None

    @property
    def period(self) -> int:
        """Of the round that is going on."""
        choice = self._choice
        try:
            grown = choice.period * choice.growth ** ((self.batches - self._in_round) // choice.every)
        except OverflowError:
            grown = math.inf
        return int(min(grown, choice.most if choice.most is not None else sys.maxsize))

    def state(self) -> dict[str, Any]:
        return {**super().state(), "in round": self._in_round, "rounds": self.rounds}

    def load_state(self, state: dict[str, Any]) -> None:
        super().load_state(state)
        self._in_round, self.rounds = state.get("in round", 0), state.get("rounds", 0)

    def rise(self) -> None:
        super().rise()
        self._in_round = 0

    def _exchange(self, batches: int, samples: int) -> None:
        self._in_round += batches
        if self._in_round >= self.period:
            self._make_equal()
            self._note_settled()

    def _make_equal(self) -> None:
        self._in_round = 0
        self.rounds += 1
        self._blend.take(self._tensors())
        self._blend.average(self._describe)
        self.sent += self._blend.nbytes
        if self._state_blend is not None:
            self._state_blend.take(CommonState(self._communicator, self._optimizer).means)
            self._state_blend.average(f"the average of the optimizer's state after {self.batches} batches")

    def _describe(self) -> str:
        return f"the average of parameters after {self.batches} batches"
