"""The launcher's hand on one host: starts its part of the job, passes on what that writes, and ends it.

Started as ``ssh HOST python -m hocket.launch.agent``, it talks frames with the launcher over its standard input and
output; ``dialing`` is the other way. It ends with everything of the job when these end, or when the launcher has been
silent for 10 seconds.
"""

from __future__ import annotations

import contextlib
import os
import select
import selectors
import signal
import socket
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from hocket import config
from hocket.errors import JobError
from hocket.lab.doctor.patient import Patient
from hocket.launch import machine, scripts
from hocket.launch.agent_links import SILENCE
from hocket.launch.crew import Chunk, CrewMember
from hocket.launch.environment import HostPart, Job, Ports
from hocket.launch.local_crew import LocalCrew, reserve_port
from hocket.launch.message_pipe import MARKER, Frame, MessagePipe
from hocket.launch.signals import Signals
from hocket.transport import interfaces

_TICK = 0.25
_PING = 1.0
_MOST_PENDING = 4 << 20  # bytes for the launcher beyond which workers have to wait


def main() -> None:
    """Serve one job, at the other end of the standard input and output."""
    with Signals() as signals:
        serve(_take_over_streams(), signals, machine.ssh_address())


def serve(channel: MessagePipe, signals: Signals, address: str | None, secret: bytes = b"") -> int:
    """Serve one job; returns the status for the shell.

    Args:
        channel: Leads to the launcher.
        signals: Collects signals.
        address: The address of this host that has been of use, if that is known.
        secret: The job's secret, if it is known here; else the launcher says it.
    """
    agent = _Agent(channel, signals, secret)
    try:
        channel.send_raw(MARKER)
        channel.send("hello", **machine.describe(), address=address)
        agent.serve()
    finally:
        agent.close()
    return 0 if agent.ended_in_order else 1


def _take_over_streams() -> MessagePipe:
    """The standard input and output become the channel, and nothing that is printed gets in between."""
    channel = MessagePipe(os.dup(0), os.dup(1))
    null = os.open(os.devnull, os.O_RDONLY)
    os.dup2(null, 0)
    os.dup2(2, 1)
    os.close(null)
    return channel


