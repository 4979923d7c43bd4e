"""Typed records of what happens in a job, and the sinks that take them.

A record is one line of JSON, so that whoever reads it needs nothing of Hocket. Records travel to the
launcher through an inherited pipe; where there is none they go nowhere.
"""

from __future__ import annotations

import dataclasses
import json
import os
import time
from dataclasses import dataclass
from typing import Protocol


@dataclass(frozen=True)
class Progress:
    """How far a loader is."""

    epoch: int
    step: int
    steps: int | None
    samples: int  # of all workers, in this epoch so far

    kind = "progress"


@dataclass(frozen=True)
class Stage:
    """Where a worker is in its life: ``joining`` the others, ``joined``, or ``failed`` (it has raised)."""

    stage: str

    kind = "stage"


Record = Progress | Stage


class Sink(Protocol):
    """Takes records."""

    def put(self, record: Record) -> None: ...


class NoSink:
    """Forgets everything."""

    def put(self, record: Record) -> None:
        """Forget it."""


class PipeSink:
    """Writes to the launcher's pipe; a full pipe or a launcher that has gone never holds up the training."""

    def __init__(self, descriptor: int) -> None:
        self._descriptor = descriptor
        self._next = 0.0
        os.set_blocking(descriptor, False)

    def put(self, record: Record) -> None:
        """Send at most ten records of progress a second, but always the last one of an epoch."""
        if isinstance(record, Progress):
            now = time.monotonic()
            if now < self._next and record.step != record.steps:
                return
            self._next = now + 0.1
        try:
            os.write(self._descriptor, encode(record))
        except OSError:
            pass


def encode(record: Record) -> bytes:
    """One line of JSON."""
    return json.dumps({"kind": record.kind, **dataclasses.asdict(record)}).encode() + b"\n"


def decode(line: bytes) -> Record | None:
    """The record in ``line``, or None if it is none."""
    try:
        fields = json.loads(line)
        kinds: dict[str, type[Record]] = {Progress.kind: Progress, Stage.kind: Stage}
        return kinds[fields.pop("kind")](**fields)
    except (ValueError, TypeError, KeyError, AttributeError):
        return None
