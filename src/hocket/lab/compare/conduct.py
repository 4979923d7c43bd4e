"""Makes the runs of a comparison one after the other, and keeps what each has found as soon as it has ended."""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from hocket.errors import RecordError
from hocket.lab.compare import comparison_folder, plan, records, running, target, verdict
from hocket.lab.compare.comparison_folder import ComparisonFolder
from hocket.lab.compare.display import PlainDisplay
from hocket.lab.compare.plan import BASELINE, Planned, Way
from hocket.lab.compare.results import Comparison, Goal, Result
from hocket.lab.compare.target import Wish
from hocket.observe import reader
from hocket.observe.show import number

Start = Callable[[Planned], tuple[list[str], dict[str, str]]]
"""The command of a run, which leaves its record where the comparison wants it, and its environment."""

Choose = Callable[[Mapping[str, Any]], tuple[list[Way], list[str]]]
"""What is compared with the baseline, in order, and notes; from what the baseline's worker told, once it has."""

_ENOUGH_PASSES = 2  # over the data, after which a script that has reported nothing will not do so


class Conduct:
    """One comparison.

    Attributes:
        results: The results so far, good or not, by their key.
    """

    def __init__(
        self,
        place: ComparisonFolder,
        subject: Comparison,
        wish: Wish | None,
        choose: Choose,
        start: Start,
        asked: running.Asked,
        display: PlainDisplay,
    ) -> None:
        """Begin with what is in ``place``; ``subject`` is the comparison before any run."""
        self.results: dict[tuple[str, int, int], Result] = {}
        self._place, self._subject, self._wish = place, subject, wish
        self._choose, self._start, self._asked, self._display = choose, start, asked, display
        self._notes: list[str] = []
        self._ways: list[Way] = []
        self._tried: set[tuple[str, int, int]] = set()
        if place.earlier is not None:
            for entry in place.earlier.entries:
                self.results |= {plan.key_of(result): result for result in entry.results}
        self._learn()
        for result in self.results.values():
            if not result.failure:  # what failed says nothing of how long it takes
                way = Way(result.strategy, result.workers, result.servers)
                display.estimate.add(way, result.start_up + result.seconds)

    def left(self) -> list[Planned]:
        """The runs that are still to be made, those that failed in an earlier session among them."""
        everything = plan.missing(plan.order(self._ways, self._subject.repeats), self.results.values())
        return [run for run in everything if run.key not in self._tried]

    def go(self) -> None:
        """Make all runs that are left.

        Raises:
            Interrupted: A signal has asked for the end.
            UsageError: The script does not report the metric of the target.
        """
        while runs := self.left():
            total = (len(self._ways) + 1) * self._subject.repeats
            self._display.begin(runs, total, self._subject.repeats)
            self._make(runs[0])

    def comparison(self) -> Comparison:
        """All that is known now."""
        missing = [run for run in plan.order(self._ways, self._subject.repeats) if run.key not in self.results]
        found = dataclasses.replace(
            self._subject,
            target=self._target(),
            entries=plan.entries(self._ways, self.results.values()),
            missing=len(missing),
        )
        return dataclasses.replace(found, notes=(*self._notes, *verdict.notes(found)))

    def _make(self, run: Planned) -> None:
        command, environment = self._start(run)
        log = self._place.logs / log_name(run)
        ended = running.run(
            command,
            environment,
            records=self._place.records,
            log=log,
            watch=lambda record: self._watch(run, record),
            asked=self._asked,
        )
        self._tried.add(run.key)
        result = self._read(run, ended, log)
        if self._wish is not None and not result.failure and not self._knows_metric(result.curves):
            raise target.unknown(self._wish, list(result.curves))
        self.results[run.key] = result
        self._display.estimate.add(run.way, ended.seconds)
        self._learn()
        comparison_folder.save(self.comparison(), self._place.folder)
        self._display.end(result, self._target())

    def _read(self, run: Planned, ended: running.Ended, log: Path) -> Result:
        failure = running.failure(ended, log)
        if ended.record is not None:
            try:
                return records.result(run, ended.record, self._wish, failure)
            except RecordError as error:
                failure = failure or str(error)
        way = run.way
        return Result(way.strategy, way.workers, way.servers, run.repeat, failure or "it has left no record")

    def _watch(self, run: Planned, record: Path) -> bool:
        """Show how far a run is; whether it has reached enough."""
        try:
            found = reader.read_curves(record)
        except RecordError:
            return False  # it is just being made
        points = records.reported(found, found.first or 0.0)
        words = [f"epoch {found.epoch}, step {found.step}"] if found.first is not None else ["starting"]
        words += [f"{name} {number(curve[-1].value)}" for name, curve in list(points.items())[:2]]
        self._display.progress(", ".join(words))
        if self._wish is None:
            return False
        if not self._knows_metric(points):
            samples = max([found.seen, *(curve[-1].samples for curve in points.values())])
            passes = samples / found.pass_samples if found.pass_samples else 0.0
            is_late = max(passes, found.epoch - 1) >= _ENOUGH_PASSES
            if is_late and target.will_not_come(self._wish, list(points)):
                raise target.unknown(self._wish, list(points))
        curve = points.get(self._wish.metric, [])
        wanted = self._wish.target(curve)
        return wanted is not None and any(wanted.is_reached(point.value) for point in curve)

    def _knows_metric(self, curves: Mapping[str, Any]) -> bool:
        """Whether the metric of the target is among ``curves``, or was in an earlier run."""
        assert self._wish is not None
        metric = self._wish.metric
        return metric in curves or any(metric in result.curves for result in self.results.values())

    def _learn(self) -> None:
        """From the baseline: what fits the script, and from which side its metric comes to the target."""
        baseline = next((r for r in self.results.values() if r.workers == 1 and not r.failure), None)
        self._ways, self._notes = self._choose(baseline.told if baseline is not None else {})
        wanted = self._target()
        if self._wish is not None and wanted is not None:
            self._wish = dataclasses.replace(self._wish, rises=wanted.rises)

    def _target(self) -> Goal | None:
        if self._wish is None:
            return None
        known = [self._wish.target(result.curves.get(self._wish.metric, [])) for result in self.results.values()]
        return next((found for found in known if found is not None), self._wish.target([]))


def log_name(run: Planned) -> str:
    """``local_sgd-period-16-on-2-repeat-1.log``."""
    text = "one worker" if run.way == BASELINE else f"{run.way.strategy} on {run.way.workers}"
    return re.sub(r"[^A-Za-z0-9_.]+", "-", f"{text} repeat {run.repeat + 1}").strip("-") + ".log"
