"""One agent as the launcher sees it: the process that leads to it, what it says, and what ssh says."""

from __future__ import annotations

import os
import subprocess
import time
from collections import deque
from collections.abc import Sequence
from typing import Any

from hocket.errors import JobError, UsageError
from hocket.launch import frames, leftovers
from hocket.launch.channel import Channel
from hocket.launch.frames import Frame
from hocket.launch.hosts import Host
from hocket.observe.clock import Clock

_MOST_NOISE = 1 << 16  # bytes that a login may print
_WORDS = 40  # lines of ssh's that are kept
_PATIENCE = 3.0  # seconds of silence after which an end is not waited for


class Link:
    """The connection to one host.

    Attributes:
        host: The host.
        number: Its number in the job.
        hello: What its agent has told of it; empty until it has.
        clock: By how many seconds its clock is ahead of this one's.
        monotonic: The same of its monotonic clock, if that was asked for; see ``Links.compare_clocks``.
        silent: For how many seconds it has said nothing while it was listened to.
        words: The last lines that ssh, the shell or the agent wrote to their standard error.
        trouble: Why nothing more comes; empty while all is well.
        is_done: Whether it has said that its part is over.
    """

    def __init__(self, host: Host, number: int, command: Sequence[str]) -> None:
        self.host, self.number = host, number
        self.hello: dict[str, Any] = {}
        self.clock = 0.0
        self.monotonic = Clock()
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
        before, found, after = bytes(self._noise).partition(frames.MARKER)
        if found:
            self._has_begun = True
            self._noise.clear()
            return after
        if len(before) > _MOST_NOISE:
            raise JobError("something other than Hocket's agent answered there: does its shell start other programs?")
        return b""
