"""Watches over the processes of a job from start to end, wherever they run: who has ended, and what follows."""

from __future__ import annotations

import contextlib
import signal
import time
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

from hocket.events import Replicas, Stage, Survival
from hocket.launch import report
from hocket.launch.crew import Chunk, Crew, CrewMember, Loss
from hocket.launch.environment import Job, members
from hocket.launch.listener import EventListener
from hocket.launch.local_crew import LocalCrew
from hocket.launch.report import Ending, Outcome
from hocket.launch.screen import Logs, Output, Screen, open_screen
from hocket.launch.signals import Signals
from hocket.observe.recorder import Recorder
from hocket.observe.timeline import Timeline

_GRACE = 1.0  # seconds between asking workers to end and killing them
_RETIREMENT = 2.0  # seconds that servers have to end when all workers have finished
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
    logs = Logs(log_dir, members(job))
    listener = EventListener(recorder, timeline)
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
        self, job: Job, crew: Crew, screen: Screen, logs: Logs, listener: EventListener, received: list[int]
    ) -> None:
        self._job, self._crew, self._screen, self._listener = job, crew, screen, listener
        self._received = received
        self._output = Output(crew.members, screen, logs)
        self._workers = _workers(crew.members)
        self._failed_at: dict[CrewMember, float] = {}
        self._started = time.monotonic()
        self._survival = _Survival(crew, listener)

    def watch(self) -> Outcome:
        """Watch until all workers have ended, something failed, or a signal asks for the end; then nobody is left."""
        running = list(self._crew.members)
        failures: list[Ending] = []
        absent: list[CrewMember] = []
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
            self._output.finish(member)
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

    def _find_absent(self, running: list[CrewMember]) -> list[CrewMember]:
        """The workers that have ended well, but without joining the others, if these wait for them."""
        if not any(worker.stage == "joining" for worker in _workers(running)):
            return []
        return [w for w in self._workers if w.returncode == 0 and w not in running and not w.stage]

    def _reap(self, running: list[CrewMember]) -> list[Ending]:
        """Take note of those that have ended or will; return those that failed."""
        failed = []
        for member in list(running):
            if not member.is_running:
                running.remove(member)
                is_survived = self._survival.survives(member)
                member.is_lost = member.is_lost or is_survived
                self._output.finish(member)
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

    def _has_failed(self, member: CrewMember, running: list[CrewMember]) -> bool:
        """Whether ``member``, which has ended, did so badly; servers do at any status while workers need them."""
        if member.returncode is None or member.stage == "reported":
            return False
        is_early = not member.is_worker and not self._survival.is_over and bool(_workers(running))
        return member.returncode != 0 or is_early

    def _ending(self, member: CrewMember, status: int) -> Ending:
        return Ending(member, status, self._output.traceback(member) or member.words.splitlines())

    def _retire(self, servers: list[CrewMember]) -> list[Ending]:
        """Let the servers end, now that no worker needs them; return those that fail at it."""
        retired = list(servers)
        self._press(servers, signal.SIGTERM, _RETIREMENT)
        self._press(servers, signal.SIGKILL, _KILL)
        good = (None, 0, -signal.SIGTERM, -signal.SIGKILL)
        return [self._ending(server, server.returncode or 0) for server in retired if server.returncode not in good]

    def _stop(self, running: list[CrewMember], asked: int | None, failures: list[Ending]) -> None:
        """End all that still run, politely, then not; add those that fail by themselves to ``failures``."""
        polite = signal.SIGINT if asked == signal.SIGINT else signal.SIGTERM
        if asked is None:
            failures += self._wait(running, 0.3)  # ranks with the same mistake need a moment
        known = {ending.member for ending in failures}
        for member in running:
            if member.stage == "failed" and member not in known:
                failures.append(self._ending(member, member.status))
        self._press(running, polite, _GRACE)
        self._press(running, signal.SIGKILL, _KILL)

    def _press(self, running: list[CrewMember], number: signal.Signals, seconds: float) -> None:
        """Send a signal to each, and wait for their end; a signal to the launcher hastens it.

        SIGINT is for workers, whose script may catch it; other processes get SIGTERM in its place. Members that have
        ended are removed from ``running``.
        """
        interrupts = len(self._received)
        for member in running:
            is_quiet = number == signal.SIGINT and not member.is_worker
            self._crew.signal(member, signal.SIGTERM if is_quiet else number)
        deadline = time.monotonic() + seconds
        while running and time.monotonic() < deadline:
            if number != signal.SIGKILL and len(self._received) > interrupts:
                break
            self._pump(0.02)
            running[:] = [member for member in running if member.is_running]

    def _wait(self, running: list[CrewMember], seconds: float) -> list[Ending]:
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
            self._output.release()

    def _take(self, chunks: Iterable[Chunk]) -> None:
        for member, pipe, data in chunks:
            if pipe == "events":
                self._take_events(member, data)
            else:
                self._output.take(member, data, error=pipe == "stderr")

    def _take_events(self, member: CrewMember, data: bytes) -> None:
        for record in member.events.feed(data):
            if isinstance(record, Stage):
                member.stage, member.status, member.words = record.stage, record.status, record.words
                member.has_joined = member.has_joined or record.stage == "joined"
            elif isinstance(record, Replicas):
                member.replicas = record.values
            elif isinstance(record, Survival):
                self._survival.is_told |= record.survives and member.is_worker
            else:
                self._listener.take(member, record)


