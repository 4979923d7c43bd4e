"""The standard streams of the command: one that is missing, one that is full, one that nobody reads any more."""

from __future__ import annotations

import codecs
import contextlib
import errno
import io
import os
import signal
import sys

from hocket.errors import HocketError

PLAIN = str.maketrans({"→": "->", "µ": "u", "–": "-", "±": "+-", "×": "x", "…": "..."})
"""What stands for characters of Hocket's own where a terminal cannot show them."""
AS_PLAIN = "hocket.plain"
"""The name of the way to write them so, among Python's ways to handle errors of encoding."""


class Unwritable(HocketError, OSError):
    """Standard output takes nothing.

    It has no number of its own as other errors of the system have: some libraries take a broken pipe for their affair.

    Attributes:
        status: The status with which the command ends: for a wrong use, or for the signal of a reader that has gone.
    """

    def __init__(self, reason: str, *, is_broken_pipe: bool = False) -> None:
        super().__init__(f"standard output {reason}: send it to where there is room, or to /dev/null")
        self.status = 128 + signal.SIGPIPE if is_broken_pipe else 2


class _Output(io.FileIO):
    """Tells its own errors from those of any other file."""

    def write(self, data: object) -> int:
        try:
            return super().write(data)  # type: ignore[arg-type]
        except OSError as error:
            is_broken_pipe = error.errno == errno.EPIPE
            raise Unwritable(f"cannot be written ({error.strerror})", is_broken_pipe=is_broken_pipe) from None


def _write_plainly(error: UnicodeError) -> tuple[str, int]:
    """What stands for characters that an encoding does not have."""
    if not isinstance(error, UnicodeEncodeError):
        raise error
    letters = error.object[error.start : error.end]
    return "".join(PLAIN.get(ord(letter), "?") for letter in letters), error.end


codecs.register_error(AS_PLAIN, _write_plainly)


def prepare() -> None:
    """Put streams that work in the place of those of this process; to be called before a file is opened.

    Without an input there is nothing to read, and without a stream for errors they are lost.

    Raises:
        Unwritable: there is no standard output.
    """
    closed = {number for number in range(3) if _is_closed(number)}
    for _ in closed:  # else the next files to be opened would be taken for these streams
        os.set_inheritable(os.open(os.devnull, os.O_RDWR), True)
    if 0 in closed:
        sys.stdin = open(0, closefd=False, encoding="utf-8")  # noqa: SIM115
    if 2 in closed:
        sys.stderr = open(2, "w", closefd=False, encoding="utf-8")  # noqa: SIM115
    if 1 in closed:
        sys.stdout = open(1, "w", closefd=False, encoding="utf-8")  # noqa: SIM115
        raise Unwritable("is closed")
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors=AS_PLAIN)  # workers may write what this terminal cannot show
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout = io.TextIOWrapper(
            io.BufferedWriter(_Output(1, "w", closefd=False)), sys.stdout.encoding, sys.stdout.errors,
            line_buffering=sys.stdout.line_buffering or sys.stdout.write_through,
        )  # fmt: skip


def put(text: str, *, error: bool = False) -> None:
    """Write a line of a job, to the stream for errors or the other one; without room for it, the job goes on.

    Raises:
        OSError: the reader has gone.
    """
    try:
        print(text, file=sys.stderr if error else sys.stdout, flush=True)
    except OSError as problem:
        if isinstance(problem, BrokenPipeError) or (isinstance(problem, Unwritable) and problem.status != 2):
            raise
        _give_up(2 if error else 1)
        if not error:
            say(f"hocket: {problem}. The job goes on; what it writes there is lost from here on (--log-dir keeps it)")


def say(text: str) -> None:
    """The last words, if anybody can hear them."""
    try:
        print(text, file=sys.stderr, flush=True)
    except OSError:
        _give_up(2)


def end(error: Unwritable) -> int:
    """Say why, unless the reader has gone of its own accord, and drop what is still to be written; the status."""
    _give_up(1)
    if error.status == 2:
        say(f"hocket: {error}")
    return error.status


def _is_closed(number: int) -> bool:
    try:
        os.fstat(number)
    except OSError:
        return True
    return False


def _give_up(number: int) -> None:
    """What is left in a buffer goes nowhere; Python would try, and complain, at its end."""
    with contextlib.suppress(OSError):
        null = os.open(os.devnull, os.O_WRONLY)
        os.dup2(null, number)
        os.close(null)
