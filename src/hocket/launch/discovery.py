"""Asks a command of the user's, every few seconds, which hosts there are: it prints lines ``host:slots``."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import tempfile
import time
from collections.abc import Callable
from typing import IO

from hocket.errors import UsageError
from hocket.launch import host_list, leftovers
from hocket.launch.host_list import Host

_EVERY = 3.0  # seconds from an answer to the next question
_PATIENCE = 10.0  # seconds that the command has
_MOST = 1 << 20  # bytes that are read of what it says


class Discovery:
    """The command and its last answer. It runs in a process group of its own, which ends when its time is over.

    Args:
        command: What a shell runs.
    """

    def __init__(self, command: str) -> None:
        self._command = command
        self._process: subprocess.Popen[bytes] | None = None
        self._out: IO[bytes] | None = None
        self._begun = 0.0
        self._next = 0.0
        self._trouble = ""  # the last one that was said

    def first(self) -> list[Host]:
        """The hosts with which a job begins; waits for the command.

        Raises:
            UsageError: it failed, took too long, or listed no hosts.
        """
        self._begin()
        while (listed := self._answer()) is None:
            time.sleep(0.02)
        return listed

    def look(self, say: Callable[[str], None]) -> list[Host] | None:
        """What the command has just answered; None if there is nothing new. Waits for nothing.

        Args:
            say: Is told, once, what is wrong with the command.
        """
        if self._process is None:
            if time.monotonic() < self._next:
                return None
            with contextlib.suppress(OSError):
                self._begin()
            return None
        try:
            listed = self._answer()
        except UsageError as error:
            if str(error) != self._trouble:
                say(f"hocket: {error}; the job goes on with the hosts that it has")
            self._trouble = str(error)
            return None
        if listed is not None and self._trouble:
            say(f"hocket: --discover {self._command}: it lists hosts again")
            self._trouble = ""
        return listed

    def close(self) -> None:
        """End the command, if it runs."""
        if self._process is not None:
            self._end()

    def _begin(self) -> None:
        self._out = tempfile.TemporaryFile()  # noqa: SIM115 - a pipe would have to be read all the time
        self._begun = time.monotonic()
        self._process = subprocess.Popen(
            self._command, shell=True, stdin=subprocess.DEVNULL, stdout=self._out, stderr=subprocess.DEVNULL,
            start_new_session=True, preexec_fn=leftovers.die_with_parent(),  # noqa: PLW1509 - as all of the launcher's
        )  # fmt: skip

    def _answer(self) -> list[Host] | None:
        """The hosts that the command has listed; None if it still runs."""
        assert self._process is not None and self._out is not None
        status = self._process.poll()
        where = f"--discover {self._command}"
        if status is None:
            if time.monotonic() < self._begun + _PATIENCE:
                return None
            self._end()
            raise UsageError(f"{where}: no answer within {_PATIENCE:.0f} s")
        self._out.seek(0)
        text = self._out.read(_MOST).decode(errors="replace")
        self._end()
        if status:
            how = f"status {status}" if status > 0 else f"signal {signal.Signals(-status).name}"
            raise UsageError(f"{where}: it ended with {how}")
        return host_list.read_lines(text, where)

    def _end(self) -> None:
        assert self._process is not None and self._out is not None
        with contextlib.suppress(OSError):
            os.killpg(self._process.pid, signal.SIGKILL)
        self._process.wait()
        self._out.close()
        self._process, self._next = None, time.monotonic() + _EVERY
