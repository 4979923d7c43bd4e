"""What a worker tells the launcher of its training, and the samples that it has trained on itself."""

from __future__ import annotations

import time
from collections.abc import Callable

from hocket.comm.communicator import Communicator
from hocket.config import Config
from hocket.events import Facts, Happening, Metrics, NoSink, Progress, Sent, Sink, Traffic
from hocket.strategies.base import Strategy

_ENDLESS = 10**8  # batches of a pass that nobody means to see the end of: samplers of endless data have some length


class Tally:
    """Samples that this worker has trained on; whoever makes the record adds up those of all workers.

    A batch counts when training has gone on since it was given, and not when it is given: a look at a batch, or one
    that goes back to the queue, is no training. Several may be given before that (``zip``, losses that are added up).

    Args:
        progress: A number that goes up when the worker trains, also where it is alone.

    Attributes:
        before: Samples of all workers in the run that this one goes on from.
    """

    def __init__(self, progress: Callable[[], int]) -> None:
        self.progress, self._mark = progress, 0
        self._own = self.before = 0
        self._given: dict[int, int] = {}  # by loader, since the worker has trained last
        self._closed: set[int] = set()  # loops of these that are over

    @property
    def own(self) -> int:
        """So far, of this worker."""
        return self._own + (sum(self._given.values()) if self.progress() > self._mark else 0)

    def give(self, loader: object, samples: int) -> None:
        """A training loop gets a batch, of which this worker has so many samples."""
        self._own = self.own
        if self.progress() > self._mark:
            self.drop()
        self._given = {key: given for key, given in self._given.items() if key not in self._closed}
        self._closed.clear()
        self._given[id(loader)] = self._given.get(id(loader), 0) + samples
        self._mark = self.progress()

    def close(self, loader: object) -> None:
        """A training loop is over; its last batch may be at work still."""
        self._closed.add(id(loader))

    def drop(self) -> None:
        """What was given and not trained on does not count."""
        self._given.clear()

    def restart(self, samples: int) -> None:
        """Go on from a run in which all workers together have had so many samples."""
        self._own, self.before = 0, samples
        self.drop()


class Teller:
    """The part of a runtime that tells.

    Attributes:
        has_left: Whether the others were told goodbye: loops that end now have nobody to tell.
    """

    config: Config
    communicator: Communicator
    strategies: list[Strategy]
    sink: Sink
    samples: int
    tally: Tally

    def __init__(self) -> None:
        self._told: tuple[int, int, int | None, int] | None = None  # how far the loop was
        self._skipped, self._next_traffic = 0, 0.0
        self.has_left = False

    @property
    def step(self) -> int:
        """Steps that the optimizer has taken."""
        raise NotImplementedError

    def tell(self, epoch: int, step: int, steps: int | None, samples: int, *, ends: bool = False) -> None:
        """Let the launcher know how far a training loop is; it hears of it for sure if the loop or the script ends."""
        if isinstance(self.sink, NoSink):
            return
        steps = steps if steps is None or steps < _ENDLESS else None
        self._told = (epoch, step, steps, samples)
        skipped = sum(strategy.skipped for strategy in self.strategies)
        if skipped > self._skipped and self.config.rank == 0:
            self.sink.put(Happening("step skipped", {"step": self.step, "skipped so far": skipped}))
        self._skipped = skipped
        exchanging = sum(strategy.exchanging for strategy in self.strategies)
        waited, own, before = self.communicator.waited, self.tally.own, self.tally.before
        self.sink.put(
            Progress(epoch, step, steps, samples, self.step, self.samples, waited, exchanging, own, before, ends)
        )
        self._tell_measures()
        is_due = time.monotonic() > self._next_traffic
        if is_due:
            self.tell_traffic()
            self.tell_sent()
            self.tell_gradients()
        if is_due or ends:
            self.tell_facts()

    def tell_again(self) -> None:
        """The loop of which the launcher was told last has ended, or was left, or the script ends."""
        if self._told is not None:
            self.tell(*self._told, ends=True)

    def tell_facts(self) -> None:
        """Let the launcher know what strategies have found out."""
        for strategy in self.strategies:
            if facts := strategy.take_facts():
                self.sink.put(Facts(facts))

    def _tell_measures(self) -> None:
        for strategy in self.strategies:
            if measures := strategy.take_measures():
                self.sink.put(Metrics(self.step, self.samples, time.time(), measures, self.sent))

    def tell_traffic(self) -> None:
        """Let the launcher know what exchanges with other hosts took so far."""
        traffic, self._next_traffic = self.communicator.traffic, time.monotonic() + 1.0
        if traffic is not None:
            self.sink.put(Traffic(traffic.host, traffic.under_way, traffic.exposed, dict(traffic.waited_for)))

    def tell_gradients(self) -> None:
        """Let the launcher know how much the gradients of workers differed so far."""
        for number, gauge in enumerate(gauge for strategy in self.strategies for gauge in strategy.gauges):
            if (report := gauge.report(number)) is not None:
                self.sink.put(report)

    def tell_sent(self) -> None:
        """Let the launcher know how much this worker has handed to exchanges."""
        if sent := self.sent:
            self.sink.put(Sent(sent))

    @property
    def sent(self) -> int:
        """Bytes that this worker has handed to exchanges so far."""
        return sum(strategy.sent for strategy in self.strategies)
