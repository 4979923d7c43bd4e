"""The socket of a running job, at which other commands of its user ask about it: ``hocket jobs``, ``hocket resize``.

It has a name in the kernel's own list (an abstract Unix socket), so there is no file that could be left behind. Both
ends ask the kernel for the user of the other one, and believe nobody else.
"""

from __future__ import annotations

import contextlib
import functools
import os
import select
import socket
import struct
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

from hocket.errors import JobError, UsageError
from hocket.launch.crew import Crew
from hocket.launch.message_pipe import MessagePipe

_PREFIX = "hocket-job"
_LIST = Path("/proc/net/unix")
_SHORTEST = 6  # characters of a job's mark that are its id, unless another job has the same
_MOST = 8  # who may ask at once
_PATIENCE = 5.0  # seconds that a launcher has to answer; whoever reads its output may hold it up

Answers = dict[str, Callable[[dict[str, Any]], dict[str, Any]]]


class JobName(NamedTuple):
    """What a job is called: the number of its user, and its id."""

    user: int
    id: str

    @property
    def address(self) -> str:
        return f"\0{_PREFIX}-{self.user}-{self.id}"


class JobSocket:
    """The launcher's end: answers within ``Crew.read``, and never waits for whoever asks.

    Attributes:
        name: What the job is called; None where the system has no such sockets.
    """

    def __init__(self, mark: str, crew: Crew, answers: Answers) -> None:
        """``answers`` gives, by the kind of the question, what makes an answer of its head; UsageError refuses."""
        self._crew, self._answers = crew, answers
        self._asking: list[MessagePipe] = []
        self.name, self._listener = _listen(mark)
        if self._listener is not None:
            crew.watch(self._listener.fileno(), self._accept)

    def close(self) -> None:
        """Nobody can ask any more."""
        for channel in list(self._asking):
            self._drop(channel)
        if self._listener is not None:
            self._crew.unwatch(self._listener.fileno())
            self._listener.close()
            self._listener = None

    def _accept(self) -> None:
        assert self._listener is not None
        with contextlib.suppress(OSError):
            connection, _ = self._listener.accept()
            with connection:
                if _user(connection) not in (os.geteuid(), 0):
                    return
                while len(self._asking) >= _MOST:
                    self._drop(self._asking[0])
                descriptor = os.dup(connection.fileno())
            channel = MessagePipe(descriptor, descriptor)
            self._asking.append(channel)
            self._crew.watch(descriptor, functools.partial(self._hear, channel))

    def _hear(self, channel: MessagePipe) -> None:
        if channel not in self._asking:  # dropped a moment ago, for somebody else
            return
        try:
            for frame in channel.receive():
                channel.send("answer", **self._answer(frame.kind, frame.head))
                channel.is_open = False  # one question each
        except JobError:
            pass
        if not channel.is_open:
            self._drop(channel)

    def _answer(self, kind: str, head: dict[str, Any]) -> dict[str, Any]:
        try:
            return self._answers[kind](head)
        except UsageError as error:
            return {"refused": str(error)}
        except (KeyError, TypeError, ValueError):
            return {
                "refused": "the launcher of this job does not know this command: it is of another version of Hocket"
            }

    def _drop(self, channel: MessagePipe) -> None:
        self._asking.remove(channel)
        self._crew.unwatch(channel.reader)
        channel.close()


def running() -> list[JobName]:
    """The jobs that run on this machine, of all users."""
    found = []
    with contextlib.suppress(OSError):
        for line in _LIST.read_text(errors="replace").splitlines():
            name = line.split(" ")[-1].removeprefix("@").split("-")
            if "-".join(name[:2]) == _PREFIX and len(name) == 4 and name[2].isdecimal():
                found.append(JobName(int(name[2]), name[3]))
    return sorted(set(found))


def find(part: str) -> JobName:
    """The running job of this user whose id begins with ``part``."""
    jobs = running()
    matching = [name for name in jobs if name.id.startswith(part)]
    own = [name for name in matching if name.user == os.geteuid()]
    if len(own) == 1:
        return own[0]
    if own:
        raise UsageError(f"{len(own)} jobs have an id that begins with {part!r}: {', '.join(name.id for name in own)}")
    if matching:
        raise UsageError(f"job {matching[0].id} is of another user ({matching[0].user}), who alone can change it")
    raise UsageError(f"no job {part!r} runs on this machine: hocket jobs lists those that do")


def ask(name: JobName, kind: str, **head: Any) -> dict[str, Any]:
    """Ask the launcher of a job something, and wait for the answer.

    Raises:
        UsageError: it refuses, is gone, does not answer in time, or is of another user.
    """
    with contextlib.closing(_connect(name)) as channel:
        channel.send(kind, **head)
        deadline = time.monotonic() + _PATIENCE
        while channel.is_open and (left := deadline - time.monotonic()) > 0:
            select.select([channel.reader], [], [], left)
            for frame in channel.receive():
                if "refused" in frame.head:
                    raise UsageError(f"job {name.id}: {frame.head['refused']}")
                return frame.head
        reason = "does not answer: something may hold up its output" if channel.is_open else "has just ended"
        raise UsageError(f"job {name.id} {reason}")


def _connect(name: JobName) -> MessagePipe:
    with socket.socket(socket.AF_UNIX) as connection:
        connection.settimeout(_PATIENCE)
        try:
            connection.connect(name.address)
            if _user(connection) != os.geteuid():
                raise UsageError(f"job {name.id} is of another user, who alone can change it")
        except OSError:
            raise UsageError(f"job {name.id} has just ended") from None
        descriptor = os.dup(connection.fileno())
    return MessagePipe(descriptor, descriptor)


def _user(connection: socket.socket) -> int:
    """The user at the other end."""
    told = connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, struct.calcsize("3i"))
    return int(struct.unpack("3i", told)[1])


def _listen(mark: str) -> tuple[JobName | None, socket.socket | None]:
    for length in range(_SHORTEST, len(mark) + 1):
        name = JobName(os.geteuid(), mark[:length])
        listener = socket.socket(socket.AF_UNIX)
        try:
            listener.bind(name.address)
            listener.listen(_MOST)
            listener.setblocking(False)
        except OSError:
            listener.close()
            continue
        return name, listener
    return None, None