class _Agent:
    def __init__(self, channel: MessagePipe, signals: Signals, secret: bytes) -> None:
        self._channel, self._signals = channel, signals
        self._crew: LocalCrew | None = None
        self._reaching: _Reaching | None = None
        self._secret, self._number, self._name = secret, 0, ""
        self._base = config.environment()
        self._base.pop("PYTHONSAFEPATH", None)  # was meant for the agent
        self._told: set[CrewMember] = set()  # processes whose end the launcher knows
        self._heard = self._pinged = time.monotonic()
        self._is_over = self._has_given_notice = self.ended_in_order = False
        self._later: list[Frame] = []  # processes that are to be started
        self._selector = selectors.DefaultSelector()
        self._selector.register(channel.reader, selectors.EVENT_READ, _nothing)
        self._selector.register(signals.fileno(), selectors.EVENT_READ, signals.drain)
        self._input = _Input(self._selector, lambda: channel.send("input taken"))
        self._patient = Patient(channel, self._selector)
        self._answers: dict[str, Callable[[Frame], None]] = {
            "alive": lambda _: None,
            "clock": lambda frame: channel.send("clock", sent=frame.head["sent"], here=time.perf_counter()),
            "job": self._take_job,
            "check": self._check,
            "listen": self._listen,
            "reach": self._reach,
            "listen no more": self._listen_no_more,
            "reserve": self._reserve,
            "start": self._start,
            "add": self._add,
            "appoint": self._appoint,
            "signal": self._pass_signal,
            "input": lambda frame: self._input.take(frame.body),
            "end": self._end,
            **dict.fromkeys(self._patient.answers, self._ask_patient),
        }

    def serve(self) -> None:
        """Work until the launcher says that all is over, or is gone."""
        while not self._is_over:
            self._pump()
            try:
                for frame in self._channel.receive():
                    self._heard = time.monotonic()
                    self._answers[frame.kind](frame)
            except (JobError, KeyError, TypeError, ValueError) as error:
                self._say_trouble(f"its agent did not understand the launcher: {error!r}")
            except OSError as error:
                self._say_trouble(f"its agent failed: {error}")
            self._heed_signals()
            if time.monotonic() - self._heard > SILENCE:
                print(f"its agent heard nothing of the launcher for {SILENCE:.0f} s", file=sys.stderr, flush=True)
                self._is_over = True
            self._is_over = self._is_over or not self._channel.is_open

    def _heed_signals(self) -> None:
        """The first signal is a notice for this host, of which the launcher makes what it can; one more is the end."""
        received = self._signals.received
        if not received:
            return
        name = signal.Signals(received[0]).name
        if self._crew is None or len(received) > 1 or received[0] == signal.SIGHUP:
            self._say_trouble(f"its agent was ended by {name}")
        elif not self._has_given_notice:
            self._has_given_notice = True
            self._channel.send("notice", signal=name)

    def close(self) -> None:
        """End everything of the job on this host."""
        self._input.close()
        self._patient.close()
        if self._crew is not None:
            self._crew.close()
        if self._reaching is not None:
            self._reaching.close()
        self._flush(1.0)
        self._channel.close()

    def _pump(self) -> None:
        """Pass on what workers write; wait a moment if there is nothing to do."""
        if self._channel.pending > _MOST_PENDING:
            reading = [self._channel.reader, self._signals.fileno()]
            select.select(reading, [self._channel.writer], [], _TICK)
            self._signals.drain()
        elif self._crew is None:
            for key, _ in self._selector.select(_TICK):
                key.data()
        else:
            for chunk in self._crew.read(_TICK):
                self._pass_on(chunk)
            self._tell_ends()
        self._channel.flush()
        self._watch_writer()
        now = time.monotonic()
        if now - self._pinged > _PING and not self._channel.pending:
            self._pinged = now
            self._channel.send("alive")

    def _watch_writer(self) -> None:
        watched = self._channel.writer in self._selector.get_map()
        if self._channel.pending and not watched:
            self._selector.register(self._channel.writer, selectors.EVENT_WRITE, self._channel.flush)
        elif watched and not self._channel.pending:
            self._selector.unregister(self._channel.writer)

    def _pass_on(self, chunk: Chunk) -> None:
        self._channel.send("output", chunk.data, name=chunk.member.name, pipe=chunk.pipe)

    def _tell_ends(self) -> None:
        assert self._crew is not None
        for member in self._crew.members:
            if member.returncode is not None and member not in self._told:
                self._told.add(member)
                self._channel.send("ended", name=member.name, status=member.returncode)

    def _take_job(self, frame: Frame) -> None:
        self._secret, self._number = frame.body or self._secret, int(frame.head["number"])
        self._base.update(frame.head["environment"])

    def _check(self, frame: Frame) -> None:
        self._channel.send("checked", **scripts.look_for(frame.head["folder"], frame.head["command"], self._base))

    def _listen(self, frame: Frame) -> None:
        if self._reaching is None:
            self._reaching = _Reaching(self._secret, self._number)
        self._reaching.listen()
        self._channel.send("listening", **self._reaching.addresses(frame.head["interface"]))

    def _reach(self, frame: Frame) -> None:
        assert self._reaching is not None
        self._channel.send("reached", **self._reaching.reach(frame.head["targets"], frame.head["seconds"]))

    def _listen_no_more(self, _: Frame) -> None:
        if self._reaching is not None:
            self._reaching.stop_listening()
        while self._later:
            self._add(self._later.pop(0))

    def _reserve(self, frame: Frame) -> None:
        assert self._reaching is not None
        self._channel.send("reserved", **self._reaching.reserve(frame.head["address"]))

    def _ask_patient(self, frame: Frame) -> None:
        self._patient.answers[frame.kind](frame, self._secret, self._base)

    def _start(self, frame: Frame) -> None:
        if self._reaching is not None:
            self._reaching.stop_listening()
        head: dict[str, Any] = frame.head
        job = Job(tuple(head["command"]), head["size"], head["settings"], head["mark"], self._secret)
        part = HostPart(**head["part"])
        self._name = part.name
        stdin = self._input.open() if part.count and part.first == 0 else None
        try:
            self._crew = LocalCrew(
                job, self._signals, part=part, ports=Ports(*head["ports"]), base=self._base,
                folder=Path(head["folder"]), stdin=stdin, selector=self._selector,
            )  # fmt: skip
        finally:
            if stdin is not None:
                os.close(stdin)
        for text in self._crew.notes:
            self._channel.send("note", text=text)

    def _add(self, frame: Frame) -> None:
        assert self._crew is not None
        if self._reaching is not None and self._reaching.is_listening:  # no process is started beside a thread
            self._later.append(frame)
            return
        role, size = frame.head["role"], int(frame.head["local_size"])
        member = CrewMember(int(frame.head["number"]), self._name, role, local_size=size, is_newcomer=role == "rank")
        try:
            self._crew.add(member)
        except OSError:  # this host has no room for another process: as if it had been killed at once
            self._channel.send("ended", name=member.name, status=-signal.SIGKILL)

    def _appoint(self, frame: Frame) -> None:
        assert self._crew is not None
        for spare in self._crew.members:
            if spare.name == frame.head["name"] and spare.returncode is None:
                spare.local_size = int(frame.head["local_size"])
                self._crew.appoint(spare, int(frame.head["number"]))
                return

    def _pass_signal(self, frame: Frame) -> None:
        if self._crew is not None:
            for member in self._crew.members:
                if member.name == frame.head["name"] and member.returncode is None:
                    self._crew.signal(member, frame.head["number"])

    def _end(self, _: Frame) -> None:
        if self._crew is not None:
            for chunk in self._crew.end():
                self._pass_on(chunk)
            self._tell_ends()
            self._crew.close()
        self._channel.send("bye")
        self._flush(2.0)
        self._is_over = self.ended_in_order = True

    def _say_trouble(self, text: str) -> None:
        self._channel.send("trouble", text=text)
        self._is_over = True

    def _flush(self, seconds: float) -> None:
        deadline = time.monotonic() + seconds
        while self._channel.pending and time.monotonic() < deadline:
            select.select([], [self._channel.writer], [], 0.1)
            self._channel.flush()


