"""Watches over the workers of a job from start to end."""

from __future__ import annotations

import contextlib
import os
import selectors
import signal
import time
from collections.abc import Iterator
from pathlib import Path

from hocket.events import Stage, decode
from hocket.launch import leftovers, report, workers
from hocket.launch.listener import Listener
from hocket.launch.output import Stream
from hocket.launch.report import Ending, Outcome
from hocket.launch.screen import Logs, Screen, open_screen
from hocket.launch.workers import Job, Worker
from hocket.observe.recorder import Recorder

_GRACE = 1.0  # seconds between asking workers to end and killing them
_TICK = 0.25
_DRAIN = 64  # reads of 64 KiB; a pipe holds as much as one


def run(job: Job, log_dir: Path | None, recorder: Recorder | None = None, report_to: Path | None = None) -> int:
    """Run ``job`` to its end; return the exit status for the shell. Afterwards nothing of it is left.

    Args:
        job: What to run.
        log_dir: A folder for each worker's output.
        recorder: Is given what the workers tell and how the job ends, and is finished then.
        report_to: A file for the report of a failure, which then is not shown.
    """
    logs = Logs(log_dir, job.size)
    listener = Listener(recorder)
    guardian = leftovers.Guardian(job.mark)
    leftovers.adopt_orphans()
    try:
        with _signals() as (wakeup, received):
            crew, port = workers.start(job)
            with port, contextlib.closing(open_screen(report_to)) as screen:
                listener.screen = screen
                outcome = _Supervisor(job, crew, screen, logs, listener, wakeup, received).watch()
                listener.finish(outcome)
                screen.report(outcome.lines)  # after anything else that there is to say
                return outcome.status
    except BaseException as error:
        listener.finish(Outcome(1, f"the launcher failed: {error!r}"))
        raise
    finally:
        leftovers.kill(job.mark, spare=guardian.pid)
        listener.remove_unfinished()
        guardian.dismiss()
        logs.close()


