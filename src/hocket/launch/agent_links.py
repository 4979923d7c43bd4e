"""The agents of a job as the launcher sees them: the processes that lead to them, what they say, and what ssh says."""

from __future__ import annotations

import contextlib
import os
import selectors
import subprocess
import sys
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from typing import Any, TypeVar

from hocket.errors import JobError, UsageError
from hocket.launch import leftovers, message_pipe
from hocket.launch.host_list import Host
from hocket.launch.interview import Answers, Interview, Question, Talk
from hocket.launch.message_pipe import Frame, MessagePipe
from hocket.launch.reception import Reception
from hocket.launch.signals import Signals
from hocket.observe.timeline import HostClock

SILENCE = 10.0  # seconds without a word after which the other end counts as lost
_PING = 1.0
_CLOCKS = 5
_MOST_NOISE = 1 << 16  # bytes that a login may print
_WORDS = 40  # lines of ssh's that are kept
_PATIENCE = 3.0  # seconds of silence after which an end is not waited for
T = TypeVar("T")


def here() -> list[str]:
    """The command of an agent on this machine; modules that lie in the folder are none of the agent's."""
    return [sys.executable, "-P", "-m", "hocket.launch.agent"]


def said(words: Sequence[str]) -> str:
    """The last of these lines in brackets, if there are any."""
    lines = [word.strip() for word in words if word.strip()]
    return f" ({' / '.join(lines[-3:])})" if lines else ""


class AgentLink:
    """The connection to one host: to a process that leads to its agent, or to an agent that has dialed.

    Args:
        host: The host.
        number: Its number in the job.
        command: Leads to the agent; without one, the agent dials.

    Attributes:
        host: The host.
        number: The number of the host in the job.
        hello: What the agent has told of its host; empty until it has.
        clock: Seconds by which the host's clock is ahead of this one's.
        monotonic: The lead of the host's monotonic clock, if that was asked for; see ``AgentLinks.compare_clocks``.
        silent: Seconds for which the agent has said nothing while it was listened to.
        words: The last lines that ssh, the shell or the agent wrote to their standard error.
        trouble: Why nothing more comes; empty while all is well.
        is_done: Whether it has said that its part is over.
        channel: What is said; to an agent that has not dialed yet, it waits.
        stderr: The descriptor of what the process writes to its standard error; -1 if there is none.
    """

    def __init__(self, host: Host, number: int, command: Sequence[str] = ()) -> None:
        self.host, self.number = host, number
        self.hello: dict[str, Any] = {}
        self.clock = 0.0
        self.monotonic = HostClock()
        self.silent = 0.0
        self.words: deque[str] = deque(maxlen=_WORDS)
        self.trouble = ""
        self.is_done = False
        self._noise = bytearray()  # what came before the marker
        self._has_begun = False
        self._rest = b""
        self._process: subprocess.Popen[bytes] | None = None
        self.stderr, self.channel = -1, MessagePipe()
        if command:
            self._lead(command)

    def _lead(self, command: Sequence[str]) -> None:
        try:
            process = self._process = subprocess.Popen(
                command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE, bufsize=0,
                start_new_session=True,
                # An agent on this machine is better off cleaning up when its input ends.
                preexec_fn=None if self.host.is_here else leftovers.die_with_parent(),  # noqa: PLW1509 - one thread
            )  # fmt: skip
        except OSError as error:
            reason = f"{command[0]} cannot be started ({error.strerror})"
            raise UsageError(f"{reason}: name the ssh command with --ssh") from None
        assert process.stdin is not None and process.stdout is not None and process.stderr is not None
        self.stderr = process.stderr.fileno()
        os.set_blocking(self.stderr, False)
        self.channel = MessagePipe(os.dup(process.stdout.fileno()), os.dup(process.stdin.fileno()))
        process.stdout.close()
        process.stdin.close()

    @property
    def has_dialed(self) -> bool:
        """Whether the agent has proved the job's secret, and so knows it."""
        return self._process is None and self.channel.reader >= 0

    @property
    def awaits_call(self) -> bool:
        """Whether the agent is to dial, and has not."""
        return self._process is None and self.channel.reader < 0 and self.channel.is_open

    @property
    def status(self) -> int | None:
        """The status with which the process ended that leads to the agent; None if it has not, or there is none."""
        return None if self._process is None else self._process.poll()

    def said(self) -> str:
        """The last words of that process in brackets, if there are any."""
        return said(list(self.words))

    @property
    def is_over(self) -> bool:
        """Whether there is nothing to wait for any more: it is done, gone, or silent where it should speak."""
        return self.is_done or bool(self.trouble) or self.silent > _PATIENCE

    def receive(self) -> list[Frame]:
        """The messages that have come; sets ``trouble`` if the connection is over."""
        data = self.channel.read()
        try:
            got = self.channel.decode(self._skip_noise(data))
        except JobError as error:
            self.trouble = str(error)
            return []
        for frame in got:
            if frame.kind == "hello":
                self.hello, self.clock = frame.head, float(frame.head.get("time", 0)) - time.time()
            elif frame.kind == "clock":
                self.monotonic.compare(float(frame.head["sent"]), float(frame.head["here"]), time.perf_counter())
            elif frame.kind == "trouble":
                self.trouble = str(frame.head.get("text"))
            self.is_done = self.is_done or frame.kind == "bye"
        if not self.channel.is_open and not self.trouble:
            self.trouble = "the connection ended"
        return got

    def listen_to_ssh(self) -> bool:
        """Keep what was written to the standard error; whether there may be more."""
        try:
            data = os.read(self.stderr, 1 << 16)
        except BlockingIOError:
            return True
        *lines, self._rest = (self._rest + data).split(b"\n")
        if not data and self._rest:
            lines.append(self._rest)
        self.words.extend(line.decode(errors="replace").rstrip("\r") for line in lines)
        return bool(data)

    def close(self, seconds: float = 2.0) -> None:
        """Hang up; the agent sees the end of its input. Waits so long for the process, then kills it."""
        self.channel.close()
        if self._process is None:
            return
        try:
            self._process.wait(seconds)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        assert self._process.stderr is not None
        self._process.stderr.close()

    def await_end(self, seconds: float) -> None:
        """Wait so long for the process that leads to the agent."""
        if self._process is not None:
            with contextlib.suppress(subprocess.TimeoutExpired):
                self._process.wait(seconds)

    def _skip_noise(self, data: bytes) -> bytes:
        if self._has_begun:
            return data
        self._noise += data
        before, found, after = bytes(self._noise).partition(message_pipe.MARKER)
        if found:
            self._has_begun = True
            self._noise.clear()
            return after
        if len(before) > _MOST_NOISE:
            raise JobError("something other than Hocket's agent answered there: does its shell start other programs?")
        return b""


