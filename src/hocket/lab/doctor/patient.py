"""An agent's part in ``hocket doctor``: has its host looked at, tells the time, measures the way to others."""

from __future__ import annotations

import json
import os
import selectors
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Mapping
from pathlib import Path

from hocket.errors import JobError
from hocket.lab.doctor.meter import Meter, measure
from hocket.launch import leftovers
from hocket.launch.message_pipe import Frame, MessagePipe

_MOST_SAID = 1 << 19


class Patient:
    """Answers the questions of a doctor.

    Attributes:
        answers: The functions that answer, by the kind of the question.
    """

    def __init__(self, channel: MessagePipe, selector: selectors.BaseSelector) -> None:
        self._channel, self._selector = channel, selector
        self._child: subprocess.Popen[bytes] | None = None
        self._said = b""
        self._meter: Meter | None = None
        self.answers: dict[str, Callable[[Frame, bytes, Mapping[str, str]], None]] = {
            "examine": self._examine,
            "time": lambda *_: channel.send("timed", time=time.time()),
            "meter": self._listen,
            "measure": self._measure,
            "unmeter": self._stop_listening,
        }

    def close(self) -> None:
        """End what was begun."""
        if self._child is not None:
            self._forget_child(0.0)
        if self._meter is not None:
            self._meter.close()

    def _examine(self, frame: Frame, _: bytes, base: Mapping[str, str]) -> None:
        """Start the checks; their end is seen by the agent's loop, which goes on meanwhile."""
        folder, interface = str(frame.head["folder"]), str(frame.head["interface"] or "")
        checks = ["-P", "-m", "hocket.lab.doctor.doctor_checks"]  # modules that lie in the folder are none of theirs
        command = [sys.executable, *checks, folder, interface, str(frame.head["where"])]
        self._child = subprocess.Popen(
            command, env=base, cwd=folder if Path(folder).is_dir() else "/", stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE, start_new_session=True,
            preexec_fn=leftovers.die_with_parent(),  # noqa: PLW1509 - one thread
        )  # fmt: skip
        assert self._child.stdout is not None
        self._selector.register(self._child.stdout.fileno(), selectors.EVENT_READ, self._hear_child)

    def _hear_child(self) -> None:
        assert self._child is not None and self._child.stdout is not None
        data = os.read(self._child.stdout.fileno(), 1 << 16)
        self._said += data
        if data and len(self._said) < _MOST_SAID:
            return
        child = self._child
        self._forget_child(0.5)  # it has closed its output
        try:
            findings = json.loads(self._said.splitlines()[-1])
        except (ValueError, IndexError):
            self._channel.send("examined", findings=None, status=child.returncode)
        else:
            self._channel.send("examined", findings=findings)

    def _forget_child(self, seconds: float) -> None:
        assert self._child is not None and self._child.stdout is not None
        self._selector.unregister(self._child.stdout.fileno())
        try:
            self._child.wait(seconds)
        except subprocess.TimeoutExpired:
            os.killpg(self._child.pid, signal.SIGKILL)  # with what it has started
            self._child.wait()
        self._child.stdout.close()
        self._child = None

    def _listen(self, frame: Frame, secret: bytes, _: Mapping[str, str]) -> None:
        if self._meter is not None:
            self._meter.close()
        self._meter = Meter(secret, str(frame.head["address"]))
        self._channel.send("metering", port=self._meter.port)

    def _measure(self, frame: Frame, secret: bytes, _: Mapping[str, str]) -> None:
        address, port, seconds = str(frame.head["address"]), int(frame.head["port"]), float(frame.head["seconds"])
        try:
            self._channel.send("measured", **measure(address, port, secret, seconds))
        except (OSError, JobError) as error:
            self._channel.send("measured", trouble=str(error) or type(error).__name__)

    def _stop_listening(self, *_: object) -> None:
        if self._meter is not None:
            self._meter.close()
            self._meter = None
