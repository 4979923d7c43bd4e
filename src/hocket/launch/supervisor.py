"""Watches over the processes of a job from start to end, wherever they run: who has ended, and what follows."""

from __future__ import annotations

import contextlib
import math
import os
import signal
import time
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

from hocket.errors import UsageError
from hocket.events import Replicas, Stage, Survival
from hocket.launch import host_list, report
from hocket.launch.changing_hosts import ChangingHosts
from hocket.launch.crew import Chunk, Crew, CrewMember, Loss
from hocket.launch.engines.engine import Engine
from hocket.launch.environment import Job, members
from hocket.launch.job_socket import Answers, JobSocket
from hocket.launch.listener import EventListener, script_name
from hocket.launch.local_crew import LocalCrew
from hocket.launch.losses import Losses
from hocket.launch.newcomers import Newcomers
from hocket.launch.report import Ending, Outcome
from hocket.launch.resizing import Resizing
from hocket.launch.screen import Logs, Output, Screen, open_screen
from hocket.launch.signals import Signals
from hocket.observe.recorder import Recorder
from hocket.observe.timeline import Timeline

_GRACE = 1.0  # seconds between asking workers to end and killing them
_RETIREMENT = 2.0  # seconds that servers have to end when all workers have finished
_KILL = 3.0  # seconds that killed ones have to be gone; other hosts may not answer
_TICK = 0.25
_HEARD = 0.5  # seconds in which workers say that they have got a signal that was sent to all


