"""``local_sgd``: every worker takes steps of its own, and parameters are averaged at the end of each round.

A round has a number of batches or, with ``time=…``, lasts a number of seconds: a slow worker then does fewer batches,
and holds nobody up.
"""

from __future__ import annotations

import math
import sys
from typing import Any

from hocket.errors import UsageError
from hocket.specs import LocalSGD
from hocket.strategies.averaging import InPlaceAverage, average_once
from hocket.strategies.base import Context, DoneBatch, Why
from hocket.strategies.local_training import LocalTraining
from hocket.strategies.optimizer_state import CommonState


class LocalSGDTraining(LocalTraining):
    """Local steps in rounds of ``period`` batches, with an average at the end of each round."""

    def __init__(self, context: Context, spec: LocalSGD) -> None:
        super().__init__(context, spec)
        self._spec = spec
        self._in_round = self.rounds = 0
        self._average = InPlaceAverage(context.communicator, self._tensors())
        self._state_average = InPlaceAverage(context.communicator, []) if spec.optimizer_state else None

    @property
    def period(self) -> int:
        """How many batches the round has that is going on."""
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
        self._is_settled, self._unsettled = not self._in_round, self._in_round

    def settle(self, why: Why) -> None:
        super().settle(why)
        if why is Why.SWITCH_TO:
            self._in_round = 0

    @property
    def exchanges(self) -> int:
        return self.rounds

    def regroup(self, weight: float) -> None:
        self._average.regroup()
        if self._state_average is not None:
            if self._communicator.has_newcomers:  # which have averaged no state yet
                self._state_average.take([])
            self._state_average.regroup()

    def _exchange(self, batches: int, samples: int) -> None:
        self._in_round += batches
        if self._in_round >= self.period:
            self._make_equal()
            self._note_settled()

    def _make_equal(self) -> None:
        self._average.take(self._tensors())
        self._average.average(self._describe)
        self._in_round = 0
        self.rounds += 1
        self.sent += self._average.nbytes
        if self._state_average is not None:
            self._state_average.take(CommonState(self._communicator, self._optimizer).means)
            self._state_average.average(f"the average of the optimizer's state after {self.batches} batches")

    def _describe(self) -> str:
        return f"the average of parameters after {self.batches} batches"


class TimedLocalSGD(LocalTraining):
    """Parameters are averaged, weighted by samples, when the loader (``job.loader.timed_rounds``) ends a round.

    Attributes:
        rounds: How many rounds there have been.
    """

    def __init__(self, context: Context, spec: LocalSGD) -> None:
        super().__init__(context, spec)
        assert spec.time is not None
        self.seconds, self.rounds = spec.time, 0
        self._averages_state = spec.optimizer_state
        self._samples = 0
        self._average = InPlaceAverage(context.communicator, self._tensors())

    def state(self) -> dict[str, Any]:
        return {**super().state(), "rounds": self.rounds}

    def load_state(self, state: dict[str, Any]) -> None:
        super().load_state(state)
        self.rounds, self._samples = state.get("rounds", 0), 0

    @property
    def exchanges(self) -> int:
        return self.rounds

    def regroup(self, weight: float) -> None:
        self._average.regroup()

    def average(self) -> None:
        """Average the parameters of all workers by their samples since the last time; collective."""
        self._average.take(self._tensors())
        self._average.average_by(self._samples, f"the average of round {self.rounds + 1}")
        self.rounds += 1
        self._samples = 0
        self._note_settled()

    def end_round(self) -> None:
        """Do what is due after the average of a round; collective."""
        if self._averages_state:
            average_once(self._communicator, CommonState(self._communicator, self._optimizer).means)

    def end_batch(self, batch: DoneBatch) -> None:
        if not batch.in_loop:
            raise UsageError(
                "local_sgd(time=…) deals out the batches: train on the loader that hocket.distribute() returns"
            )
        super().end_batch(batch)

    def _exchange(self, batches: int, samples: int) -> None:
        self._samples += samples

    def _settle(self) -> None:
        """Nothing to do: workers that leave a loop have taken part in the last round."""

    def _make_equal(self) -> None:
        """Nothing to do: the last round has made all equal."""
