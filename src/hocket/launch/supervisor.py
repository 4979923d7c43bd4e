"""Watches over the workers of a job from start to end."""

from __future__ import annotations

import contextlib
import os
import selectors
import signal
import time
from collections.abc import Iterator
from pathlib import Path

from hocket.events import decode
from hocket.launch import leftovers, report, workers
from hocket.launch.output import Stream
from hocket.launch.report import Ending
from hocket.launch.screen import Logs, Screen, open_screen
from hocket.launch.workers import Job, Worker

_GRACE = 1.0  # seconds between asking workers to end and killing them
_TICK = 0.25


def run(job: Job, log_dir: Path | None) -> int:
    """Run ``job`` to its end; return the exit status for the shell. Afterwards nothing of it is left."""
    logs = Logs(log_dir, job.size)
    guardian = leftovers.Guardian(job.mark)
    try:
        with _signals() as (wakeup, received):
            crew, port = workers.start(job)
            with port, contextlib.closing(open_screen()) as screen:
                return _Supervisor(job, crew, screen, logs, wakeup, received).watch()
    finally:
        leftovers.kill(job.mark)
        guardian.dismiss()
        logs.close()


class _Supervisor:
    def __init__(
        self, job: Job, crew: list[Worker], screen: Screen, logs: Logs, wakeup: int, received: list[int]
    ) -> None:
        self._job, self._crew, self._screen, self._logs = job, crew, screen, logs
        self._received = received
        self._started = time.monotonic()
        self._selector = selectors.DefaultSelector()
        self._selector.register(wakeup, selectors.EVENT_READ, None)
        self._streams: dict[tuple[int, bool], Stream] = {}
        self._events_rest = b""
        for worker in crew:
            for error, pipe in ((False, worker.stdout), (True, worker.stderr)):
                self._streams[worker.rank, error] = Stream(holds_tracebacks=error)
                self._selector.register(pipe, selectors.EVENT_READ, (worker, error))
            if worker.events is not None:
                self._selector.register(worker.events, selectors.EVENT_READ, (worker, None))

    def watch(self) -> int:
        """Until all workers have ended, one has failed, or a signal asks for the end."""
        running = list(self._crew)
        failures: list[Ending] = []
        while running and not failures and not self._received:
            self._pump(_TICK)
            failures += self._reap(running)
        asked = self._received[0] if self._received else None
        if running:
            failures += self._stop(running, asked)
        leftovers.kill(self._job.mark)
        self._drain()
        for worker in self._crew:
            self._finish(worker)
        self._screen.status("")
        if asked is not None:
            self._screen.close()
            self._screen.say(f"hocket: ended by {signal.Signals(asked).name}")
            return 128 + asked
        if not failures:
            return 0
        cause = report.choose_cause(failures)
        self._screen.close()
        for line in report.write(cause, failures, self._job.size, time.monotonic() - self._started):
            self._screen.say(line)
        return cause.exit_status

    def _reap(self, running: list[Worker]) -> list[Ending]:
        """Take note of workers that have ended; return those that failed."""
        failed = []
        for worker in list(running):
            status = worker.process.poll()
            if status is not None:
                running.remove(worker)
                self._drain()
                traceback = self._finish(worker)
                if status != 0:
                    failed.append(Ending(worker.rank, status, traceback))
        return failed

    def _stop(self, running: list[Worker], asked: int | None) -> list[Ending]:
        """End the workers that still run: politely, then not. Those that fail by themselves meanwhile are returned."""
        polite = signal.SIGINT if asked == signal.SIGINT else signal.SIGTERM
        failed = [] if asked else self._wait(running, 0.3)  # ranks with the same mistake need a moment
        for worker in running:
            worker.process.send_signal(polite)
        interrupts = len(self._received)
        deadline = time.monotonic() + _GRACE
        while running and time.monotonic() < deadline and len(self._received) == interrupts:
            self._pump(0.02)
            self._reap(running)
        for worker in running:
            worker.process.kill()
        for worker in running:
            worker.process.wait()
        return failed

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
            *lines, self._events_rest = (self._events_rest + data).split(b"\n")
            for record in filter(None, map(decode, lines)):
                self._screen.progress(record)
        else:
            stream = self._streams[worker.rank, error]
            self._show(worker.rank, error, stream.feed(data))
            if worker.rank == 0:
                self._screen.status(stream.status)
        return True

    def _drain(self) -> None:
        """Read what is in the pipes now; data-loader processes may keep them open, so not until their end."""
        for key in list(self._selector.get_map().values()):
            while key.fd in self._selector.get_map() and self._read(key):
                pass

    def _finish(self, worker: Worker) -> list[str]:
        """Show the last lines of a worker that has ended; return its traceback if that is why."""
        traceback: list[str] = []
        for error in (False, True):
            shown, held = self._streams[worker.rank, error].finish()
            self._show(worker.rank, error, shown)
            traceback += held
        for line in traceback:
            self._logs.write(worker.rank, line)
        if worker.process.returncode == 0:
            self._show(worker.rank, True, traceback, log=False)
        return traceback

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
