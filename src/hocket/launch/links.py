"""All agents of a job, as the launcher sees them: hears them, asks them, and says that it is alive."""

from __future__ import annotations

import contextlib
import selectors
import subprocess
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from hocket.launch import frames
from hocket.launch.frames import Frame
from hocket.launch.link import Link
from hocket.launch.signals import Signals

SILENCE = 10.0  # seconds without a word after which the other end counts as lost
_PING = 1.0
_CLOCKS = 5


class Links:
    """The connections to all hosts of a job."""

    def __init__(self, links: Sequence[Link], signals: Signals) -> None:
        self.all = list(links)
        self._received = signals.received
        self._last = time.monotonic()
        self._minds_silence = self._compares_clocks = False
        self._selector = selectors.PollSelector()  # it also takes files, which the standard input may be
        self._selector.register(signals.fileno(), selectors.EVENT_READ, signals.drain)
        for link in links:
            self._selector.register(link.stderr, selectors.EVENT_READ, link)
            self._selector.register(link.channel.reader, selectors.EVENT_READ, link)
        self._stop = threading.Event()
        self._pinging = threading.Thread(target=self._ping, name="hocket-ping", daemon=True)
        self._pinging.start()

    def watch(self, descriptor: int, action: Callable[[], None]) -> None:
        """Also wait for ``descriptor``, and call ``action`` when it is readable."""
        self._selector.register(descriptor, selectors.EVENT_READ, action)

    def unwatch(self, descriptor: int) -> None:
        """Wait for it no longer."""
        self._selector.unregister(descriptor)

    def receive(self, seconds: float) -> Iterator[tuple[Link, Frame]]:
        """What agents say; waits at most ``seconds`` if they say nothing. Notices those that are gone or silent."""
        for link in self.all:
            self._watch_writer(link)
        for key, _ in self._selector.select(seconds):
            if not isinstance(key.data, Link):
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
            if not link.trouble and link.silent > SILENCE:
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
        self, questions: dict[Link, dict[str, Any]], kind: str, answer: str, seconds: float, body: bytes = b""
    ) -> dict[Link, dict[str, Any]]:
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
        for link, head in questions.items():
            link.channel.send(kind, body, **head)
        return self.await_all(list(questions), answer, seconds)

    def await_all(self, links: list[Link], kind: str, seconds: float) -> dict[Link, dict[str, Any]]:
        """Wait until each of ``links`` has sent a frame of ``kind``, is gone, or the time is over."""
        answers: dict[Link, dict[str, Any]] = {}
        deadline = time.monotonic() + seconds
        while any(link not in answers and not link.trouble for link in links):
            if self._received or (left := deadline - time.monotonic()) <= 0:
                break
            for link, frame in self.receive(min(left, 0.25)):
                if frame.kind == kind:
                    answers[link] = frame.head
        return answers

    def listen_to_end(self, link: Link, seconds: float = 0.5) -> None:
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

    def _watch_writer(self, link: Link) -> None:
        channel = link.channel
        watched = channel.writer in self._selector.get_map()
        if channel.pending and channel.is_open and not watched:
            self._selector.register(channel.writer, selectors.EVENT_WRITE, link)
        elif watched and not (channel.pending and channel.is_open):
            self._selector.unregister(channel.writer)

    def _forget(self, link: Link) -> None:
        for descriptor in (link.channel.reader, link.channel.writer):
            if descriptor in self._selector.get_map():
                self._selector.unregister(descriptor)
        link.channel.is_open = False

    def _ping(self) -> None:
        """From a thread of its own: whoever holds up the screen must not make agents think that all is lost."""
        alive = frames.encode("alive")
        while not self._stop.wait(_PING):
            for link in self.all:
                if link.hello and link.channel.is_open and not link.channel.pending:
                    link.channel.send_raw(
                        frames.encode("clock", sent=time.perf_counter()) if self._compares_clocks else alive
                    )
