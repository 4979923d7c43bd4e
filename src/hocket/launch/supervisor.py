"""Watches over the workers of a job from start to end, wherever they run."""

from __future__ import annotations

import contextlib
import signal
import time
from collections.abc import Callable, Iterable
from pathlib import Path

from hocket.events import Stage, decode
from hocket.launch import report
from hocket.launch.crew import Chunk, Crew, Worker
from hocket.launch.environment import Job
from hocket.launch.listener import Listener
from hocket.launch.local import LocalCrew
from hocket.launch.output import Stream
from hocket.launch.report import Ending, Outcome
from hocket.launch.screen import Logs, Screen, open_screen
from hocket.launch.signals import Signals
from hocket.observe.recorder import Recorder

_GRACE = 1.0  # seconds between asking workers to end and killing them
_KILL = 3.0  # seconds that killed ones have to be gone; other hosts may not answer
_TICK = 0.25


def run(
    job: Job,
    log_dir: Path | None,
    recorder: Recorder | None = None,
    report_to: Path | None = None,
    start: Callable[[Job, Signals], Crew] = LocalCrew,
    signals: Signals | None = None,
) -> int:
    """Run ``job`` to its end; return the exit status for the shell. Afterwards nothing of it is left.

    Args:
        job: What to run.
        log_dir: A folder for each worker's output.
        recorder: Is given what the workers tell and how the job ends, and is finished then.
        report_to: A file for the report of a failure, which then is not shown.
        start: Starts the workers.
        signals: Collects signals already; if nobody does, they are collected from here on.
    """
    logs = Logs(log_dir, job.size)
    listener = Listener(recorder)
    try:
        with (
            signals or Signals() as collected,
            contextlib.closing(start(job, collected)) as crew,
            contextlib.closing(open_screen(report_to)) as screen,
        ):
            listener.screen = screen
            outcome = _Supervisor(job, crew, screen, logs, listener, collected.received).watch()
            listener.finish(outcome)
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
        self._job, self._crew, self._screen, self._logs, self._listener = job, crew, screen, logs, listener
        self._received = received
        self._failed_at: dict[int, float] = {}
        self._started = time.monotonic()
        self._streams = {
            (worker.rank, error): Stream(holds_tracebacks=error) for worker in crew.workers for error in (False, True)
        }

    def watch(self) -> Outcome:
        """Until all workers have ended, one has failed, or a signal asks for the end; none is left afterwards."""
        running = list(self._crew.workers)
        failures: list[Ending] = []
        absent: list[Worker] = []
        while running and not failures and not self._received and not absent and not self._crew.losses:
            self._pump(_TICK)
            failures += self._reap(running)
            absent = self._find_absent(running)
        asked = self._received[0] if self._received else None
        waiting = list(running)
        if running:
            self._stop(running, asked, failures)
        self._take(self._crew.end())
        for worker in self._crew.workers:
            self._finish(worker)
        self._screen.status("")
        self._screen.close()
        checkpoint = self._listener.last_checkpoint(self._job.settings.get("checkpoint"))
        seconds = time.monotonic() - self._started
        if asked is not None:
            return report.stopped(asked, checkpoint)
        if self._crew.losses:
            return report.loss(self._crew.losses, failures, self._job.size, seconds, checkpoint)
        if failures:
            return report.failure(failures, self._job.size, seconds, checkpoint)
        return report.absence(absent, waiting, checkpoint) if absent else report.finished(self._listener.summary())

    def _find_absent(self, running: list[Worker]) -> list[Worker]:
        """Those who have ended well, but without joining the others, if these wait for them."""
        if not any(worker.stage == "joining" for worker in running):
            return []
        return [w for w in self._crew.workers if w.returncode == 0 and w not in running and not w.stage]

    def _reap(self, running: list[Worker]) -> list[Ending]:
        """Take note of workers that have ended or will; return those that failed."""
        failed = []
        for worker in list(running):
            if not worker.is_running:
                running.remove(worker)
                self._finish(worker)
                if worker.returncode and worker.stage != "reported":
                    failed.append(self._ending(worker, worker.returncode))
            elif worker.stage == "failed":
                self._failed_at.setdefault(worker.rank, time.monotonic())
                if time.monotonic() - self._failed_at[worker.rank] > _GRACE:  # it has raised, but does not end
                    worker.stage = "reported"
                    failed.append(self._ending(worker, worker.status))
        return failed

    def _ending(self, worker: Worker, status: int) -> Ending:
        return Ending(worker.rank, worker.host, status, self._streams[worker.rank, True].traceback)

    def _stop(self, running: list[Worker], asked: int | None, failures: list[Ending]) -> None:
        """End the workers that still run, politely, then not; add those that fail by themselves to ``failures``."""
        polite = signal.SIGINT if asked == signal.SIGINT else signal.SIGTERM
        if asked is None:
            failures += self._wait(running, 0.3)  # ranks with the same mistake need a moment
        known = {ending.rank for ending in failures}
        for worker in running:
            if worker.stage == "failed" and worker.rank not in known:
                failures.append(self._ending(worker, worker.status))
        interrupts = len(self._received)
        for number, seconds in ((polite, _GRACE), (signal.SIGKILL, _KILL)):
            for worker in running:
                self._crew.signal(worker, number)
            deadline = time.monotonic() + seconds
            while running and time.monotonic() < deadline:
                if number != signal.SIGKILL and len(self._received) > interrupts:
                    break
                self._pump(0.02)
                running[:] = [worker for worker in running if worker.is_running]

    def _wait(self, running: list[Worker], seconds: float) -> list[Ending]:
        failed: list[Ending] = []
        deadline = time.monotonic() + seconds
        while running and time.monotonic() < deadline and not self._received:
            self._pump(0.02)
            failed += self._reap(running)
        return failed

    def _pump(self, seconds: float) -> None:
        """Show what workers write, for at most ``seconds`` if they write nothing."""
        self._take(self._crew.read(seconds))
        self._listener.tick()
        if any(worker.stage in ("failed", "reported") for worker in self._crew.workers):
            return  # the job is about to end: which traceback is the cause will be clear then
        for (rank, error), stream in self._streams.items():
            self._show(rank, error, stream.release())

    def _take(self, chunks: Iterable[Chunk]) -> None:
        for worker, pipe, data in chunks:
            if pipe == "events":
                self._take_events(worker, data)
                continue
            stream = self._streams[worker.rank, pipe == "stderr"]
            self._show(worker.rank, pipe == "stderr", stream.feed(data))
            if worker.rank == 0:
                self._screen.status(stream.status)

    def _take_events(self, worker: Worker, data: bytes) -> None:
        *lines, worker.events_rest = (worker.events_rest + data).split(b"\n")
        for record in map(decode, lines):
            if isinstance(record, Stage):
                worker.stage, worker.status = record.stage, record.status
            elif record is not None:
                self._listener.take(worker.rank, record)

    def _finish(self, worker: Worker) -> None:
        """Show the last lines of a worker that has ended; keep back the traceback with which it failed."""
        for error in (False, True):
            stream = self._streams[worker.rank, error]
            self._show(worker.rank, error, stream.finish())
        held = self._streams[worker.rank, True].take_held()
        for line in held:
            self._logs.write(worker.rank, line)
        if worker.returncode == 0 or worker.is_lost:
            self._show(worker.rank, True, held, log=False)

    def _show(self, rank: int, error: bool, lines: list[str], *, log: bool = True) -> None:
        for line in lines:
            if log:
                self._logs.write(rank, line)
            self._screen.line(rank, line, error=error)