def _workers(members: Iterable[CrewMember]) -> list[CrewMember]:
    return [member for member in members if member.is_worker]


class _Survival:
    """Decides whether a job survives a loss, says so, and remembers who was lost.

    Attributes:
        is_told: Whether a worker has told that the strategy survives the loss of workers.
        is_over: Whether the job ends, so that nothing more is survived.
        lost: The ranks that the job has gone on without, by how they were lost, in words.
    """

    def __init__(self, crew: Crew, listener: EventListener) -> None:
        self.is_told = self.is_over = False
        self.lost: dict[str, list[int]] = {}
        self._losses, self._known = crew.losses, 0
        self._workers = [member for member in crew.members if member.is_worker]
        self._listener = listener
        self._started = time.monotonic()

    def survives(self, member: CrewMember) -> bool:
        """Whether the job goes on after the end of ``member``: of a worker that was killed before it raised."""
        was_killed = member.returncode is not None and member.returncode < 0
        is_worker = member.is_worker and member.stage not in ("failed", "reported")
        return was_killed and is_worker and self._can_go_on()

    def go_on_without(self, worker: CrewMember) -> None:
        """Take note of a worker whose end is survived."""
        how = f"{report.how(worker.returncode or 0, hints=False)} after {self._seconds:.1f} s"
        self.lost[f"{worker.name} on {worker.host}, which {how}"] = [worker.number]
        details = {"rank": worker.number, "host": worker.host, "how": how}
        self._tell("worker lost", details, f"{worker.name} on {worker.host} {how}")

    def take_losses(self) -> list[Loss]:
        """Take note of the hosts that were lost since the last look; return the losses that end the job."""
        new = self._losses[self._known :]
        self._known += len(new)
        fatal = []
        for loss in new:
            if loss.servers or loss.coordinator or not self._can_go_on():
                fatal.append(loss)
                continue
            text = report.describe_loss(loss, self._seconds)
            self.lost[text] = loss.ranks
            self._tell("host lost", {"host": loss.host, "ranks": loss.ranks, "how": loss.reason}, text)
        return fatal

    @property
    def _seconds(self) -> float:
        return time.monotonic() - self._started

    def _can_go_on(self) -> bool:
        """Whether workers may be lost now: all had joined, and one runs or has finished."""
        has_begun = self.is_told and not self.is_over and all(worker.has_joined for worker in self._workers)
        return has_begun and any(worker.is_running or worker.returncode == 0 for worker in self._workers)

    def _tell(self, name: str, details: dict[str, Any], text: str) -> None:
        left = [worker.number for worker in self._workers if worker.is_running]
        rest = "the others go on without it." if left else "the others have finished."
        self._listener.note(name, details, f"hocket: {text}; {rest}")
        if left:
            self._listener.follow(left[0])
