"""What a comparison has found: one result for each run, and the runs of one strategy on so many workers together."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any


@dataclass(frozen=True)
class Point:
    """One value of a metric.

    Attributes:
        seconds: Since the training began.
        samples: Samples that all workers had seen by then.
        value: What the script has reported.
    """

    seconds: float
    samples: int
    value: float


@dataclass(frozen=True)
class Goal:
    """What is to be reached: ``accuracy=0.95``.

    Attributes:
        metric: The name of the metric.
        value: The value.
        rises: Whether values from there upwards reach it.
    """

    metric: str
    value: float
    rises: bool

    def is_reached(self, value: float) -> bool:
        """Whether ``value`` is good enough."""
        return value >= self.value if self.rises else value <= self.value


@dataclass(frozen=True)
class Result:
    """One run.

    Attributes:
        strategy: The strategy, as the user wrote it: ``local_sgd(period=16)``.
        workers: How many there were.
        servers: How many processes there were beside them.
        repeat: The number of the run among its repeats, from 0, which is the seed, too.
        failure: Why it failed, in one line; empty if it did not.
        seconds: Seconds from the beginning of training to its end.
        start_up: Seconds before that.
        samples: Samples of all workers until the target, if it was reached; ``speed`` and ``sent`` are until then, too.
        speed: Samples a second, of all workers; None where the script has no loop over a Hocket loader.
        pass_samples: Samples of one pass over the data, if that is known.
        shares: Shares of the training time of all workers: ``compute``, ``communication`` and ``waiting``, together
            1; empty where nothing is known.
        sent: Bytes that all workers have handed to exchanges.
        staleness: How many pushes to servers had which staleness.
        curves: What the script has reported, by name, in order.
        reached: Where the target was reached, if there is one and it was.
        gradients: What was measured of gradients by the way: ``noise scale``, ``diversity``, ``says`` …
        told: What its workers told: ``optimizer``, ``device``, ``threads``, ``parameters``, ``communication`` …
    """

    strategy: str
    workers: int
    servers: int
    repeat: int
    failure: str = ""
    seconds: float = 0.0
    start_up: float = 0.0
    samples: int = 0
    speed: float | None = None
    pass_samples: int | None = None
    shares: dict[str, float] = field(default_factory=dict)
    sent: int = 0
    staleness: dict[int, int] = field(default_factory=dict)
    curves: dict[str, list[Point]] = field(default_factory=dict)
    reached: Point | None = None
    gradients: dict[str, Any] = field(default_factory=dict)
    told: dict[str, Any] = field(default_factory=dict)

    @property
    def passes(self) -> float | None:
        """Passes over the data until the target was reached, or until the end."""
        if not self.pass_samples:
            return None
        return (self.reached.samples if self.reached else self.samples) / self.pass_samples

    @property
    def seconds_per_pass(self) -> float | None:
        """What one of those took: times ``passes`` it is the time to the target, or to the end."""
        passes = self.passes
        return (self.reached.seconds if self.reached else self.seconds) / passes if passes else None


@dataclass(frozen=True)
class Spread:
    """The median, the lowest and the highest value of the repeats."""

    median: float
    lowest: float
    highest: float

    @staticmethod
    def of(values: Sequence[float | None]) -> Spread | None:
        """The spread of the known values; None if no value is known."""
        known = [value for value in values if value is not None]
        return Spread(statistics.median(known), min(known), max(known)) if known else None

    def over(self, unit: float) -> Spread:
        """The spread in another unit."""
        return Spread(self.median / unit, self.lowest / unit, self.highest / unit)


@dataclass(frozen=True)
class Contender:
    """All repeats of one strategy on so many workers."""

    strategy: str
    workers: int
    results: tuple[Result, ...]

    @property
    def name(self) -> str:
        """``mirrored on 4``; the baseline is ``one worker``."""
        return "one worker" if self.workers == 1 else f"{self.strategy} on {self.workers}"

    @property
    def good(self) -> list[Result]:
        """The runs that did not fail."""
        return [result for result in self.results if not result.failure]

    @property
    def failure(self) -> str:
        """Why all of them failed; empty if one did not."""
        return "" if self.good or not self.results else self.results[0].failure

    @property
    def speed(self) -> Spread | None:
        return Spread.of([result.speed for result in self.good])

    @property
    def time_to_target(self) -> Spread | None:
        """Seconds, of the repeats that reached it."""
        return Spread.of([result.reached.seconds for result in self.good if result.reached])

    @property
    def servers(self) -> int:
        """Processes beside the workers."""
        return max((result.servers for result in self.results), default=0)

    @property
    def reached(self) -> list[Result]:
        """The runs that reached the target, the fastest first."""
        return sorted((r for r in self.good if r.reached), key=lambda r: r.reached.seconds if r.reached else 0)

    @property
    def passes(self) -> float | None:
        """Passes over the data until the target, in the run (or two runs) with the median time to it."""
        runs = self.reached
        known = [run.passes for run in runs[(len(runs) - 1) // 2 : len(runs) // 2 + 1] if run.passes]
        return statistics.fmean(known) if known else None

    @property
    def seconds_per_pass(self) -> float | None:
        """Seconds of a pass over the data: times ``passes``, the median time to the target."""
        time, passes = self.time_to_target, self.passes
        return time.median / passes if time and passes else None

    @property
    def shares(self) -> dict[str, float]:
        """Shares of the training time, as means over the repeats that know them."""
        known = [result.shares for result in self.good if result.shares]
        names = list(dict.fromkeys(name for shares in known for name in shares))
        return {name: statistics.fmean(shares.get(name, 0.0) for shares in known) for name in names}

    @property
    def sent(self) -> Spread | None:
        """Bytes."""
        return Spread.of([float(result.sent) for result in self.good])

    @property
    def sent_per_sample(self) -> Spread | None:
        """Bytes."""
        return Spread.of([result.sent / result.samples for result in self.good if result.samples])

    @property
    def staleness(self) -> dict[int, int]:
        """How often it was which, in all repeats together."""
        found: dict[int, int] = {}
        for result in self.good:
            for staleness, count in result.staleness.items():
                found[staleness] = found.get(staleness, 0) + count
        return dict(sorted(found.items()))

    def last(self, metric: str) -> Spread | None:
        """The last value that was reported of it."""
        return Spread.of([result.curves[metric][-1].value for result in self.good if result.curves.get(metric)])


@dataclass(frozen=True)
class Comparison:
    """All that is known of one comparison, finished or not.

    Attributes:
        script: The script's name, as given; ``arguments`` are its own.
        command: The command that made it.
        about: Where and when: ``cpu``, ``cores``, ``torch``, ``hocket``, ``date``, ``network`` …, in this order.
        target: What is to be reached, if that was asked for.
        repeats: How often each was to run.
        entries: The baseline first, then strategies in the order in which they were asked for, workers ascending.
        missing: How many runs are still to be made.
        notes: What a reader should know, in sentences.
        wanted: The text of ``--until``; it may be there without a target, whose direction nobody has seen yet.
    """

    script: str
    arguments: tuple[str, ...]
    command: str
    about: dict[str, str]
    target: Goal | None
    repeats: int
    entries: tuple[Contender, ...]
    missing: int = 0
    notes: tuple[str, ...] = ()
    wanted: str = ""

    @property
    def baseline(self) -> Contender | None:
        """One worker."""
        return next((entry for entry in self.entries if entry.workers == 1), None)

    @property
    def threads(self) -> dict[int, set[int]]:
        """How many threads a worker had, by the number of workers, where the model was in the memory of the host."""
        found: dict[int, set[int]] = {}
        for told in (result.told | {"of": entry.workers} for entry in self.entries for result in entry.good):
            if told.get("device", "cpu") == "cpu" and isinstance(told.get("threads"), int):
                found.setdefault(told["of"], set()).add(told["threads"])
        return dict(sorted(found.items()))

    @property
    def shared_cores(self) -> int | None:
        """The cores of this machine, if all workers shared them, on hosts of a rig, too; None if they did not."""
        cores, network = self.about.get("cores", ""), self.about.get("network", "one host")
        return int(cores) if cores.isdecimal() and (network == "one host" or " of a rig" in network) else None

    @property
    def metrics(self) -> list[str]:
        """Names of the metrics that were reported, the target's first."""
        found = dict.fromkeys(name for entry in self.entries for result in entry.results for name in result.curves)
        names = list(found)
        if self.target is not None and self.target.metric in found:
            names.remove(self.target.metric)
            names.insert(0, self.target.metric)
        return names
