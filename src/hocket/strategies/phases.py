"""Several strategies in one run, one after the other, on the same model and optimizer."""

from __future__ import annotations

import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch.optim import Optimizer

from hocket.comm.communicator import Communicator
from hocket.strategies import choices
from hocket.strategies.base import Strategy
from hocket.strategies.choices import Switch
from hocket.strategies.collector import Collector
from hocket.strategies.noise import Gauge


class PhasedTraining(Strategy):
    """All strategies are built at the start; those that are not at work rest.

    A switch makes the replicas equal, the optimizer's state included, and goes on from there. Epochs are counted as
    the loader counts them; a switch for the next one is made when a training loop ends, where all ranks are together.

    Attributes:
        phase: The number of the strategy at work.
        batches: How many there have been.
    """

    def __init__(
        self, communicator: Communicator, optimizer: Optimizer, strategies: Sequence[Strategy], choice: Switch
    ) -> None:
        self._communicator, self._optimizer, self._strategies = communicator, optimizer, strategies
        self._choice = choice
        self.skips_alone = any(strategy.skips_alone for strategy in strategies)
        self.phase = self.batches = self._epoch = self._steps_before = 0
        self._rates = self._read_rates()
        for strategy in strategies:
            strategy.counts_steps = False  # they are counted here
            strategy.collector.on_step = self.end_batch
        self._put_to_work(0)
        self._now.rise()

    @property
    def _now(self) -> Strategy:
        return self._strategies[self.phase]

    @property
    def steps(self) -> int:
        return self._steps_before + sum(strategy.steps for strategy in self._strategies)

    @steps.setter
    def steps(self, steps: int) -> None:
        self._steps_before = steps - sum(strategy.steps for strategy in self._strategies)

    @property
    def exchanging(self) -> float:
        return sum(strategy.exchanging for strategy in self._strategies)

    @exchanging.setter
    def exchanging(self, seconds: float) -> None:
        self._now.exchanging += seconds - self.exchanging

    @property
    def sent(self) -> int:
        return sum(strategy.sent for strategy in self._strategies)

    @sent.setter
    def sent(self, nbytes: int) -> None:
        self._now.sent += nbytes - self.sent

    @property
    def skipped(self) -> int:
        return sum(strategy.skipped for strategy in self._strategies)

    @property
    def holds(self) -> bool:
        return self._now.holds

    def state(self) -> dict[str, Any]:
        return {
            "steps": self.steps,
            "batches": self.batches,
            "phase": self.phase,
            "rates": self._rates,
            "within": self._now.state(),
        }

    def load_state(self, state: dict[str, Any]) -> None:
        self._put_to_work(min(state.get("phase", 0), len(self._strategies) - 1))
        self._now.rise()
        within = state.get("within", state)
        self._now.load_state(within)
        self.steps, self.batches = state["steps"], state.get("batches", state["steps"])
        self._rates = state.get("rates", self._read_rates())

    def begin_epoch(self, epoch: int) -> None:
        self._epoch = epoch
        self._look(epoch)
        self._now.begin_epoch(epoch)

    def end_batch(self, samples: int = 1, *, stepped: bool = True) -> None:
        self.batches += 1
        self._now.end_batch(samples, stepped=stepped)
        self._look(self._epoch)

    def look(self) -> None:
        self._look(self._epoch)  # a schedule may have lowered the rate

    def settle(self) -> None:
        self._now.counts_steps = self.counts_steps  # whether another loop goes on
        self._now.settle()
        self._now.counts_steps = False
        if self.counts_steps:  # no loop goes on, so what comes is another epoch
            self._look(self._epoch + 1)

    @contextmanager
    def merged(self) -> Iterator[None]:
        with self._now.merged():
            yield

    def rest(self) -> None:
        self._now.rest()

    def rise(self) -> None:
        self._now.rise()

    def flush(self) -> None:
        self._now.flush()

    def refresh(self) -> None:
        self._now.refresh()

    def glance(self) -> None:
        self._now.glance()

    @property
    def owes(self) -> str:
        return self._now.owes

    @property
    def collectors(self) -> list[Collector]:
        return [collector for strategy in self._strategies for collector in strategy.collectors]

    @property
    def gauges(self) -> list[Gauge]:
        return [gauge for strategy in self._strategies for gauge in strategy.gauges]

    def take_measures(self) -> dict[str, float]:
        return self._now.take_measures()

    def take_facts(self) -> dict[str, Any]:
        return {name: value for strategy in self._strategies for name, value in strategy.take_facts().items()}

    def replica(self) -> dict[str, torch.Tensor] | None:
        return self._now.replica()

    @property
    def serves_any_optimizer(self) -> bool:  # type: ignore[override]
        return self._now.serves_any_optimizer

    def note_step(self) -> None:
        self._now.note_step()

    def _look(self, epoch: int) -> None:
        """Switch if it is time."""
        rates = self._read_rates()
        fell = any(new < old for old, new in zip(self._rates, rates, strict=False))
        fell = fell and self.batches > 0  # a schedule that was built since begins with a rate of its own
        self._rates = rates
        while self.phase < len(self._choice.at) and self._is_time(self._choice.at[self.phase], epoch, fell=fell):
            fell = False
            self._switch()

    def _is_time(self, at: str, epoch: int, *, fell: bool) -> bool:
        kind, _, number = at.partition(" ")
        return fell if kind == "decay" else (epoch if kind == "epoch" else self.batches) >= int(number)

    def _switch(self) -> None:
        old = self._now
        old.rest()
        self._put_to_work(self.phase + 1)
        hand_over(old.collector, self.collector)
        self._now.rise()
        if self._communicator.rank == 0:
            text = choices.write(self._choice.strategies[self.phase])
            print(f"hocket: after {self.batches} batches, on with {text}", file=sys.stderr, flush=True)

    def _put_to_work(self, phase: int) -> None:
        self.phase = phase
        for strategy in self._strategies:
            strategy.collector.rests = strategy is not self._now
        self.collector = self._now.collector

    def _read_rates(self) -> list[float]:
        return [float(group.get("lr", 0.0)) for group in self._optimizer.param_groups]


def hand_over(old: Collector, new: Collector) -> None:
    """Let ``new`` go on with what the loader and ``accumulate`` have told ``old``."""
    told, new.adds, old.adds = old.told, old.adds, 0
    old.weigh(1.0)
    new.weigh(told)
    new.held, new.passes, new.mean, new.samples = old.held, old.passes, old.mean, old.samples
    old.held, old.passes, old.mean = 0, 0, False
