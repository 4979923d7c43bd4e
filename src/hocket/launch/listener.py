"""Opens the record of a run, and hears what its processes tell: for the screen, the record and the summary."""

from __future__ import annotations

import contextlib
import os
import platform
import shutil
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from hocket import __version__, config
from hocket.errors import RecordError, UsageError
from hocket.events import (
    WORKERS_CHANGED,
    Facts,
    Gradients,
    Happening,
    Metrics,
    Progress,
    Record,
    ServerReport,
    Spans,
    Traffic,
)
from hocket.launch import machine
from hocket.launch.crew import CrewMember
from hocket.launch.environment import Job
from hocket.launch.report import Outcome
from hocket.launch.screen import Screen
from hocket.observe import run_records, tensorboard_file
from hocket.observe.gradients import GradientSummary
from hocket.observe.progress import RunPace
from hocket.observe.reader import process_start
from hocket.observe.recorder import Recorder
from hocket.observe.summaries import GossipSummary, PredictedSummary, ServedSummary, TrafficSummary
from hocket.observe.timeline import Timeline


class EventListener:
    """Takes everything that the processes of one job tell, and passes it on.

    Attributes:
        screen: Shows progress, once there is a screen.
        lead: The rank whose progress is that of the job.
        progress: How far it is, if it has told that.
        generation: How often the workers have changed.
        timeline: Takes spans, if the user wants a timeline.
    """

    def __init__(self, recorder: Recorder | None, timeline: Timeline | None = None) -> None:
        self.screen: Screen | None = None
        self._recorder, self.timeline = recorder, timeline
        self._pace = RunPace()
        self._traffic, self._served, self._gossip = TrafficSummary(), ServedSummary(), GossipSummary()
        self._gradients, self._predicted = GradientSummary(), PredictedSummary()
        self.lead = self.generation = 0
        self.progress: Progress | None = None
        self._checkpoint = ""
        self._has_finished = False

    def take(self, member: CrewMember, record: Record) -> None:
        """Pass on what a worker or server has told; of a spare, only what happens to it is of interest."""
        if member.role == "spare" and not isinstance(record, Spans | Happening):
            return
        rank = member.number if member.is_worker else None
        if isinstance(record, Happening) and record.name == WORKERS_CHANGED and rank is not None:
            self.follow(rank)  # the first of them tells, and reports from then on
            self.generation = int(record.details.get("generation", self.generation))
        if isinstance(record, Progress) and rank == self.lead:
            self.progress = record
            if self.screen is not None:
                self._pace.update(record)
                self.screen.progress(self._pace)
        elif isinstance(record, Happening) and record.name == "checkpoint saved":
            self._checkpoint = str(record.details.get("path") or self._checkpoint)
        elif isinstance(record, Traffic) and rank is not None:
            self._traffic.take(rank, record)
        elif isinstance(record, Gradients) and rank is not None:
            self._gradients.take(rank, record)
        elif isinstance(record, ServerReport):
            self._served.take(record)
        elif isinstance(record, Facts | Metrics):
            self._gossip.take(record)
            if isinstance(record, Facts):
                self._predicted.take(record)
        if isinstance(record, Spans | Happening):
            drawn = record
            self._draw(lambda timeline: timeline.take(member.role, member.number, member.host, drawn, member))
        if isinstance(record, Happening) and not member.is_worker:
            record = replace(record, details={member.role: member.number, **record.details})
        if self._recorder is not None:
            self._recorder.take(rank, record)

    def note(self, name: str, details: dict[str, Any], line: str = "") -> None:
        """Something that the launcher itself has seen: said on the screen, if there is a line, and written down."""
        if line:
            self.say(line)
        self._draw(lambda timeline: timeline.mark(name))
        if self._recorder is not None:
            self._recorder.take(None, Happening(name, details))

    def follow(self, rank: int) -> None:
        """Take the progress of ``rank`` as that of the job from now on."""
        if rank != self.lead:
            self._pace = RunPace()  # its times are those of another process
        self.lead = rank
        if self._recorder is not None:
            self._recorder.lead = rank

    def renew(self, rank: int) -> None:
        """What ``rank`` tells from now on is of a new process, and comes on top of what the one before has told."""
        if self._recorder is not None:
            self._recorder.renew(rank)
        if rank == self.lead:
            self._pace = RunPace()

    def tick(self) -> None:
        """Write down, once a second, what was heard; to be called often."""
        if self._recorder is not None:
            try:
                self._recorder.tick()
            except RecordError as error:
                self.say(f"hocket: the record of this run stops here: {error} ({self._recorder.folder})")

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
        drawn = [] if self.timeline is None else [self._say_where(self.timeline)]
        said = (self._traffic, self._served, self._gossip, self._gradients, self._predicted)
        return drawn + [line for summary in said for line in summary.lines()]

    def finish(self, outcome: Outcome) -> None:
        """Write down how the job ended; only the first call counts."""
        if self.timeline is not None:
            self.timeline.finish()
        if self._recorder is None or self._has_finished:
            return
        self._has_finished = True
        self._recorder.take(0, Facts(dict(self._traffic.facts())))
        self._recorder.add_facts("servers", self._served.facts())
        self._recorder.add_facts("gradients", self._gradients.facts())
        self._recorder.add_facts("noise over the run", self._gradients.windows())
        try:
            self._recorder.finish(outcome.status, outcome.reason, outcome.lines if outcome.status else [])
        except RecordError as error:
            self.say(f"hocket: the record of this run is incomplete: {error} ({self._recorder.folder})")

    def _draw(self, write: Callable[[Timeline], None]) -> None:
        if self.timeline is not None:
            try:
                write(self.timeline)
            except RecordError as error:
                self.say(f"hocket: the timeline stops here: {error} ({self.timeline.path})")

    @staticmethod
    def _say_where(timeline: Timeline) -> str:
        lost = f" ({timeline.lost:,} spans were lost, for want of room)" if timeline.lost else ""
        path = timeline.path
        if not timeline.is_whole:
            return f"hocket: the beginning of the timeline is {path}{lost}: hocket trace {path} repairs it"
        return f"hocket: the timeline is {path}{lost}: open it at ui.perfetto.dev, or hocket trace {path}"

    def say(self, line: str) -> None:
        """Tell the user something."""
        if self.screen is not None:
            self.screen.say(line)
        else:
            print(line, file=sys.stderr, flush=True)


