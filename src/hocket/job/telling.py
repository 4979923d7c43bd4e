"""What a worker tells the launcher of its training."""

from __future__ import annotations

import time
from dataclasses import astuple
from typing import TYPE_CHECKING

from hocket.events import Facts, Happening, Metrics, NoSink, PassDone, Progress, Sent, Sink, Traffic

if TYPE_CHECKING:
    from hocket.job.loader.passes import Pass
    from hocket.job.worker import Worker

_ENDLESS = 10**8  # batches of a pass that nobody means to see the end of: samplers of endless data have some length


class Teller:
    """Tells the launcher, through the worker's sink."""

    def __init__(self, worker: Worker) -> None:
        self._worker, self._training = worker, worker.training
        self._has_begun = False
        self._told: tuple[int, int, int | None, int] | None = None  # how far the loop was, as told last
        self._skipped, self._next_traffic = 0, 0.0

    @property
    def _sink(self) -> Sink:
        return self._worker.sink

    def tell_beginning(self, pass_samples: int | None) -> None:
        """A training loop begins, over ``pass_samples`` samples of all workers; the first one is told."""
        if not self._has_begun and self._worker.config.rank == 0:
            self._sink.put(Happening("training began", {"samples of a pass": pass_samples}))
        self._has_begun = True

    def tell(self, epoch: int, step: int, steps: int | None, samples: int, *, ends: bool = False) -> None:
        """Tell the launcher how far a training loop is; it may miss a record, but not the last of a loop or script."""
        if isinstance(self._sink, NoSink):
            return
        counts = self._training.counts
        steps = steps if steps is None or steps < _ENDLESS else None
        self._told = (epoch, step, steps, samples)
        skipped = sum(strategy.skipped for strategy in self._training.strategies)
        if skipped > self._skipped and self._worker.config.rank == 0:
            self._sink.put(Happening("step skipped", {"step": counts.step, "skipped so far": skipped}))
        self._skipped = skipped
        exchanging = sum(strategy.exchanging for strategy in self._training.strategies)
        waited, own, before = self._worker.communicator.waited, counts.tally.own, counts.tally.before
        self._sink.put(
            Progress(epoch, step, steps, samples, counts.step, counts.samples, waited, exchanging, own, before, ends)
        )
        self._tell_measures()
        is_due = time.monotonic() > self._next_traffic
        if is_due:
            self.tell_traffic()
            self.tell_sent()
            self.tell_gradients()
        if is_due or ends:
            self.tell_facts()

    def tell_pass(self, loader: int, done: Pass, whole: int | None) -> None:
        """Tell the launcher how many of the ``whole`` samples of an epoch have counted, if that is known."""
        trained = done.loop is not None and done.loop.has_trained
        if trained and whole is not None:
            self._sink.put(PassDone(loader, done.plan.epoch, done.samples, whole))

    def tell_again(self) -> None:
        """Tell the launcher how far the last loop came, which has ended, or was left, or whose script ends."""
        if self._told is not None:
            self.tell(*self._told, ends=True)

    def tell_end(self) -> None:
        """The script ends: let the launcher know all that it has not been told yet."""
        self.tell_again()
        self.tell_traffic()
        self.tell_gradients()
        self.tell_sent()
        self.tell_facts()

    def tell_facts(self) -> None:
        """Let the launcher know what strategies have found out."""
        for strategy in self._training.strategies:
            if facts := strategy.take_facts():
                self._sink.put(Facts(facts))

    def _tell_measures(self) -> None:
        counts = self._training.counts
        for strategy in self._training.strategies:
            if measures := strategy.take_measures():
                self._sink.put(Metrics(counts.step, counts.samples, time.time(), measures, self.sent))

    def tell_traffic(self) -> None:
        """Let the launcher know what exchanges with other hosts took so far."""
        traffic, self._next_traffic = self._worker.communicator.traffic, time.monotonic() + 1.0
        if traffic is not None:
            uses = {name: list(astuple(use)) for name, use in dict(traffic.uses).items()}
            waited_for = dict(traffic.waited_for)
            hidden, measured = (traffic.under_way, traffic.exposed), (traffic.links, traffic.rates)
            self._sink.put(Traffic(traffic.host, *hidden, waited_for, uses, *measured, dict(traffic.refused)))

    def tell_gradients(self) -> None:
        """Let the launcher know how much the gradients of workers differed so far."""
        for number, gauge in enumerate(gauge for strategy in self._training.strategies for gauge in strategy.gauges):
            if (report := gauge.report(number)) is not None:
                self._sink.put(report)

    def tell_sent(self) -> None:
        """Let the launcher know how much this worker has handed to exchanges."""
        if sent := self.sent:
            self._sink.put(Sent(sent))

    @property
    def sent(self) -> int:
        """Bytes that this worker has handed to exchanges so far."""
        return sum(strategy.sent for strategy in self._training.strategies)
