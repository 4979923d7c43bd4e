"""Hears what the workers tell and passes it on, to the screen and to the record; remembers the last checkpoint."""

from __future__ import annotations

import sys
from pathlib import Path

from hocket.errors import RecordError
from hocket.events import Facts, Happening, Progress, Record, Traffic
from hocket.launch.report import Outcome
from hocket.launch.screen import Screen
from hocket.observe.progress import Pace
from hocket.observe.recorder import Recorder
from hocket.observe.traffic import TrafficSummary


class Listener:
    """One job's ear.

    Attributes:
        screen: Where progress is shown, once there is one.
    """

    def __init__(self, recorder: Recorder | None) -> None:
        self.screen: Screen | None = None
        self._recorder = recorder
        self._pace = Pace()
        self._traffic = TrafficSummary()
        self._checkpoint = ""
        self._has_finished = False

    def take(self, rank: int, record: Record) -> None:
        """Pass on what a worker has told."""
        if isinstance(record, Progress) and rank == 0 and self.screen is not None:
            self._pace.update(record)
            self.screen.progress(self._pace)
        elif isinstance(record, Happening) and record.name == "checkpoint saved":
            self._checkpoint = str(record.details.get("path") or self._checkpoint)
        elif isinstance(record, Traffic):
            self._traffic.take(rank, record)
        if self._recorder is not None:
            self._recorder.take(rank, record)

    def tick(self) -> None:
        """To be called often; once a second, what was heard is written down."""
        if self._recorder is not None:
            try:
                self._recorder.tick()
            except RecordError as error:
                self._say(f"hocket: the record of this run stops here: {error} ({self._recorder.folder})")

    def last_checkpoint(self, resumed_from: str | None) -> list[str]:
        """The line of a report that says where the last checkpoint is, if there is one."""
        if not self._checkpoint:
            return []
        # By hand a script may have saved elsewhere.
        continues = resumed_from is not None and Path(resumed_from).resolve() == Path(self._checkpoint).parent.resolve()
        rest = "; the same command continues from it." if continues else "."
        return [f"hocket: the last checkpoint is {self._checkpoint}{rest}"]

    def summary(self) -> list[str]:
        """What is said of a run that ended well."""
        return self._traffic.lines()

    def finish(self, outcome: Outcome) -> None:
        """Write down how the job ended; only the first call counts."""
        if self._recorder is None or self._has_finished:
            return
        self._has_finished = True
        self._recorder.take(0, Facts(dict(self._traffic.facts())))
        try:
            self._recorder.finish(outcome.status, outcome.reason, outcome.lines if outcome.status else [])
        except RecordError as error:
            self._say(f"hocket: the record of this run is incomplete: {error} ({self._recorder.folder})")

    def _say(self, line: str) -> None:
        if self.screen is not None:
            self.screen.say(line)
        else:
            print(line, file=sys.stderr, flush=True)
