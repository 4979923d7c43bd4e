"""How the processes of a job are started on this host: fresh interpreters, their pipes, and their end."""

from __future__ import annotations

import contextlib
import itertools
import os
import selectors
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path

from hocket import config
from hocket.launch import guardian, leftovers, mps
from hocket.launch.crew import Chunk, Crew, CrewMember, Loss, Pipe, Room
from hocket.launch.environment import HostPart, Job, Ports, local_size, members, variables
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

    refusal = ""

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
        self.notes: list[str] = []
        self._mark = job.mark if part is None else part.mark(job)
        self._processes: dict[CrewMember, subprocess.Popen[bytes]] = {}
        self._events: dict[CrewMember, int] = {}
        self._orders: dict[CrewMember, int] = {}  # where spares read from which number they get
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
        self._job, self._part, self._ports, self._base, self._folder = job, part, ports, base, folder
        self._stdin = stdin
        self._mps: mps.Mps | None = None
        self._arrange = leftovers.die_with_parent()
        try:
            if job.setting("share-gpus") == "on" and (part is None or part.slots):
                goes_on = job.setting("on-loss") in ("continue", "replace")
                self._mps = (
                    mps.without("a worker that is killed would take the others along")
                    if goes_on
                    else mps.begin(self._mark, base or config.environment(), self._guardian.protect_mps)
                )
                self.notes.append(self._mps.line)
            for member in members(job, part):
                self.add(member)
        except BaseException:
            self.close()
            raise

    def add(self, member: CrewMember) -> None:
        is_scripted = member.is_worker or member.role == "spare"
        command = list(self._job.command) if is_scripted else ["-m", MODULES[member.role], self._script_folder()]
        reads = member.is_worker and member.number == 0 and not member.is_newcomer
        if member.is_worker:
            member.local_rank = self._free_local_rank(member.number)
        env = variables(self._job, member, self._ports, self._part, self._base)
        env.update(self._mps.variables if self._mps is not None else {})
        self._start(member, command, env, self._stdin if reads else subprocess.DEVNULL)

    def appoint(self, spare: CrewMember, number: int) -> None:
        spare.local_rank = self._free_local_rank(number)
        spare.role, spare.number, spare.is_newcomer, spare.began = "rank", number, True, time.monotonic()
        told = (number, spare.local_rank, local_size(self._job, spare, self._part))
        order = self._orders.pop(spare)
        with contextlib.suppress(BrokenPipeError):  # it has just ended, which is noticed as that of any worker
            os.write(order, f"{' '.join(map(str, told))}\n".encode())
        os.close(order)

    def rooms(self) -> list[Room]:
        return [Room(self.members[0].host, None)]

    def watch(self, descriptor: int, action: Callable[[], None]) -> None:
        self._selector.register(descriptor, selectors.EVENT_READ, action)

    def unwatch(self, descriptor: int) -> None:
        self._selector.unregister(descriptor)

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
            self._let_go(member)

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
        of_mps = mps.processes(self._mark) if self._mps is not None else []
        leftovers.kill(self._mark, spare={self._guardian.pid, *self._strangers, *of_mps})
        if self._mps is not None and self._mps.folder:
            mps.end(self._mark, self._mps.folder)
        self._guardian.dismiss()
        for member in self.members:
            for key in self._keys(member):
                self._selector.unregister(key.fd)
        for reserved in self._reserved:
            reserved.close()
        for member, process in self._processes.items():
            self._close_pipes(member)
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(1)
        if self._owns_selector:
            self._selector.close()

    def _free_local_rank(self, number: int) -> int:
        """What the worker ``number`` had at the start, if it was on this host and that is free, or another number."""
        taken = {member.local_rank for member in self.members if member.is_worker and member.returncode is None}
        first, count = (0, None) if self._part is None else (self._part.first, self._part.count)
        own = number - first
        if own >= 0 and (count is None or own < count) and own not in taken:
            return own
        return next(free for free in itertools.count() if free not in taken)

    def _start(self, member: CrewMember, command: list[str], env: dict[str, str], stdin: int | None) -> None:
        with contextlib.ExitStack() as ours:

            def pipe() -> tuple[int, int]:
                reader, writer = os.pipe()
                ours.callback(os.close, reader)
                ours.callback(os.close, writer)
                return reader, writer

            (events, told), (secret, whispered) = pipe(), pipe()
            os.write(whispered, self._job.secret)
            given = {"HOCKET_EVENTS": told, "HOCKET_SECRET_FD": secret, "HOCKET_LEDGER": self._guardian.ledger}
            if member.role == "spare":
                given["HOCKET_SPARE_FD"], order = pipe()
            process = subprocess.Popen(
                [sys.executable, *command],
                env=env | {name: str(descriptor) for name, descriptor in given.items()},
                cwd=self._folder,
                stdin=stdin,
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
                pass_fds=given.values(),
                start_new_session=True,
                preexec_fn=self._arrange,  # noqa: PLW1509 - the launcher has one thread
                bufsize=0,
            )
            self.members.append(member)
            self._processes[member] = process
            self._events[member] = os.dup(events)
            if member.role == "spare":
                self._orders[member] = os.dup(order)
        assert process.stdout is not None and process.stderr is not None
        pipes: tuple[tuple[int, Pipe], ...] = (
            (process.stdout.fileno(), "stdout"), (process.stderr.fileno(), "stderr"), (self._events[member], "events")
        )  # fmt: skip
        for descriptor, name in pipes:
            os.set_blocking(descriptor, False)
            self._selector.register(descriptor, selectors.EVENT_READ, (member, name))

    def _let_go(self, member: CrewMember) -> None:
        """Close the pipes of a process that has ended, unless its children hold them open."""
        if not self._keys(member):
            self._close_pipes(member)

    def _close_pipes(self, member: CrewMember) -> None:
        for kept in (self._events, self._orders):
            if (descriptor := kept.pop(member, None)) is not None:
                os.close(descriptor)
        process = self._processes[member]
        for pipe in (process.stdout, process.stderr):
            assert pipe is not None
            pipe.close()

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

    def _script_folder(self) -> str:
        """Where the script is, from which a server may have to import what workers name; empty for a module."""
        if self._job.command[0] == "-m":
            return ""
        return str(Path(self._folder or Path.cwd(), self._job.command[0]).parent)
