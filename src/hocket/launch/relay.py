"""Runs a process and passes on what it writes, line by line, to the streams that Python has now.

In a notebook those are no files, so a child cannot write to them by itself.
"""

from __future__ import annotations

import os
import selectors
import signal
import subprocess
import sys
import time
from typing import TextIO

_PATIENCE = 15.0  # seconds that an interrupted launcher has to end; it needs about two


def run(command: list[str], env: dict[str, str]) -> int:
    """Run ``command`` to its end and return its status.

    An exception meanwhile (KeyboardInterrupt is one) first ends the process, and waits for that.
    """
    # A session of its own: Ctrl-C reaches only the caller, which passes it on once.
    process = subprocess.Popen(
        command, env=env, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.PIPE,
        start_new_session=True, bufsize=0,
    )  # fmt: skip
    with process:
        try:
            _pass_on(process, None)
            return process.wait()
        except BaseException as error:
            _end(process, signal.SIGINT if isinstance(error, KeyboardInterrupt) else signal.SIGTERM)
            raise


def _end(process: subprocess.Popen[bytes], number: signal.Signals) -> None:
    try:
        process.send_signal(number)
        _pass_on(process, time.monotonic() + _PATIENCE)
    finally:
        process.kill()  # after its time, or at a second Ctrl-C; the launcher's guardian then ends the workers
        process.wait()


def _pass_on(process: subprocess.Popen[bytes], deadline: float | None) -> None:
    """Until both streams have ended, or the time is over."""
    rests: dict[int, bytes] = {}
    with selectors.DefaultSelector() as selector:
        for pipe, name in ((process.stdout, "stdout"), (process.stderr, "stderr")):
            if pipe is not None and not pipe.closed:
                selector.register(pipe, selectors.EVENT_READ, name)
        while selector.get_map() and (deadline is None or time.monotonic() < deadline):
            for key, _ in selector.select(0.25):
                data = os.read(key.fd, 1 << 16)
                *lines, rests[key.fd] = (rests.get(key.fd, b"") + data).split(b"\n")
                if not data:
                    selector.unregister(key.fileobj)
                    lines = [rests[key.fd]] if rests[key.fd] else []
                _write(getattr(sys, key.data), lines)


def _write(stream: TextIO | None, lines: list[bytes]) -> None:
    if lines and stream is not None:
        text = b"".join(line + b"\n" for line in lines).decode(errors="replace")
        try:
            stream.write(text)
        except UnicodeEncodeError:
            stream.write(text.encode("ascii", "backslashreplace").decode())
        stream.flush()