def run(
    job: Job,
    log_dir: Path | None,
    recorder: Recorder | None = None,
    report_to: Path | None = None,
    start: Callable[[Job, Signals], Crew] = LocalCrew,
    signals: Signals | None = None,
    summary: bool = True,
    timeline: Timeline | None = None,
    gives_notice: bool = True,
    engine: Engine | None = None,
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
        gives_notice: Whether workers have some time to leave in order when this process gets SIGTERM.
        engine: Says which hosts there are later, in a job over several.
    """
    if int(job.setting("min-workers")) > job.size:
        raise UsageError(f"--min-workers {job.setting('min-workers')}, and the job has {job.size}: name fewer")
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
            watching = _Supervisor(
                job, crew, screen, logs, listener, collected.received, gives_notice=gives_notice, engine=engine
            )
            with contextlib.closing(JobSocket(job.mark, crew, watching.answers)):
                outcome = watching.watch()
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
        self,
        job: Job,
        crew: Crew,
        screen: Screen,
        logs: Logs,
        listener: EventListener,
        received: list[int],
        *,
        gives_notice: bool,
        engine: Engine | None,
    ) -> None:
        self._job, self._crew, self._screen, self._listener = job, crew, screen, listener
        self._received, self._gives_notice = received, gives_notice
        self._output = Output(screen, logs)
        self._failed_at: dict[CrewMember, float] = {}
        self._is_finished = False  # whether all workers came to the end of the script, though they had notice
        self._started = time.monotonic()
        self._newcomers = Newcomers(job, crew, listener)
        self._losses = Losses(job, crew, listener, self._newcomers)
        self._resizing = Resizing(job, crew, listener, self._newcomers)
        self._hosts = ChangingHosts(job, crew, listener, self._newcomers, self._resizing, engine)
        self.answers: Answers = {"describe": self._describe, "resize": self._resize}

    def watch(self) -> Outcome:
        """Watch until all workers have ended, something failed, or a signal asks for the end; then nobody is left."""
        running = list(self._crew.members)
        failures: list[Ending] = []
        absent: list[CrewMember] = []
        losses: list[Loss] = []
        while _at_work(running) and not (failures or self._received or absent or losses):
            self._pump(_TICK)
            failures += self._reap(running)
            losses += self._losses.take_losses()
            absent = self._find_absent(running)
            running += self._newcomers.take_started()
            self._resizing.tick()
            self._hosts.tick()
        self._losses.is_over = True
        asked = self._received[0] if self._received else None
        waiting = _at_work(running)
        if waiting or failures or losses:
            self._stop(running, asked, failures)
            losses += self._losses.take_losses()
        else:
            failures += self._retire(running)
        self._take(self._crew.end())
        for member in self._crew.members:
            self._output.finish(member)
        self._screen.status("")
        self._screen.close()
        checkpoint = self._listener.last_checkpoint(self._job.settings.get("checkpoint"))
        size, seconds = self._losses.size, time.monotonic() - self._started
        if asked is not None and not self._is_finished:
            return report.stopped(asked, checkpoint)
        limit = [f"hocket: {line}" for line in self._losses.limits]
        if losses:
            return report.loss(losses, failures, size, seconds, [*limit, *checkpoint])
        if failures:
            return report.failure(failures, size, seconds, [*limit, *checkpoint])
        if absent:
            return report.absence(absent, waiting, checkpoint)
        if differences := self._compare_replicas():
            return report.drifted(differences, checkpoint)
        if self._losses.have_all_left:
            return report.left(checkpoint)
        return report.finished(self._listener.summary(), *self._losses.lines)

    def _describe(self, _: dict[str, Any]) -> dict[str, Any]:
        """What ``hocket jobs`` says of this job."""
        workers, progress = self._resizing.workers, self._listener.progress
        return {
            "script": script_name(self._job),
            "workers": sum(member.takes_part for member in workers),
            "joining": sum(not member.takes_part for member in workers),
            "spares": sum(member.role == "spare" and member.is_running for member in self._crew.members),
            "generation": self._listener.generation,
            "epoch": progress and progress.epoch,
            "step": progress and progress.step,
            "steps": progress and progress.steps,
            "seconds": round(time.monotonic() - self._started, 1),
            "pid": os.getpid(),
            "folder": str(Path.cwd()),
        }

    def _resize(self, head: dict[str, Any]) -> dict[str, Any]:
        if self._losses.is_over or self._received:
            raise UsageError("it is about to end")
        hosts = host_list.parse(str(head["hosts"])) if head.get("hosts") is not None else None
        workers = int(head["workers"]) if head.get("workers") is not None else None
        return {"done": self._hosts.resize(workers, hosts)}

    def _compare_replicas(self) -> str:
        """How the workers' parameters differ after the last step, where they must be the same; empty if not at all."""
        told = [m for m in self._crew.members if m.is_worker and m.replicas and m not in self._losses.gone]
        return Replicas.differences([w.replicas for w in told], [w.number for w in told]) if len(told) > 1 else ""

    def _find_absent(self, running: list[CrewMember]) -> list[CrewMember]:
        """The workers that have ended well, but without joining the others, if these wait for them."""
        first = [member for member in self._crew.members if member.is_worker and not member.is_newcomer]
        if not any(worker.stage == "joining" for worker in first if worker in running):
            return []
        return [w for w in first if w.returncode == 0 and w not in running and not w.stage]

    def _reap(self, running: list[CrewMember]) -> list[Ending]:
        """Take note of those that have ended or will; return those that failed."""
        failed = []
        for member in list(running):
            if not member.is_running:
                running.remove(member)
                failed += self._part_with(member, running)
            elif member.stage == "failed" and not (_waits(member) and self._losses.some_have_finished):
                self._failed_at.setdefault(member, time.monotonic())
                if time.monotonic() - self._failed_at[member] > _GRACE:  # it has raised, but does not end
                    member.stage = "reported"
                    failed.append(self._ending(member, member.status))
        return failed

    def _part_with(self, member: CrewMember, running: list[CrewMember]) -> list[Ending]:
        """Take note of one that has ended; its end, if the job cannot go on after it."""
        losses, is_over = self._losses, self._losses.is_over
        go_on: Callable[[CrewMember], None] | None = None
        if member.role == "spare":
            go_on = losses.renew_spare if not is_over else lambda _: None
        elif losses.can_let_go(member):
            go_on = losses.let_go
        elif _waits(member) and not is_over and (member.returncode == 0 or losses.some_have_finished):
            go_on = losses.forget
        elif losses.survives(member, failed_for_another=_waits(member) and self._ending(member, 1).is_collateral):
            go_on = losses.go_on_without
        if go_on is not None:
            member.is_lost = True
            self._output.finish(member)
            go_on(member)
            return []
        self._output.finish(member)
        has_failed = self._has_failed(member, running) or (bool(losses.limits) and member.has_left)
        return [self._ending(member, member.returncode or 0)] if has_failed else []

    def _has_failed(self, member: CrewMember, running: list[CrewMember]) -> bool:
        """Whether ``member``, which has ended, did so badly; servers do at any status while workers need them."""
        if member.returncode is None or member.stage == "reported":
            return False
        is_early = not member.is_worker and not self._losses.is_over and bool(_at_work(running))
        return member.returncode != 0 or is_early

    def _ending(self, member: CrewMember, status: int) -> Ending:
        return Ending(member, status, self._output.traceback(member) or member.words.splitlines())

    def _retire(self, running: list[CrewMember]) -> list[Ending]:
        """Let the servers end, now that no worker needs them; return those that fail at it."""
        self._drop_waiting(running)
        servers = running
        retired = list(servers)
        self._press(servers, signal.SIGTERM, _RETIREMENT)
        self._press(servers, signal.SIGKILL, _KILL)
        good = (None, 0, -signal.SIGTERM, -signal.SIGKILL)
        return [self._ending(server, server.returncode or 0) for server in retired if server.returncode not in good]

    def _stop(self, running: list[CrewMember], asked: int | None, failures: list[Ending]) -> None:
        """End all that still run, politely, then not; add those that fail by themselves to ``failures``."""
        self._drop_waiting(running)
        if asked == signal.SIGTERM and self._gives_notice:
            self._give_notice(running)
        polite = signal.SIGINT if asked == signal.SIGINT else signal.SIGTERM
        if asked is None:
            failures += self._wait(running, 0.3)  # ranks with the same mistake need a moment
        known = {ending.member for ending in failures}
        for member in running:
            if member.stage == "failed" and member not in known:
                failures.append(self._ending(member, member.status))
        self._press(running, polite, _GRACE)
        self._press(running, signal.SIGKILL, _KILL)

    def _drop_waiting(self, running: list[CrewMember]) -> None:
        """End those that only wait to join, which have nothing to lose, and say nothing of it."""
        waiting = [member for member in running if member.role == "spare" or _waits(member)]
        self._losses.gone.update(waiting)
        self._press(waiting, signal.SIGKILL, _KILL)
        running[:] = [member for member in running if member.is_running]

    def _give_notice(self, running: list[CrewMember]) -> None:
        """Let the workers finish their batch and write a checkpoint, if all of them know how to leave in order."""
        workers = _at_work(running)
        if not workers or not all(worker.leaves for worker in workers):
            return
        seconds = float(self._job.setting("notice"))
        line = (
            f"hocket: SIGTERM: the workers have {seconds:g} s to finish their batch and end; another signal ends them "
            "at once"
        )
        interrupts = len(self._received)
        # A signal to all processes of the job has come to them, too, on other hosts as well: another one ends them.
        deadline = time.monotonic() + _HEARD
        while not all(worker.has_notice for worker in workers) and time.monotonic() < deadline:
            self._pump(0.02)
        for worker in workers:
            if not worker.has_notice:
                self._crew.signal(worker, signal.SIGTERM)
        self._listener.say(line)
        self._await_end([*workers], seconds + _GRACE, interrupts)  # they say it themselves when the time is over
        self._is_finished = all(worker.returncode == 0 and not worker.has_left for worker in workers)
        running[:] = [member for member in running if member.is_running]

    def _press(self, running: list[CrewMember], number: signal.Signals, seconds: float) -> None:
        """Send a signal to each, and wait for their end; a signal to the launcher hastens it.

        SIGINT is for workers, whose script may catch it; other processes get SIGTERM in its place. Members that have
        ended are removed from ``running``.
        """
        interrupts = len(self._received)
        for member in running:
            is_quiet = number == signal.SIGINT and not member.is_worker
            self._crew.signal(member, signal.SIGTERM if is_quiet else number)
        self._await_end(running, seconds, math.inf if number == signal.SIGKILL else interrupts)

    def _await_end(self, running: list[CrewMember], seconds: float, interrupts: float) -> None:
        """Wait for the end of each, or until the launcher has got more than ``interrupts`` signals."""
        deadline = time.monotonic() + seconds
        while running and time.monotonic() < deadline and len(self._received) <= interrupts:
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
        while self._crew.notes:
            self._listener.say(f"hocket: {self._crew.notes.pop(0)}")
        self._listener.tick()
        is_ending = any(member.stage in ("failed", "reported") for member in self._crew.members)
        if not is_ending and not self._losses.is_over:  # else which traceback is the cause will be clear at the end
            self._output.release()

    def _take(self, chunks: Iterable[Chunk]) -> None:
        for member, pipe, data in chunks:
            if pipe == "events":
                self._take_events(member, data)
            else:
                self._output.take(member, data, error=pipe == "stderr")

    def _take_events(self, member: CrewMember, data: bytes) -> None:
        for record in member.events.feed(data):
            if isinstance(record, Stage) and record.stage == "on notice":
                member.has_notice = True
            elif isinstance(record, Stage):
                member.stage, member.status, member.words = record.stage, record.status, record.words
                if record.stage == "left":
                    self._losses.follow_another()
                if record.stage == "joined" and not member.has_joined:
                    member.has_joined = True
                    if member.is_newcomer:
                        self._losses.note_joined(member)
            elif isinstance(record, Replicas):
                member.replicas = record.values
            elif isinstance(record, Survival):
                member.survives, member.replaces = member.survives or record.survives, record.replaces
                member.leaves = member.leaves or record.leaves
                self._newcomers.hear_of(record.obstacle)
            else:
                self._listener.take(member, record)


def _at_work(members: Iterable[CrewMember]) -> list[CrewMember]:
    """The workers among them, without newcomers that have not joined."""
    return [member for member in members if member.takes_part]


def _waits(member: CrewMember) -> bool:
    """Whether it is a newcomer that has not joined the others."""
    return member.is_worker and not member.takes_part