class _Supervisor:
    def __init__(
        self,
        job: Job,
        crew: list[Worker],
        screen: Screen,
        logs: Logs,
        listener: Listener,
        wakeup: int,
        received: list[int],
    ) -> None:
        self._job, self._crew, self._screen, self._logs, self._listener = job, crew, screen, logs, listener
        self._received = received
        self._failed_at: dict[int, float] = {}
        self._started = time.monotonic()
        self._selector = selectors.DefaultSelector()
        self._selector.register(wakeup, selectors.EVENT_READ, None)
        self._streams: dict[tuple[int, bool], Stream] = {}
        for worker in crew:
            for error, pipe in ((False, worker.stdout), (True, worker.stderr)):
                self._streams[worker.rank, error] = Stream(holds_tracebacks=error)
                self._selector.register(pipe, selectors.EVENT_READ, (worker, error))
            self._selector.register(worker.events, selectors.EVENT_READ, (worker, None))

    def watch(self) -> Outcome:
        """Until all workers have ended, one has failed, or a signal asks for the end; none is left afterwards."""
        running = list(self._crew)
        failures: list[Ending] = []
        absent: list[int] = []
        while running and not failures and not self._received and not absent:
            self._pump(_TICK)
            failures += self._reap(running)
            absent = self._find_absent(running)
        asked = self._received[0] if self._received else None
        waiting = [worker.rank for worker in running]
        if running:
            self._stop(running, asked, failures)
        leftovers.kill(self._job.mark)
        for worker in self._crew:
            self._drain(worker)
            self._finish(worker)
        self._screen.status("")
        self._screen.close()
        checkpoint = self._listener.last_checkpoint(self._job.settings.get("checkpoint"))
        if asked is not None:
            return report.stopped(asked, checkpoint)
        if failures:
            return report.failure(failures, self._job.size, time.monotonic() - self._started, checkpoint)
        return report.absence(absent, waiting, checkpoint) if absent else report.finished()

    def _find_absent(self, running: list[Worker]) -> list[int]:
        """Ranks that have ended well, but without joining the others, if these wait for them."""
        if not any(worker.stage == "joining" for worker in running):
            return []
        ended = [worker for worker in self._crew if worker.process.returncode == 0]
        return [worker.rank for worker in ended if worker not in running and not worker.stage]

    def _reap(self, running: list[Worker]) -> list[Ending]:
        """Take note of workers that have ended or will; return those that failed."""
        failed = []
        for worker in list(running):
            status = worker.process.poll()
            if status is not None:
                running.remove(worker)
                self._drain(worker)
                self._finish(worker)
                if status != 0:
                    failed.append(Ending(worker.rank, status, self._streams[worker.rank, True].traceback))
            elif worker.stage == "failed":
                self._failed_at.setdefault(worker.rank, time.monotonic())
                if time.monotonic() - self._failed_at[worker.rank] > _GRACE:  # it has raised, but does not end
                    worker.stage = "reported"
                    failed.append(Ending(worker.rank, worker.status, self._streams[worker.rank, True].traceback))
        return failed

    def _stop(self, running: list[Worker], asked: int | None, failures: list[Ending]) -> None:
        """End the workers that still run, politely, then not; add those that fail by themselves to ``failures``."""
        polite = signal.SIGINT if asked == signal.SIGINT else signal.SIGTERM
        if asked is None:
            failures += self._wait(running, 0.3)  # ranks with the same mistake need a moment
        known = {ending.rank for ending in failures}
        for worker in running:
            if worker.stage == "failed" and worker.rank not in known:
                failures.append(Ending(worker.rank, worker.status, self._streams[worker.rank, True].traceback))
        for worker in running:
            worker.process.send_signal(polite)
        interrupts = len(self._received)
        deadline = time.monotonic() + _GRACE
        while running and time.monotonic() < deadline and len(self._received) == interrupts:
            self._pump(0.02)
            for worker in [w for w in running if w.process.poll() is not None]:
                running.remove(worker)
        for worker in running:
            worker.process.kill()
        for worker in running:
            worker.process.wait()

    def _wait(self, running: list[Worker], seconds: float) -> list[Ending]:
        failed: list[Ending] = []
        deadline = time.monotonic() + seconds
        while running and time.monotonic() < deadline and not self._received:
            self._pump(0.02)
            failed += self._reap(running)
        return failed

    def _pump(self, seconds: float) -> None:
        """Show what workers write, for at most ``seconds`` if they write nothing."""
        for key, _ in self._selector.select(seconds):
            self._read(key)
        self._listener.tick()
        if any(worker.stage in ("failed", "reported") for worker in self._crew):
            return  # the job is about to end: which traceback is the cause will be clear then
        for (rank, error), stream in self._streams.items():
            self._show(rank, error, stream.release())

    def _read(self, key: selectors.SelectorKey) -> bool:
        try:
            data = os.read(key.fd, 1 << 16)
        except BlockingIOError:
            return False
        if key.data is None:
            return False
        if not data:
            self._selector.unregister(key.fileobj)
            return False
        worker, error = key.data
        if error is None:
            self._take_events(worker, data)
        else:
            stream = self._streams[worker.rank, error]
            self._show(worker.rank, error, stream.feed(data))
            if worker.rank == 0:
                self._screen.status(stream.status)
        return True

    def _take_events(self, worker: Worker, data: bytes) -> None:
        *lines, worker.events_rest = (worker.events_rest + data).split(b"\n")
        for record in map(decode, lines):
            if isinstance(record, Stage):
                worker.stage, worker.status = record.stage, record.status
            elif record is not None:
                self._listener.take(worker.rank, record)

    def _drain(self, worker: Worker) -> None:
        """Read what an ended worker has left in its pipes; its children may hold them open, and go on writing."""
        for key in [key for key in self._selector.get_map().values() if key.data and key.data[0] is worker]:
            for _ in range(_DRAIN):
                if key.fd not in self._selector.get_map() or not self._read(key):
                    break

    def _finish(self, worker: Worker) -> None:
        """Show the last lines of a worker that has ended; keep back the traceback with which it failed."""
        for error in (False, True):
            stream = self._streams[worker.rank, error]
            self._show(worker.rank, error, stream.finish())
        held = self._streams[worker.rank, True].take_held()
        for line in held:
            self._logs.write(worker.rank, line)
        if worker.process.returncode == 0:
            self._show(worker.rank, True, held, log=False)

    def _show(self, rank: int, error: bool, lines: list[str], *, log: bool = True) -> None:
        for line in lines:
            if log:
                self._logs.write(rank, line)
            self._screen.line(rank, line, error=error)


@contextlib.contextmanager
def _signals() -> Iterator[tuple[int, list[int]]]:
    """Collect the signals that ask for the end, and wake the selector for them and for ended children."""
    reader, writer = os.pipe()
    for descriptor in (reader, writer):
        os.set_blocking(descriptor, False)
    received: list[int] = []
    asks = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
    before = {number: signal.getsignal(number) for number in (*asks, signal.SIGCHLD)}
    for number in asks:
        signal.signal(number, lambda got, _: received.append(got))
    signal.signal(signal.SIGCHLD, lambda *_: None)
    previous = signal.set_wakeup_fd(writer, warn_on_full_buffer=False)
    try:
        yield reader, received
    finally:
        signal.set_wakeup_fd(previous)
        for number, handler in before.items():
            signal.signal(number, handler)
        os.close(reader)
        os.close(writer)
