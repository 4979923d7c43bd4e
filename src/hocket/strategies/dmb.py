"""``dmb``: one of every few batches is trained on, and the others are only predicted while its gradients travel."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

from hocket.specs import DMB
from hocket.strategies.averaged_gradients import average_loss, check_exchanged
from hocket.strategies.base import BatchAtWork, Context, DoneBatch
from hocket.strategies.delayed import DelayedTraining, Late
from hocket.updates.update import Step


@dataclass
class CycleCounts:
    """Batches of this worker, and samples of all workers as far as a loader knows them."""

    predicted_batches: int = 0
    predicted_samples: int = 0
    trained_samples: int = 0


class DMBTraining(DelayedTraining):
    """Replicas that are always equal, in cycles of ``extra + 1`` calls of ``optimizer.step()`` (Dekel et al. 2012).

    The first call of a cycle sends off ``p.grad``, the last one applies the average, and those in between do nothing.
    ``p.grad`` is always this worker's own. The end of a loop ends a cycle.
    """

    name = "dmb"
    turns = 1

    def __init__(self, context: Context, spec: DMB) -> None:
        super().__init__(context, spec)
        assert spec.extra
        self._extra = spec.extra
        self._place = 0  # the place of the next step in its cycle
        self._is_predicted: bool | None = None  # whether the last step was, while the loop is at its batch
        self.counts, self._told = CycleCounts(), CycleCounts()
        self._has_regrouped = False  # since the last exchange
        self._is_older = False  # whether the batch at work has begun before workers were lost

    def regroup(self, weight: float) -> None:
        self._has_regrouped = self._is_older = True
        super().regroup(weight)

    def begin_batch(self, batch: BatchAtWork) -> None:
        super().begin_batch(batch)
        self._is_older = False

    def _take_part(self) -> list[int]:
        if self._has_regrouped and self.collector.collected == 1 and not self.collector.adds:
            self._balance()
        payloads = super()._take_part()
        self._has_regrouped = False
        return payloads

    def _balance(self) -> None:
        """Have all weights the mean 1 again: a worker was lost with batches that are only predicted, too."""
        generation = -1
        while generation != self._communicator.generation:  # else weights have changed meanwhile
            generation = self._communicator.generation
            told = self._communicator.gather_data([self._weight, self._is_older])
        older, newer = (sum(weight for weight, is_older in told if is_older == which) for which in (True, False))
        if older and self._is_older:
            factor = (len(told) - newer) / older
            self._weight *= factor
            torch._foreach_mul_(self._engine.slots, factor)

    def state(self) -> dict[str, Any]:
        return {**super().state(), "place": self._place, "counts": dataclasses.asdict(self.counts)}

    def load_state(self, state: dict[str, Any]) -> None:
        super().load_state(state)
        # A gradient that another strategy has left, or a longer cycle, is applied with the next step.
        self._place = min(state.get("place", self._extra), self._extra) if self.holds else 0
        self.counts, self._is_predicted = CycleCounts(**state.get("counts", {})), None

    def end_batch(self, batch: DoneBatch) -> None:
        super().end_batch(batch)
        of_all = self.collector.samples if batch.in_loop else 0  # 0 unless a loader knows them
        # A batch without a step is one of those that the next step is made of.
        if self._place > 0 if self._is_predicted is None else self._is_predicted:
            self.counts.predicted_batches += 1
            self.counts.predicted_samples += of_all
        else:
            self.counts.trained_samples += of_all
        self._is_predicted = None

    def take_facts(self) -> dict[str, Any]:
        """How many batches and samples were only predicted."""
        counts = self.counts
        if counts == self._told:
            return {}
        self._told = dataclasses.replace(counts)
        facts = {"batches only predicted": counts.predicted_batches}
        if counts.predicted_samples:
            facts |= {"samples only predicted": counts.predicted_samples, "samples trained on": counts.trained_samples}
        return facts

    def _step_with_closure(self, original: Step, closure: Callable[[], Any], options: dict[str, Any]) -> Any:
        if self._place == self._extra:
            return super()._step_with_closure(original, closure, options)
        with torch.enable_grad():
            loss = average_loss(self._communicator, self.collector, closure())
        check_exchanged(self.collector)
        self._next()
        return loss

    def _next(self) -> Late | None:
        place, self._place = self._place, (self._place + 1) % (self._extra + 1)
        self._is_predicted = place > 0
        if place == 0:
            self._exchange()
        return self._take() if place == self._extra else None

    def _flush(self) -> None:
        super()._flush()
        self._place = 0
