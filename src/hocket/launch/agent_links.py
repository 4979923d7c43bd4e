"""The agents of a job as the launcher sees them: the processes that lead to them, what they say, and what ssh says."""

from __future__ import annotations

import contextlib
import os
import selectors
import subprocess
import threading
import time
from collections import deque
from collections.abc import Callable, Generator, Iterator, Sequence
from typing import Any, NamedTuple, TypeVar

from hocket.errors import JobError, UsageError
from hocket.launch import channel, leftovers
from hocket.launch.channel import Channel, Frame
from hocket.launch.host_list import Host
from hocket.launch.signals import Signals
from hocket.observe.timeline import HostClock

SILENCE = 10.0  # seconds without a word after which the other end counts as lost
_PING = 1.0
_CLOCKS = 5
_MOST_NOISE = 1 << 16  # bytes that a login may print
_WORDS = 40  # lines of ssh's that are kept
_PATIENCE = 3.0  # seconds of silence after which an end is not waited for
T = TypeVar("T")


class AgentLink:
    """The connection to one host.

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
    """

    def __init__(self, host: Host, number: int, command: Sequence[str]) -> None:
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
        try:
            self.process = subprocess.Popen(
                command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE, bufsize=0,
                start_new_session=True,
                # An agent on this machine is better off cleaning up when its input ends.
                preexec_fn=None if host.is_here else leftovers.die_with_parent(),  # noqa: PLW1509 - one thread
            )  # fmt: skip
        except OSError as error:
            reason = f"{command[0]} cannot be started ({error.strerror})"
            raise UsageError(f"{reason}: name the ssh command with --ssh") from None
        assert self.process.stdin is not None and self.process.stdout is not None and self.process.stderr is not None
        self.stderr = self.process.stderr.fileno()
        os.set_blocking(self.stderr, False)
        self.channel = Channel(os.dup(self.process.stdout.fileno()), os.dup(self.process.stdin.fileno()))
        self.process.stdout.close()
        self.process.stdin.close()

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
        try:
            self.process.wait(seconds)
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait()
        assert self.process.stderr is not None
        self.process.stderr.close()

    def _skip_noise(self, data: bytes) -> bytes:
        if self._has_begun:
            return data
        self._noise += data
        before, found, after = bytes(self._noise).partition(channel.MARKER)
        if found:
            self._has_begun = True
            self._noise.clear()
            return after
        if len(before) > _MOST_NOISE:
            raise JobError("something other than Hocket's agent answered there: does its shell start other programs?")
        return b""


class Question(NamedTuple):
    """What several agents are asked at once.

    Attributes:
        kind: The kind of the question; empty if nothing is sent, and agents say by themselves what is waited for.
        answer: The kind of the answer.
        heads: What to ask each of them.
        seconds: How long to wait.
        body: Bytes that go with the question.
    """

    kind: str
    answer: str
    heads: dict[AgentLink, dict[str, Any]]
    seconds: float
    body: bytes = b""


Answers = dict[AgentLink, dict[str, Any]]
"""The answers of those that gave one."""

Talk = Generator[Question, Answers, T]
"""A talk with agents: yields its questions, one after the other, is sent the answers, and returns what it has found."""


class Interview:
    """Carries on a talk with agents, as far as answers have come; waits for nobody.

    Attributes:
        is_over: Whether the talk has come to its end.
        found: What it has returned then.
    """

    def __init__(self, talk: Talk[Any]) -> None:
        self._talk = talk
        self._answers: Answers = {}
        self.is_over = False
        self.found: Any = None
        self._ask(lambda: next(talk))

    def take(self, link: AgentLink, frame: Frame) -> None:
        """An agent has said something."""
        if not self.is_over and frame.kind == self._question.answer and link in self._question.heads:
            self._answers[link] = frame.head

    def tick(self, *, hurries: bool = False) -> None:
        """Go on if nobody is to answer any more, or at once if it ``hurries``; raises what the talk raises."""
        if self.is_over:
            return
        missing = any(link not in self._answers and not link.trouble for link in self._question.heads)
        if hurries or not missing or time.monotonic() > self._deadline:
            answers, self._answers = self._answers, {}
            self._ask(lambda: self._talk.send(answers))

    def _ask(self, step: Callable[[], Question]) -> None:
        try:
            self._question = question = step()
        except StopIteration as end:
            self.is_over, self.found = True, end.value
            return
        self._deadline = time.monotonic() + question.seconds
        for link, head in question.heads.items() if question.kind else ():
            link.channel.send(question.kind, question.body, **head)


class AgentLinks:
    """The connections to all hosts of a job."""

    def __init__(self, links: Sequence[AgentLink], signals: Signals) -> None:
        self._received = signals.received
        self._last = time.monotonic()
        self._minds_silence = self._compares_clocks = False
        self._selector = selectors.PollSelector()  # it also takes files, which the standard input may be
        self._selector.register(signals.fileno(), selectors.EVENT_READ, signals.drain)
        self.all: list[AgentLink] = []
        for link in links:
            self.add(link)
        self._stop = threading.Event()
        self._pinging = threading.Thread(target=self._ping, name="hocket-ping", daemon=True)
        self._pinging.start()

    def add(self, link: AgentLink) -> None:
        """One more connection."""
        self._selector.register(link.stderr, selectors.EVENT_READ, link)
        self._selector.register(link.channel.reader, selectors.EVENT_READ, link)
        self.all.append(link)

    def drop(self, link: AgentLink) -> None:
        """Hang up on a host that is not needed; waits for its agent, which ends at once, no longer than a moment."""
        self._forget(link)
        if link.stderr in self._selector.get_map():
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
        with contextlib.suppress(subprocess.TimeoutExpired):
            link.process.wait(seconds if link.trouble else 0)
        if link.stderr in self._selector.get_map() and not link.listen_to_ssh():
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
        watched = line.writer in self._selector.get_map()
        if line.pending and line.is_open and not watched:
            self._selector.register(line.writer, selectors.EVENT_WRITE, link)
        elif watched and not (line.pending and line.is_open):
            self._selector.unregister(line.writer)

    def _forget(self, link: AgentLink) -> None:
        for descriptor in (link.channel.reader, link.channel.writer):
            if descriptor in self._selector.get_map():
                self._selector.unregister(descriptor)
        link.channel.is_open = False

    def _ping(self) -> None:
        """From a thread of its own: whoever holds up the screen must not make agents think that all is lost."""
        alive = channel.encode("alive")
        while not self._stop.wait(_PING):
            for link in self.all:
                if link.hello and link.channel.is_open and not link.channel.pending:
                    link.channel.send_raw(
                        channel.encode("clock", sent=time.perf_counter()) if self._compares_clocks else alive
                    )