def open_record(
    job: Job, settings: Mapping[str, str], *, tensorboard: bool, hosts: Mapping[str, Any] | None = None
) -> Recorder | None:
    """Make the folder of a new run and begin its record.

    Args:
        job: What is going to be started.
        settings: What the user has set, by flag or environment.
        tensorboard: Whether curves are also written for TensorBoard.
        hosts: What is known of the hosts of a job over several, by name.

    Returns:
        The record; or None, after a line on stderr, if nobody has asked for one and the folder cannot be written.
    """
    if tensorboard:
        tensorboard_file.check_installed()
    parent = settings.get("run-dir") or config.SETTINGS["run-dir"].default
    folder = None
    try:
        folder = run_records.make(Path(parent), script_name(job))
        return Recorder(folder.absolute(), _describe(job, settings, hosts), tensorboard=tensorboard)
    except RecordError as error:
        if folder is not None:
            shutil.rmtree(folder, ignore_errors=True)
        if "run-dir" in settings or tensorboard:
            raise UsageError(
                f"--run-dir {parent}: {error}; name a folder that can be written to, or leave the record out "
                "with --no-record"
            ) from None
        print(
            f"hocket: this run is not recorded: {Path(parent).absolute()}: {error} "
            "(--run-dir names another folder, --no-record asks for this)",
            file=sys.stderr,
            flush=True,
        )
        return None


def _describe(
    job: Job, settings: Mapping[str, str], hosts: Mapping[str, Any] | None = None
) -> dict[str, dict[str, Any]]:
    """What a record says of a run before it starts, by section and name."""
    return {
        "run": {
            "command": ["hocket", *sys.argv[1:]],
            "script": script_name(job),
            "directory": str(Path.cwd()),
            "git commit": _git_commit(),
            "workers": job.size,
            "started": time.time(),
            "pid": os.getpid(),
            "pid_started": process_start(os.getpid()),
        },
        "settings": {name: settings.get(name, setting.default) for name, setting in config.SETTINGS.items()},
        "versions": {
            "hocket": __version__,
            "python": platform.python_version(),
            "torch": machine.version("torch"),
            "system": f"{platform.system()} {platform.release()}",
        },
        "host": {
            "name": socket.gethostname(),
            "cpu": machine.cpu(),
            "cores": machine.cores(),
            "memory": machine.memory(),
        },
        **({"hosts": dict(hosts)} if hosts else {}),
    }


def script_name(job: Job) -> str:
    """The script's name without folders and ending, or the module's last part."""
    if job.command[0] == "-m":
        return job.command[1].rpartition(".")[2]
    return Path(job.command[0]).stem


def _git_commit() -> str | None:
    """The commit that is checked out in the working directory, if git answers at once."""
    with contextlib.suppress(OSError, subprocess.SubprocessError):
        command = ["git", "rev-parse", "HEAD"]
        done = subprocess.run(command, capture_output=True, text=True, timeout=1, check=True)
        return done.stdout.strip()
    return None
