"""Keeps what a run tells: from records of workers and servers to rows of its database and points of its curves."""

from __future__ import annotations

import dataclasses
import json
import math
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from hocket.errors import RecordError
from hocket.events import (
    WORKERS_CHANGED,
    Facts,
    Happening,
    Metrics,
    PassDone,
    Progress,
    Record,
    Sent,
    ServerReport,
)
from hocket.observe.progress import Mark, Odometer, rates
from hocket.observe.run_records import FILE, RecordWriter
from hocket.observe.summaries import SampleCount
from hocket.observe.tensorboard_file import TensorboardFile

_EVERY = 0.7  # seconds between two commits at least; with the launcher's tick, one a second at most
_OFTEN, _SELDOM, _SETTLED = 0.1, 1.0, 60.0  # seconds between two rows of steps at first and later, and when later is


class Thinning:
    """Lets through at most ten a second during the first minute, then one a second."""

    def __init__(self) -> None:
        self._start: float | None = None
        self._last = (0.0, -1)

    def lets_through(self, now: float) -> bool:
        """Whether something that happens now is kept."""
        self._start = now if self._start is None else self._start
        since = now - self._start
        width = _OFTEN if since < _SETTLED else _SELDOM
        slot = (width, int(since / width))  # slots, and not a least distance, so that jitter costs nothing
        if slot == self._last:
            return False
        self._last = slot
        return True


class _Told:
    """What the processes that had a number, one after the other, have told of themselves since each of them started.

    Attributes:
        now: Samples trained on, seconds waited and seconds in exchanges, of the last process.
        sent: Bytes that it has handed to exchanges.
        sent_before: Bytes that those before it have.
    """

    def __init__(self) -> None:
        self.now = self._before = (0, 0.0, 0.0)
        self.sent = self.sent_before = 0

    @property
    def sums(self) -> tuple[int, float, float]:
        """Samples and seconds of all these processes."""
        (own, waited, exchanging), before = self.now, self._before
        return own + before[0], waited + before[1], exchanging + before[2]

    def renew(self) -> None:
        """Another process has the number from now on."""
        self._before, self.now = self.sums, (0, 0.0, 0.0)
        self.sent_before, self.sent = self.sent_before + self.sent, 0