class AgentLinks:
    """The connections to all hosts of a job.

    Args:
        links: The connections; more may come.
        signals: Collects signals.
        reception: Where agents come in that dial; each gets the link of its number.
    """

    def __init__(self, links: Sequence[AgentLink], signals: Signals, reception: Reception | None = None) -> None:
        self._received = signals.received
        self._reception = reception
        self._last = time.monotonic()
        self._minds_silence = self._compares_clocks = False
        self._selector = selectors.PollSelector()  # it also takes files, which the standard input may be
        self._selector.register(signals.fileno(), selectors.EVENT_READ, signals.drain)
        self.all: list[AgentLink] = []
        if reception is not None:
            self._selector.register(reception.fileno(), selectors.EVENT_READ, self._welcome)
        for link in links:
            self.add(link)
        self._stop = threading.Event()
        self._pinging = threading.Thread(target=self._ping, name="hocket-ping", daemon=True)
        self._pinging.start()

    def add(self, link: AgentLink) -> None:
        """One more connection."""
        for descriptor in (link.stderr, link.channel.reader):
            if descriptor >= 0:
                self._selector.register(descriptor, selectors.EVENT_READ, link)
        self.all.append(link)

    def _welcome(self) -> None:
        """Agents have dialed; one that nobody waits for is sent away."""
        for number, _, connection in self._reception.take() if self._reception is not None else ():
            awaited = [link for link in self.all if link.number == number and link.awaits_call]
            if awaited:
                awaited[0].channel.connect(connection)
                self._selector.register(connection, selectors.EVENT_READ, awaited[0])
            else:
                connection.close()

    def drop(self, link: AgentLink) -> None:
        """Hang up on a host that is not needed; waits for its agent, which ends at once, no longer than a moment."""
        self._forget(link)
        if self._watches(link.stderr):
            self._selector.unregister(link.stderr)
        self.all.remove(link)
        link.close(0.5)

    def watch(self, descriptor: int, action: Callable[[], None]) -> None:
        """Also wait for ``descriptor``, and call ``action`` when it is readable."""
        self._selector.register(descriptor, selectors.EVENT_READ, action)

    def unwatch(self, descriptor: int) -> None:
        """Wait for it no longer."""
        self._selector.unregister(descriptor)

    def receive(self, seconds: float) -> Iterator[tuple[AgentLink, Frame]]:
        """What agents say; waits at most ``seconds`` if they say nothing. Notices those that are gone or silent."""
        for link in self.all:
            self._watch_writer(link)
        for key, _ in self._selector.select(seconds):
            if not isinstance(key.data, AgentLink):
                key.data()
            elif key.fd == key.data.stderr:
                if not key.data.listen_to_ssh():
                    self._selector.unregister(key.fd)
            elif key.fd == key.data.channel.reader:
                key.data.silent = 0.0
                for frame in key.data.receive():
                    yield key.data, frame
                if key.data.trouble:
                    self._forget(key.data)
            else:
                key.data.channel.flush()
        before, self._last = self._last, time.monotonic()
        for link in self.all if self._minds_silence else ():
            link.silent += min(self._last - before, _PING)  # it may have been this process that stood still
            if link.hello and not (link.trouble or link.is_done) and link.silent > SILENCE:
                link.trouble = f"nothing was heard of it for {SILENCE:.0f} s"
                self._forget(link)

    def compare_clocks(self) -> None:
        """Ask all agents for their clocks a few times, and from now on every second."""
        for _ in range(_CLOCKS):
            self.ask({link: {"sent": time.perf_counter()} for link in self.all if link.hello}, "clock", "clock", 1.0)
        self._compares_clocks = True

    def mind_silence(self) -> None:
        """From now on agents have to say that they are alive; a question may keep them from it."""
        self._minds_silence = True
        for link in self.all:
            link.silent = 0.0

    def ask(
        self, questions: dict[AgentLink, dict[str, Any]], kind: str, answer: str, seconds: float, body: bytes = b""
    ) -> dict[AgentLink, dict[str, Any]]:
        """Ask several agents at once, and wait for their answers.

        Args:
            questions: What to ask each of them.
            kind: The kind of the question.
            answer: The kind of the answer.
            seconds: How long to wait.
            body: Bytes that go with the question.

        Returns:
            The answers of those that gave one; fewer if a signal asks for the end.
        """

        def talk() -> Talk[Answers]:
            return (yield Question(kind, answer, questions, seconds, body))

        return self.carry_out(talk())

    def carry_out(self, talk: Talk[T]) -> T:
        """Have a talk from its beginning to its end; when a signal asks for the end, it hears no more answers."""
        interview = Interview(talk)
        while not interview.is_over:
            for link, frame in self.receive(0.1):
                interview.take(link, frame)
            interview.tick(hurries=bool(self._received))
        found: T = interview.found
        return found

    def listen_to_end(self, link: AgentLink, seconds: float = 0.5) -> None:
        """Hear the last words of a connection that is over; they come with the end of its process."""
        link.await_end(seconds if link.trouble else 0)
        if self._watches(link.stderr) and not link.listen_to_ssh():
            self._selector.unregister(link.stderr)

    def close(self) -> None:
        """Hang up on all of them at once; waits until they have gone. May be called twice."""
        if self._stop.is_set():
            return
        self._stop.set()
        self._pinging.join()
        for link in self.all:
            link.channel.close()
        deadline = time.monotonic() + 3
        for link in self.all:
            link.close(max(0.1, deadline - time.monotonic()))
        self._selector.close()

    def _watch_writer(self, link: AgentLink) -> None:
        line = link.channel
        watched = self._watches(line.writer)
        if line.pending and line.is_open and line.writer >= 0 and not watched:
            self._selector.register(line.writer, selectors.EVENT_WRITE, link)
        elif watched and not (line.pending and line.is_open):
            self._selector.unregister(line.writer)

    def _forget(self, link: AgentLink) -> None:
        for descriptor in (link.channel.reader, link.channel.writer):
            if self._watches(descriptor):
                self._selector.unregister(descriptor)
        link.channel.is_open = False

    def _watches(self, descriptor: int) -> bool:
        return descriptor >= 0 and descriptor in self._selector.get_map()

    def _ping(self) -> None:
        """From a thread of its own: whoever holds up the screen must not make agents think that all is lost."""
        alive = message_pipe.encode("alive")
        while not self._stop.wait(_PING):
            for link in self.all:
                if link.hello and link.channel.is_open and not link.channel.pending:
                    link.channel.send_raw(
                        message_pipe.encode("clock", sent=time.perf_counter()) if self._compares_clocks else alive
                    )
