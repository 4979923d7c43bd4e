"""Runs a job on several hosts: looks at them, starts it there and watches over it to its end."""

from __future__ import annotations

import contextlib
import dataclasses
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from hocket.launch import preflight, supervisor
from hocket.launch.environment import Job
from hocket.launch.party import Wishes
from hocket.launch.signals import Signals
from hocket.observe.recorder import Recorder
from hocket.observe.timeline import Timeline

MakeRecord = Callable[[Job, Mapping[str, Any]], Recorder | None]
"""Begins the record of a job, of whose hosts something is known by name."""


def run(
    job: Job,
    wishes: Wishes,
    log_dir: Path | None = None,
    make_record: MakeRecord = lambda *_: None,
    timeline: Timeline | None = None,
) -> int:
    """Run ``job`` to its end; its size is known when the hosts have been looked at."""
    with Signals() as signals:
        party = preflight.gather(wishes, job, signals)
        with contextlib.closing(party.links):
            for line in party.warnings:
                print(line, file=sys.stderr, flush=True)
            job = dataclasses.replace(job, size=party.size)
            recorder = make_record(job, party.facts())
            return supervisor.run(job, log_dir, recorder, start=party.start, signals=signals, timeline=timeline)
