"""``local_sgd(time=…)``: rounds that last seconds; a slow worker does fewer batches, and holds nobody up."""

from __future__ import annotations

from hocket.errors import UsageError
from hocket.specs import LocalSGD
from hocket.strategies.averaging import InPlaceAverage, average_once
from hocket.strategies.base import Context, DoneBatch
from hocket.strategies.local import LocalTraining
from hocket.strategies.optimizer_state import CommonState
from hocket.transport.gate import signature


class TimedLocalSGD(LocalTraining):
    """Parameters are averaged, weighted by samples, when whoever deals out the batches says that a round is over.

    Attributes:
        rounds: How many there have been.
    """

    def __init__(self, context: Context, spec: LocalSGD) -> None:
        super().__init__(context, spec)
        assert spec.time is not None
        self.seconds, self.rounds = spec.time, 0
        self._averages_state = spec.optimizer_state
        self._samples = 0
        self._average = InPlaceAverage(context.communicator, self._tensors())

    def end_round(self) -> None:
        """Average the parameters of all workers by their samples since the last time; collective."""
        what = f"the end of round {self.rounds + 1}"
        counts = self._communicator.meet(signature(what), self._samples, what)
        total = sum(counts)
        if total:
            weight = self._samples * len(counts) / total
            self._average.take(self._tensors())
            self._average.average(lambda: f"the average of round {self.rounds + 1}", 0, weight)
        if total and self._averages_state:
            average_once(self._communicator, CommonState(self._communicator, self._optimizer).means)
        self.rounds += 1
        self._samples = 0
        self._note_settled()

    def end_batch(self, batch: DoneBatch) -> None:
        if not batch.in_loop:
            raise UsageError(
                "local_sgd(time=…) deals out the batches: train on the loader that hocket.distribute() returns"
            )
        super().end_batch(batch)

    def _exchange(self, batches: int, samples: int) -> None:
        self._samples += samples

    def _settle(self) -> None:
        """Workers that leave a loop have taken part in the last round."""

    def _make_equal(self) -> None:
        """The last round has done so."""
