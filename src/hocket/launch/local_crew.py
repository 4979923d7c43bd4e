"""How the processes of a job are started on this host: fresh interpreters, their pipes, and their end."""

from __future__ import annotations

import contextlib
import os
import selectors
import signal
import socket
import subprocess
import sys
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path

from hocket.launch import guardian, leftovers
from hocket.launch.crew import Chunk, Crew, CrewMember, Loss, Pipe
from hocket.launch.environment import HostPart, Job, Ports, members, variables
from hocket.launch.signals import Signals

MODULES = {"server": "hocket.server", "coordinator": "hocket.coordinator"}  # what runs instead of the script, by role
_DRAIN = 64  # reads of 64 KiB; a pipe holds as much as one


def reserve_port(address: str = "") -> socket.socket:
    """Bind a free port without listening: nobody else is given it, and a worker may still listen on it."""
    reserved = socket.socket(socket.AF_INET6 if ":" in address else socket.AF_INET)
    reserved.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    reserved.bind(("", 0))
    return reserved


class LocalCrew(Crew):
    """Processes of a job that are children of this one, which also ends what they leave behind."""

    def __init__(
        self,
        job: Job,
        signals: Signals,
        *,
        part: HostPart | None = None,
        ports: Ports | None = None,
        base: Mapping[str, str] | None = None,
        folder: Path | None = None,
        stdin: int | None = None,
        selector: selectors.BaseSelector | None = None,
    ) -> None:
        """Start all of them at once.

        Args:
            job: What to start.
            signals: The signals that wake ``read``.
            part: What this host has of a job over several; without it the whole job is here.
            ports: The TCP ports of the job; without them, ports are reserved here.
            base: The environment to begin with, instead of that of this process.
            folder: The working folder of the processes, instead of that of this one.
            stdin: A descriptor for rank 0 to read from, instead of the standard input of this process.
            selector: ``read`` waits with it, and calls the ``data`` of whatever else is ready there.
        """
        self.losses: list[Loss] = []
        self.members: list[CrewMember] = []
        self._mark = job.mark if part is None else part.mark(job)
        self._processes: dict[CrewMember, subprocess.Popen[bytes]] = {}
        self._events: list[int] = []
        self._is_closed = False
        self._selector = selector or selectors.DefaultSelector()
        self._owns_selector = selector is None
        if selector is None:
            self._selector.register(signals.fileno(), selectors.EVENT_READ, signals.drain)
        self._strangers = leftovers.children()  # bash makes the reader of `2> >(tee log)` a child of the launcher
        self._guardian = guardian.guard(self._mark)
        leftovers.adopt_orphans()
        self._reserved = [] if ports is not None else [reserve_port(), reserve_port()]
        ports = ports or Ports(*(each.getsockname()[1] for each in self._reserved))
        arrange = leftovers.die_with_parent()
        try:
            for member in members(job, part):
                if member.is_worker:
                    command, given = list(job.command), stdin if member.number == 0 else subprocess.DEVNULL
                else:
                    command, given = ["-m", MODULES[member.role], _folder_of(job, folder)], subprocess.DEVNULL
                env = variables(job, member, ports, part, base)
                self._start(member, job.secret, command, env, folder, given, arrange)
        except BaseException:
            self.close()
            raise

    def read(self, seconds: float) -> Iterator[Chunk]:
        for key, _ in self._selector.select(seconds):
            if callable(key.data):
                key.data()
            else:
                yield from self._read(key)
        running = {member: process for member, process in self._processes.items() if member.returncode is None}
        ended = {member: status for member, process in running.items() if (status := process.poll()) is not None}
        for member in running if ended else ():  # what others told before an end is heard before it
            for key in self._keys(member):
                yield from self._read(key)
        for member, status in ended.items():
            if status < 0:  # killed: its data-loader processes would not notice for seconds
                leftovers.kill_session(self._mark, running[member].pid)
            yield from self._drain(member)
            member.returncode = status

    def signal(self, member: CrewMember, number: int) -> None:
        if member.returncode is None:
            self._processes[member].send_signal(number)

    def end(self) -> Iterator[Chunk]:
        for member in self.members:
            self.signal(member, signal.SIGKILL)
        leftovers.kill(self._mark)
        yield from self.read(0)
        for member in self.members:
            yield from self._drain(member)

    def close(self) -> None:
        if self._is_closed:
            return
        self._is_closed = True
        leftovers.kill(self._mark, spare={self._guardian.pid, *self._strangers})
        self._guardian.dismiss()
        for member in self.members:
            for key in self._keys(member):
                self._selector.unregister(key.fd)
        for reserved in self._reserved:
            reserved.close()
        for descriptor in self._events:
            os.close(descriptor)
        for process in self._processes.values():
            for pipe in (process.stdout, process.stderr):
                assert pipe is not None
                pipe.close()
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(1)
        if self._owns_selector:
            self._selector.close()

    def _start(
        self,
        member: CrewMember,
        key: bytes,
        command: list[str],
        env: dict[str, str],
        folder: Path | None,
        stdin: int | None,
        arrange: Callable[[], None],
    ) -> None:
        self.members.append(member)
        reader, writer = os.pipe()
        secret, given = os.pipe()
        os.write(given, key)
        os.close(given)
        ledger = self._guardian.ledger
        env.update(HOCKET_EVENTS=str(writer), HOCKET_SECRET_FD=str(secret), HOCKET_LEDGER=str(ledger))
        process = subprocess.Popen(
            [sys.executable, *command],
            env=env,
            cwd=folder,
            stdin=stdin,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            pass_fds=(writer, secret, ledger),
            start_new_session=True,
            preexec_fn=arrange,  # noqa: PLW1509 - the launcher has one thread
            bufsize=0,
        )
        os.close(writer)
        os.close(secret)
        assert process.stdout is not None and process.stderr is not None
        self._processes[member] = process
        self._events.append(reader)
        pipes: tuple[tuple[int, Pipe], ...] = (
            (process.stdout.fileno(), "stdout"), (process.stderr.fileno(), "stderr"), (reader, "events")
        )  # fmt: skip
        for descriptor, name in pipes:
            os.set_blocking(descriptor, False)
            self._selector.register(descriptor, selectors.EVENT_READ, (member, name))

    def _read(self, key: selectors.SelectorKey) -> list[Chunk]:
        """What there is to read now, at most 64 KiB."""
        try:
            data = os.read(key.fd, 1 << 16)
        except BlockingIOError:
            return []
        if not data:
            self._selector.unregister(key.fd)
            return []
        member, pipe = key.data
        return [Chunk(member, pipe, data)]

    def _drain(self, member: CrewMember) -> Iterator[Chunk]:
        """What an ended process has left in its pipes; its children may hold them open, and go on writing."""
        for key in self._keys(member):
            for _ in range(_DRAIN):
                chunks = self._read(key)
                if not chunks:
                    break
                yield from chunks

    def _keys(self, member: CrewMember) -> list[selectors.SelectorKey]:
        keys = self._selector.get_map().values()
        return [key for key in keys if not callable(key.data) and key.data[0] is member]


def _folder_of(job: Job, folder: Path | None) -> str:
    """Where the script is, from which a server may have to import what workers name; empty for a module."""
    if job.command[0] == "-m":
        return ""
    return str(Path(folder or Path.cwd(), job.command[0]).parent)
