"""Several strategies in one run, one after the other, on the same model and optimizer."""

from __future__ import annotations

import dataclasses
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from hocket import specs
from hocket.capture.collector import Collector
from hocket.capture.noise import Gauge
from hocket.specs import Switch
from hocket.strategies.base import BatchAtWork, Context, DoneBatch, Strategy, Why
from hocket.strategies.building import build
from hocket.updates.update import Step


class PhasedTraining(Strategy):
    """Several strategies, all built at the start, of which one is at work and the others rest.

    A switch makes the replicas equal, the optimizer's state included, and goes on from there. Epochs are counted as
    the loader counts them; a switch for the next epoch is made when a training loop ends, where all ranks meet.

    Attributes:
        phase: The number of the strategy at work.
        batches: How many batches there have been.
    """

    def __init__(self, context: Context, spec: Switch) -> None:
        super().__init__(context, spec)
        assert context.optimizer is not None
        self._communicator, self._optimizer, self._spec = context.communicator, context.optimizer, spec
        resting = dataclasses.replace(context, rests=True)
        self._strategies = [build(resting, each) for each in spec.strategies]
        self.phase = self.batches = self._epoch = self._steps_before = self._exchanges_before = 0
        self._rates = self._read_rates()
        self._put_to_work(0)

    @property
    def at_work(self) -> Strategy:
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
        self.at_work.exchanging += seconds - self.exchanging

    @property
    def sent(self) -> int:
        return sum(strategy.sent for strategy in self._strategies)

    @sent.setter
    def sent(self, nbytes: int) -> None:
        self.at_work.sent += nbytes - self.sent

    @property
    def skipped(self) -> int:
        return sum(strategy.skipped for strategy in self._strategies)

    @property
    def exchanges(self) -> int:
        return self._exchanges_before + sum(strategy.exchanges for strategy in self._strategies)

    def regroup(self, weight: float) -> None:
        for strategy in self._strategies:  # on all workers in this order, whether or not a worker has made the switch
            strategy.regroup(weight if strategy is self.at_work else 1.0)

    def state(self) -> dict[str, Any]:
        return {
            "steps": self.steps,
            "batches": self.batches,
            "exchanges": self.exchanges,
            "phase": self.phase,
            "rates": self._rates,
            "within": self.at_work.state(),
        }

    def load_state(self, state: dict[str, Any]) -> None:
        self._put_to_work(min(state.get("phase", 0), len(self._strategies) - 1))
        within = state.get("within", state)
        self.at_work.load_state(within)
        self.steps, self.batches = state["steps"], state.get("batches", state["steps"])
        self._exchanges_before += state.get("exchanges", 0) - self.exchanges
        self._rates = state.get("rates", self._read_rates())

    def begin_loop(self, epoch: int) -> None:
        self._epoch = epoch
        self._look(epoch)
        self.at_work.begin_loop(epoch)

    def begin_batch(self, batch: BatchAtWork) -> None:
        if batch.everywhere:
            self._look(self._epoch)  # a schedule may have lowered the rate since the last step
        self.at_work.begin_batch(batch)

    def step(self, original: Step, closure: Callable[[], Any] | None = None, **options: Any) -> Any:
        return self.at_work.step(original, closure, **options)

    def end_batch(self, batch: DoneBatch) -> None:
        self.batches += 1
        self.at_work.end_batch(batch)
        self._look(self._epoch)

    def settle(self, why: Why) -> None:
        self.at_work.settle(why)
        if why is Why.END:
            self._look(self._epoch + 1)  # what comes is another epoch

    @contextmanager
    def merged(self) -> Iterator[None]:
        with self.at_work.merged():
            yield

    @property
    def holds(self) -> bool:
        return self.at_work.holds

    @property
    def owes(self) -> str:
        return self.at_work.owes

    @property
    def gauges(self) -> list[Gauge]:
        return [gauge for strategy in self._strategies for gauge in strategy.gauges]

    def take_measures(self) -> dict[str, float]:
        return self.at_work.take_measures()

    def take_facts(self) -> dict[str, Any]:
        return {name: value for strategy in self._strategies for name, value in strategy.take_facts().items()}

    def _look(self, epoch: int) -> None:
        """Switch if it is time: at an epoch, after some batches, or when the learning rate has fallen."""
        rates = self._read_rates()
        fell = any(new < old for old, new in zip(self._rates, rates, strict=False))
        fell = fell and self.batches > 0  # a schedule that was built since begins with a rate of its own
        self._rates = rates
        while self.phase < len(self._spec.at) and self._is_time(self._spec.at[self.phase], epoch, fell=fell):
            fell = False
            self._switch()

    def _is_time(self, at: str, epoch: int, *, fell: bool) -> bool:
        kind, _, number = at.partition(" ")
        return fell if kind == "decay" else (epoch if kind == "epoch" else self.batches) >= int(number)

    def _switch(self) -> None:
        self.at_work.settle(Why.SWITCH_AWAY)
        self._put_to_work(self.phase + 1)
        if self._communicator.rank == 0:
            text = specs.write(self._spec.strategies[self.phase])
            print(f"hocket: after {self.batches} batches, on with {text}", file=sys.stderr, flush=True)

    def _put_to_work(self, phase: int) -> None:
        """Put one strategy to work, which alone is told of gradients and steps; collective."""
        before = self.at_work.collector
        self.phase = phase
        self.collector = self.at_work.collector
        for strategy in self._strategies:
            strategy.collector.rests = strategy is not self.at_work
        self.collector.on_step, self.collector.on_forward = before.on_step, before.on_forward
        self.collector.backward = before.backward
        if before is not self.collector:
            before.on_step = before.on_forward = None
            hand_over(before, self.collector)
        self.at_work.settle(Why.SWITCH_TO)

    def _read_rates(self) -> list[float]:
        return self.context.rates(self._optimizer)


def hand_over(old: Collector, new: Collector) -> None:
    """Let ``new`` go on with what the loader and ``accumulate`` have told ``old``."""
    told, new.adds, old.adds = old.told, old.adds, 0
    old.weigh(1.0)
    new.weigh(told)
    new.held, new.passes, new.mean, new.samples = old.held, old.passes, old.mean, old.samples
    old.held, old.passes, old.mean = 0, 0, False