class _Reaching:
    """This host's part in finding out which addresses lead where."""

    def __init__(self, secret: bytes, number: int) -> None:
        self._secret, self._number = secret, number
        self._listener: interfaces.Listener | None = None
        self._reserved: list[socket.socket] = []

    @property
    def is_listening(self) -> bool:
        """Whether a thread listens for others that try addresses."""
        return self._listener is not None

    def listen(self) -> None:
        """Let others try the addresses of this host."""
        if self._listener is None:
            self._listener = interfaces.Listener(self._secret, self._number)

    def addresses(self, interface: str | None) -> dict[str, Any]:
        """The addresses at which this host can perhaps be reached."""
        assert self._listener is not None
        known = list(dict.fromkeys(name for name, _ in interfaces.addresses()))
        return {"addresses": interfaces.addresses(interface), "interfaces": known, "port": self._listener.port}

    def reach(self, targets: list[list[Any]], seconds: float) -> dict[str, Any]:
        """Try all of ``targets`` (number of the host, address, port); those that lead there."""
        wanted = [interfaces.Target(int(number), str(address), int(port)) for number, address, port in targets]
        found = interfaces.try_addresses(wanted, self._secret, seconds)
        return {"found": [[target.number, target.address] for target in found]}

    def reserve(self, address: str) -> dict[str, Any]:
        """Ports on this host for the job (see ``Ports``), kept until ``close``."""
        self._reserved = [reserve_port(address) for _ in Ports._fields]
        return {"ports": [each.getsockname()[1] for each in self._reserved]}

    def stop_listening(self) -> None:
        """Others have tried; the thread has ended then."""
        if self._listener is not None:
            self._listener.close()
            self._listener = None

    def close(self) -> None:
        """Let go of the ports."""
        self.stop_listening()
        for reserved in self._reserved:
            reserved.close()


class _Input:
    """The standard input of rank 0, where the launcher is elsewhere: a pipe that nobody ever blocks on.

    The launcher sends the next piece when rank 0 has taken one.
    """

    def __init__(self, selector: selectors.BaseSelector, taken: Callable[[], None]) -> None:
        """``selector`` calls the ``data`` of what is ready; ``taken`` is called when rank 0 has room for more."""
        self._selector, self._taken = selector, taken
        self._data = b""
        self._writer = -1

    def open(self) -> int:
        """What rank 0 is to read from; the caller closes it when rank 0 has it."""
        reader, self._writer = os.pipe()
        os.set_blocking(self._writer, False)
        return reader

    def take(self, data: bytes) -> None:
        """Pass on ``data``; none is the end of the input."""
        self._data += data
        if self._writer >= 0 and not data:
            self.close()
        elif self._writer >= 0:
            self._write()

    def close(self) -> None:
        """The input ends here."""
        if self._writer >= 0:
            with contextlib.suppress(KeyError):
                self._selector.unregister(self._writer)
            os.close(self._writer)
            self._writer = -1

    def _write(self) -> None:
        try:
            self._data = self._data[os.write(self._writer, self._data) :]
        except BlockingIOError:
            pass
        except OSError:  # rank 0 reads no more
            self.close()
            return
        if self._data:
            if self._writer not in self._selector.get_map():
                self._selector.register(self._writer, selectors.EVENT_WRITE, self._write)
            return
        with contextlib.suppress(KeyError):
            self._selector.unregister(self._writer)
        self._taken()


def _nothing() -> None:
    """Wakes the loop, which then looks for itself."""


if __name__ == "__main__":
    main()
