"""One run of a comparison: a launcher of its own, watched through its record until it ends or has reached enough."""

from __future__ import annotations

import select
import signal
import subprocess
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from hocket.errors import RecordError
from hocket.observe import reader, run_records

_LOOK = 0.3  # seconds between two looks at a record, which is written once a second
_PATIENCE = 20.0  # seconds that a launcher has to end its job, on other hosts too


class Asked(Protocol):
    """Collects signals that ask for the end; readable when one has come, or a child has ended."""

    received: list[int]

    def fileno(self) -> int: ...

    def drain(self) -> None: ...


class Interrupted(Exception):
    """A signal has asked for the end of the comparison, and the run is over."""


@dataclass(frozen=True)
class Ended:
    """How a run ended.

    Attributes:
        status: The launcher's exit status.
        record: The folder of its record, if it has got that far.
        was_enough: Whether it was ended because ``watch`` said so.
        seconds: Seconds from the start of the launcher to its end.
    """

    status: int
    record: Path | None
    was_enough: bool
    seconds: float


def run(
    command: Sequence[str],
    environment: Mapping[str, str],
    *,
    records: Path,
    log: Path,
    watch: Callable[[Path], bool],
    asked: Asked,
) -> Ended:
    """Run ``command`` to its end; nothing of it is left, also if something is raised.

    Args:
        command: The launcher, which leaves a record below ``records``.
        environment: All of it.
        records: The folder of records.
        log: The file for all that the run prints.
        watch: Is given the folder of the record now and then; True ends the run. What it raises does so, too.
        asked: A signal there ends the run.

    Raises:
        Interrupted: A signal has asked for the end.
    """
    if asked.received:
        raise Interrupted
    before, begin = set(run_records.all_in(records)), time.monotonic()
    record: Path | None = None
    was_enough = False
    with log.open("wb") as output:
        child = subprocess.Popen(
            list(command), env=dict(environment), stdin=subprocess.DEVNULL, stdout=output, stderr=subprocess.STDOUT,
            process_group=0,
        )  # fmt: skip
    try:
        while child.poll() is None and not was_enough and not asked.received:
            if select.select([asked], [], [], _LOOK)[0]:
                asked.drain()
            record = record or _new(records, before)
            was_enough = record is not None and watch(record)
    finally:
        _end(child, asked)
    if asked.received:
        raise Interrupted
    return Ended(child.returncode, record or _new(records, before), was_enough, time.monotonic() - begin)


def failure(ended: Ended, log: Path) -> str:
    """Why it failed, in one line; empty if it did not."""
    if ended.status == 0 or ended.was_enough:
        return ""
    reason = None
    if ended.record is not None:
        try:
            reason = reader.read(ended.record).reason
        except RecordError:
            reason = None
    return reason or _last_word(log) or f"the launcher ended with status {ended.status}"


def _new(records: Path, before: set[Path]) -> Path | None:
    """The record that was not there before; one run is made at a time."""
    return next((folder for folder in run_records.all_in(records) if folder not in before), None)


def _end(child: subprocess.Popen[bytes], asked: Asked) -> None:
    """Have the launcher end its job, if it still runs; who asks twice hastens it."""
    signals, deadline = len(asked.received), time.monotonic() + _PATIENCE
    ignores = signal.getsignal(signal.SIGINT) == signal.SIG_IGN  # in the background of a shell; the launcher does, too
    number = signal.SIGTERM if ignores else signal.SIGINT
    if child.poll() is None:
        child.send_signal(number)
    while child.poll() is None and time.monotonic() < deadline:
        if select.select([asked], [], [], 0.1)[0]:
            asked.drain()
        if len(asked.received) > signals:
            signals = len(asked.received)
            child.send_signal(number)
    if child.poll() is None:
        child.kill()  # its guardian ends the rest
    child.wait()


def _last_word(log: Path) -> str:
    """What a launcher that did not start has said."""
    lines = [line.strip() for line in log.read_text(errors="replace").splitlines() if line.strip()]
    own = [line.removeprefix("hocket: ") for line in lines if line.startswith("hocket: ")]
    return (own or lines or [""])[-1]
