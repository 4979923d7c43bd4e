"""``local_sgd(time=…)``: rounds that last seconds; a slow worker does fewer batches, and holds nobody up."""

from __future__ import annotations

from torch import nn
from torch.optim import Optimizer

from hocket.comm.communicator import Communicator
from hocket.errors import UsageError
from hocket.strategies.blend import Blend, average_once
from hocket.strategies.choices import LocalSGD
from hocket.strategies.local import LocalTraining
from hocket.strategies.members import Members
from hocket.strategies.optimizer_state import CommonState
from hocket.transport.gate import signature


class TimedLocalSGD(LocalTraining):
    """Parameters are averaged, weighted by samples, when whoever deals out the batches says that a round is over.

    Attributes:
        rounds: How many there have been.
    """

    is_uneven = True

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
        assert choice.time is not None
        self.seconds, self.rounds = choice.time, 0
        self._averages_state = choice.optimizer_state
        self._samples = 0
        self._blend = Blend(communicator, self._tensors())

    def end_round(self) -> None:
        """Average the parameters of all workers by their samples since the last time; collective."""
        what = f"the end of round {self.rounds + 1}"
        counts = self._communicator.meet(signature(what), self._samples, what)
        total = sum(counts)
        if total:
            weight = self._samples * len(counts) / total
            self._blend.take(self._tensors())
            self._blend.average(lambda: f"the average of round {self.rounds + 1}", 0, weight)
        if total and self._averages_state:
            average_once(self._communicator, CommonState(self._communicator, self._optimizer).means)
        self.rounds += 1
        self._samples = 0
        self._note_settled()

    def _exchange(self, batches: int, samples: int) -> None:
        if self.counts_steps:
            raise UsageError(
                "local_sgd(time=…) deals out the batches: train on the loader that hocket.distribute() returns"
            )
        self._samples += samples

    def settle(self) -> None:
        """Workers that leave a loop have taken part in the last round."""

    def _make_equal(self) -> None:
        """Likewise."""
