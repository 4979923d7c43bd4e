"""Watches over the workers and servers of a job from start to end, wherever they run."""

from __future__ import annotations

import contextlib
import signal
import time
from collections.abc import Callable, Iterable
from pathlib import Path

from hocket.events import Facts, Replicas, Stage, decode
from hocket.launch import report
from hocket.launch.crew import Chunk, Crew, Loss, Member
from hocket.launch.environment import Job
from hocket.launch.listener import Listener
from hocket.launch.local import LocalCrew
from hocket.launch.report import Ending, Outcome
from hocket.launch.screen import Logs, Screen, open_screen
from hocket.launch.signals import Signals
from hocket.launch.survival import Survival
from hocket.launch.words import Words
from hocket.observe.recorder import Recorder
from hocket.observe.timeline import Timeline

_GRACE = 1.0  # seconds between asking workers to end and killing them
_RETIREMENT = 2.0  # the same for servers when all workers have finished
_KILL = 3.0  # seconds that killed ones have to be gone; other hosts may not answer
_TICK = 0.25


def run(
    job: Job,
    log_dir: Path | None,
    recorder: Recorder | None = None,
    report_to: Path | None = None,
    start: Callable[[Job, Signals], Crew] = LocalCrew,
    signals: Signals | None = None,
    summary: bool = True,
    timeline: Timeline | None = None,
) -> int:
    """Run ``job`` to its end; return the exit status for the shell. Afterwards nothing of it is left.

    Args:
        job: What to run.
        log_dir: A folder for the output of each worker and server.
        recorder: Is given what they tell and how the job ends, and is finished then.
        report_to: A file for the report of a failure, which then is not shown.
        start: Starts them.
        signals: Collects signals already; if nobody does, they are collected from here on.
        summary: Whether something is said of a run that ended well.
        timeline: Is given what they did when, and is finished at the end.
    """
    logs = Logs(log_dir, job.size, job.servers)
    listener = Listener(recorder, timeline)
    try:
        with (
            signals or Signals() as collected,
            contextlib.closing(start(job, collected)) as crew,
            contextlib.closing(open_screen(report_to)) as screen,
        ):
            listener.screen = screen
            if timeline is not None:
                timeline.clock = crew.clock
            outcome = _Supervisor(job, crew, screen, logs, listener, collected.received).watch()
            listener.finish(outcome)
            if outcome.status or summary:
                screen.report(outcome.lines)  # after anything else that there is to say
            return outcome.status
    except BaseException as error:
        listener.finish(Outcome(1, f"the launcher failed: {error!r}"))
        raise
    finally:
        logs.close()