class Recorder:
    """The record of one run.

    Only ``tick`` and ``finish`` write to disk and may raise RecordError; afterwards nothing more is written, but
    ``finish`` still tries to leave how the run ended.

    Attributes:
        folder: The folder of the record.
        lead: The rank whose progress and metrics are those of the run.
    """

    def __init__(self, folder: Path, facts: Mapping[str, Mapping[str, Any]], *, tensorboard: bool = False) -> None:
        """Make the record in ``folder``, which exists; ``facts`` are what is known already, by section and name."""
        self.folder, self.lead = folder, 0
        self._started = time.monotonic()
        self._writer = RecordWriter(folder / FILE)
        self._scalars = TensorboardFile(folder / "tensorboard") if tensorboard else None
        self._next = 0.0
        self._failed = False
        self._thinning, self._odometer = Thinning(), Odometer()
        self._row: Mark | None = None  # the mark of the last row of steps
        self._left_out: tuple[Progress, Mark] | None = None
        self._last: Progress | None = None  # the last progress of the lead
        self._ranks: dict[int, float] = {}  # when each told something since the last commit
        self._told: dict[int, _Told] = {}  # by each rank, all its processes together
        self._has_changed = False  # whether workers were lost, and the others were in step
        self._samples = SampleCount()
        self._told_by_first: set[str] = set()
        self._began: set[int] = set()  # ranks that have had a batch
        for section, values in facts.items():
            self.add_facts(section, values)
        self._writer.commit()

    def add_facts(self, section: str, values: Mapping[str, Any]) -> None:
        """Remember facts; they replace those of the same name."""
        for name, value in values.items() if not self._failed else ():
            self._writer.add("facts", section, name, json.dumps(value))

    def take(self, rank: int | None, record: Record) -> None:
        """Remember what a worker tells, or where there is no rank, a server or the launcher; nothing is written yet."""
        if self._failed:
            return
        if isinstance(record, Progress) and rank is not None:
            if rank not in self._began:
                self._began.add(rank)
                first = {"time": time.time(), "waited": record.waited, "exchanging": record.exchanging}
                self.add_facts("began", {f"rank {rank}": first})
            told = self._told.setdefault(rank, _Told())
            told.now = (record.own, record.waited, record.exchanging)
            self._ranks[rank] = time.time()
            if rank == self.lead:
                self._progress(record, time.time())
        elif isinstance(record, PassDone):
            self.add_facts("samples", self._samples.take(record))
        elif isinstance(record, Metrics) and rank == self.lead:
            self._metrics(record)
        elif isinstance(record, Sent) and rank is not None:
            told = self._told.setdefault(rank, _Told())
            told.sent = record.nbytes
            self.add_facts("sent", {f"rank {rank}": told.sent_before + told.sent})
        elif isinstance(record, ServerReport):
            self.add_facts("served", {f"server {record.server}": dataclasses.asdict(record)})
        elif isinstance(record, Facts):
            self._facts(rank, record)
        elif isinstance(record, Happening):
            self._has_changed |= record.name == WORKERS_CHANGED
            self.add_facts("samples", self._samples.take_change(record.details))
            self._writer.add("events", record.time, rank, record.name, json.dumps(record.details))

    def renew(self, rank: int) -> None:
        """A new process has the number ``rank``: what it tells since its start is added to what the rank has told."""
        if (told := self._told.get(rank)) is not None:
            told.renew()

    def tick(self) -> None:
        """Write what has come, about once a second; cheap to call often."""
        if self._failed or time.monotonic() < self._next:
            return
        self._next = time.monotonic() + _EVERY
        self._save()

    def finish(self, status: int, reason: str, report: list[str]) -> None:
        """The run has ended: write the rest of what came, and how it ended; nothing may be taken after it.

        Args:
            status: The launcher's exit status.
            reason: The cause, in one line.
            report: What was shown of a failure.
        """
        trouble, said = None, self._failed
        try:
            if not said:
                if self._left_out is not None:
                    self._write_row(*self._left_out)
                self._add_up()
                self._save()
        except RecordError as error:
            trouble = error
        if report:
            self._writer.add("events", time.time(), None, "failure", json.dumps({"report": report[-200:]}))
        self._writer.add("exit", time.time(), status, reason, time.monotonic() - self._started)
        try:
            self._writer.commit()  # by itself: even a full disk often has room for one row
        except RecordError as error:
            trouble = trouble or error
        self._writer.close()
        if self._scalars is not None:
            self._scalars.close()
        if trouble is not None and not said:
            raise trouble

    def _save(self) -> None:
        for rank, when in self._ranks.items():
            _, waited, exchanging = self._told[rank].sums
            self._writer.add("ranks", rank, when, waited, exchanging)
        self._ranks = {}
        try:
            self._writer.commit()
            if self._scalars is not None:
                self._scalars.flush()
        except RecordError:
            self._failed = True
            raise

    def _add_up(self) -> None:
        """A last row, of the same time: while a run goes on, the lead cannot know all that others have trained on.

        Where workers have changed, the lead knows better than those that are gone could tell.
        """
        own = sum(told.sums[0] for told in self._told.values())
        if self._last is None or self._row is None or self._has_changed or not own:
            return
        seen = self._last.before + own
        if seen != self._row.samples:
            self._write_row(self._last, dataclasses.replace(self._row, samples=seen))

    def _progress(self, record: Progress, now: float) -> None:
        last, self._last = self._last, record
        if (
            record.ends
            and last is not None
            and (last.total, last.seen, last.step) == (record.total, record.seen, record.step)
        ):
            return  # a script that ends long after its training
        mark = self._odometer.read(record, now)
        if self._thinning.lets_through(now):
            self._write_row(record, mark)
        else:
            self._left_out = (record, mark)

    def _write_row(self, record: Progress, mark: Mark) -> None:
        found = rates(self._row, mark) if self._row is not None else None
        since = (found.step_seconds, found.samples, found.waiting, found.communication) if found else (None,) * 4
        self._writer.add("steps", mark.time, record.epoch, record.step, mark.steps, mark.samples, *since)
        self._row, self._left_out = mark, None
        if self._scalars is not None and found is not None:
            for name, value in zip(("samples_per_second", "waiting", "communication"), since[1:], strict=True):
                self._scalars.add(f"hocket/{name}", value or 0.0, mark.steps, mark.time)

    def _metrics(self, record: Metrics) -> None:
        for name, value in record.values.items():
            if not isinstance(value, int | float):
                continue
            kept = None if math.isnan(value) else float(value)
            self._writer.add("metrics", record.step, record.samples, record.time, name, kept, record.sent)
            if self._scalars is not None:
                self._scalars.add(name, float(value), record.step, record.time)

    def _facts(self, rank: int | None, record: Facts) -> None:
        """Where ranks tell different things, rank 0 is right."""
        for name, value in record.values.items():
            if rank == 0:
                self._told_by_first.add(name)
            elif name in self._told_by_first:
                continue
            self._writer.add("facts", "told", name, json.dumps(value))