class _Supervisor:
    def __init__(
        self, job: Job, crew: Crew, screen: Screen, logs: Logs, listener: Listener, received: list[int]
    ) -> None:
        self._job, self._crew, self._screen, self._listener = job, crew, screen, listener
        self._received = received
        self._words = Words(crew.members, screen, logs)
        self._workers = _workers(crew.members)
        self._failed_at: dict[Member, float] = {}
        self._started = time.monotonic()
        self._survival = Survival(crew, listener)

    def watch(self) -> Outcome:
        """Until all workers have ended, something has failed, or a signal asks for the end; nobody is left then."""
        running = list(self._crew.members)
        failures: list[Ending] = []
        absent: list[Member] = []
        losses: list[Loss] = []
        while _workers(running) and not (failures or self._received or absent or losses):
            self._pump(_TICK)
            failures += self._reap(running)
            losses += self._survival.take_losses()
            absent = self._find_absent(running)
        self._survival.is_over = True
        asked = self._received[0] if self._received else None
        waiting = _workers(running)
        if waiting or failures or losses:
            self._stop(running, asked, failures)
            losses += self._survival.take_losses()
        else:
            failures += self._retire(running)
        self._take(self._crew.end())
        for member in self._crew.members:
            self._words.finish(member)
        self._screen.status("")
        self._screen.close()
        checkpoint = self._listener.last_checkpoint(self._job.settings.get("checkpoint"))
        size, seconds = self._job.size - sum(map(len, self._survival.lost.values())), time.monotonic() - self._started
        if asked is not None:
            return report.stopped(asked, checkpoint)
        if losses:
            return report.loss(losses, failures, size, seconds, checkpoint)
        if failures:
            return report.failure(failures, size, seconds, checkpoint)
        if absent:
            return report.absence(absent, waiting, checkpoint)
        if differences := self._compare_replicas():
            return report.drifted(differences, checkpoint)
        return report.finished(self._listener.summary(), list(self._survival.lost))

    def _compare_replicas(self) -> str:
        """How the workers' parameters differ after the last step, where they must be the same; empty if not at all."""
        told = [worker for worker in self._workers if worker.replicas and not worker.is_lost]
        return Replicas.differences([w.replicas for w in told], [w.number for w in told]) if len(told) > 1 else ""

    def _find_absent(self, running: list[Member]) -> list[Member]:
        """Those who have ended well, but without joining the others, if these wait for them."""
        if not any(worker.stage == "joining" for worker in _workers(running)):
            return []
        return [w for w in self._workers if w.returncode == 0 and w not in running and not w.stage]

    def _reap(self, running: list[Member]) -> list[Ending]:
        """Take note of those that have ended or will; return those that failed."""
        failed = []
        for member in list(running):
            if not member.is_running:
                running.remove(member)
                is_survived = self._survival.survives(member)
                member.is_lost = member.is_lost or is_survived
                self._words.finish(member)
                if is_survived:
                    self._survival.go_on_without(member)
                elif self._has_failed(member, running):
                    failed.append(self._ending(member, member.returncode or 0))
            elif member.stage == "failed":
                self._failed_at.setdefault(member, time.monotonic())
                if time.monotonic() - self._failed_at[member] > _GRACE:  # it has raised, but does not end
                    member.stage = "reported"
                    failed.append(self._ending(member, member.status))
        return failed

    def _has_failed(self, member: Member, running: list[Member]) -> bool:
        """Of one that has ended; a server ends badly, whatever its status, while workers need it."""
        if member.returncode is None or member.stage == "reported":
            return False
        is_early = member.is_server and not self._survival.is_over and bool(_workers(running))
        return member.returncode != 0 or is_early

    def _ending(self, member: Member, status: int) -> Ending:
        return Ending(member, status, self._words.traceback(member) or member.words.splitlines())

    def _retire(self, servers: list[Member]) -> list[Ending]:
        """Let the servers end, now that no worker needs them; return those that fail at it."""
        retired = list(servers)
        self._press(servers, {"server": signal.SIGTERM}, _RETIREMENT)
        self._press(servers, {"server": signal.SIGKILL}, _KILL)
        good = (None, 0, -signal.SIGTERM, -signal.SIGKILL)
        return [self._ending(server, server.returncode or 0) for server in retired if server.returncode not in good]

    def _stop(self, running: list[Member], asked: int | None, failures: list[Ending]) -> None:
        """End all that still run, politely, then not; add those that fail by themselves to ``failures``."""
        polite = signal.SIGINT if asked == signal.SIGINT else signal.SIGTERM
        if asked is None:
            failures += self._wait(running, 0.3)  # ranks with the same mistake need a moment
        known = {ending.member for ending in failures}
        for member in running:
            if member.stage == "failed" and member not in known:
                failures.append(self._ending(member, member.status))
        self._press(running, {"rank": polite, "server": signal.SIGTERM}, _GRACE)
        self._press(running, {"rank": signal.SIGKILL, "server": signal.SIGKILL}, _KILL)

    def _press(self, running: list[Member], numbers: dict[str, signal.Signals], seconds: float) -> None:
        """Send a signal to each, by its role, and wait for their end; a signal to the launcher hastens it.

        Those that have ended are removed from ``running``.
        """
        interrupts = len(self._received)
        for member in running:
            self._crew.signal(member, numbers[member.role])
        deadline = time.monotonic() + seconds
        while running and time.monotonic() < deadline:
            if signal.SIGKILL not in numbers.values() and len(self._received) > interrupts:
                break
            self._pump(0.02)
            running[:] = [member for member in running if member.is_running]

    def _wait(self, running: list[Member], seconds: float) -> list[Ending]:
        failed: list[Ending] = []
        deadline = time.monotonic() + seconds
        while running and time.monotonic() < deadline and not self._received:
            self._pump(0.02)
            failed += self._reap(running)
        return failed

    def _pump(self, seconds: float) -> None:
        """Show what is written, for at most ``seconds`` if nothing is."""
        self._take(self._crew.read(seconds))
        self._listener.tick()
        is_ending = any(member.stage in ("failed", "reported") for member in self._crew.members)
        if not is_ending and not self._survival.is_over:  # else which traceback is the cause will be clear at the end
            self._words.release()

    def _take(self, chunks: Iterable[Chunk]) -> None:
        for member, pipe, data in chunks:
            if pipe == "events":
                self._take_events(member, data)
            else:
                self._words.take(member, data, error=pipe == "stderr")

    def _take_events(self, member: Member, data: bytes) -> None:
        *lines, member.events_rest = (member.events_rest + data).split(b"\n")
        for record in map(decode, lines):
            if isinstance(record, Stage):
                member.stage, member.status, member.words = record.stage, record.status, record.words
                member.has_joined = member.has_joined or record.stage == "joined"
            elif isinstance(record, Replicas):
                member.replicas = record.values
            elif record is not None:
                if isinstance(record, Facts) and not member.is_server and record.values.get("survives loss") is True:
                    self._survival.is_told = True
                self._listener.take(member, record)


def _workers(members: Iterable[Member]) -> list[Member]:
    return [member for member in members if not member.is_server]
