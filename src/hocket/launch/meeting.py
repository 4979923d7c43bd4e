"""Where the tasks of a start find the first of them, and the secret that they prove to each other."""

from __future__ import annotations

import contextlib
import hashlib
import os
import secrets
import stat
import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from hocket.errors import UsageError
from hocket.surroundings import Surroundings
from hocket.transport.door import is_loopback

_LEAST = 16  # bytes of a secret that a user has made
_PAUSE = 0.2


@dataclass(frozen=True)
class Meeting:
    """Where task 0 waits for the others.

    Attributes:
        address: Its address, or @ and the name of a socket of this host.
        port: Its port.
        secret: What both ends prove.
        encrypted: Whether they talk over TLS.
        is_open: Whether anybody who reaches the address knows the secret.
    """

    address: str
    port: int
    secret: bytes
    encrypted: bool
    is_open: bool = False


class Secret:
    """The secret of the tasks of one start: from ``--secret-file``, else from a file of the home that they share.

    On one host the kernel says whose processes the tasks are, and nothing has to be carried.

    Args:
        tasks: The surroundings of this task.
        path: What ``--secret-file`` names, if it does.
    """

    def __init__(self, tasks: Surroundings, path: str | None) -> None:
        self._tasks, self._given = tasks, Path(path) if path is not None else None
        self._made: Path | None = None

    @property
    def is_carried(self) -> bool:
        """Whether task 0 makes it, and the others find it in their home folder."""
        return self._given is None and not self._tasks.is_one_host and self._tasks.shares_home

    @property
    def is_open(self) -> bool:
        """Whether there is none."""
        return self._given is None and not self._tasks.is_one_host and not self._tasks.shares_home

    def make(self) -> bytes:
        """The secret, at task 0; see ``remove``.

        Raises:
            UsageError: there is none, and what to do.
        """
        if not self.is_carried:
            return self._known()
        path, made = self._path(), secrets.token_bytes(32)
        try:
            path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
            with contextlib.suppress(FileNotFoundError):
                path.unlink()  # of a start of the same name that was killed
            descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
            self._made = path
            with os.fdopen(descriptor, "wb") as file:
                file.write(made)
        except OSError as error:
            raise UsageError(f"{path}, for the job's secret: {error.strerror}: name one with --secret-file") from None
        return made

    def find(self, seconds: float) -> bytes:
        """The secret, at the other tasks; waits so long for task 0 to make it."""
        if not self.is_carried:
            return self._known()
        path, deadline = self._path(), time.monotonic() + seconds
        while True:
            with contextlib.suppress(OSError):
                os.listdir(path.parent)  # noqa: PTH208 - a network's file system looks again for what was not there
                if len(found := path.read_bytes()) == 32:
                    _check(path)
                    return found
            if time.monotonic() > deadline:
                raise UsageError(
                    f"{path}, with the job's secret, is not there after {seconds:g} s: task 0 has not begun, or the "
                    "hosts share no home folder; name a file on each with --secret-file"
                )
            time.sleep(_PAUSE)

    def remove(self) -> None:
        """Remove what ``make`` has made; the others have it, or never will."""
        if self._made is not None:
            self._made.unlink(missing_ok=True)
            self._made = None

    def _known(self) -> bytes:
        if self._given is None:
            return self._tasks.digest
        _check(self._given)
        told = self._given.read_bytes().strip()
        if len(told) < _LEAST:
            raise UsageError(
                f"--secret-file {self._given}: {len(told)} bytes are too few: write at least {_LEAST} of them, for "
                "example with openssl rand -hex 32"
            )
        return hashlib.sha256(b"hocket job" + told).digest()

    def _path(self) -> Path:
        try:
            return Path.home() / ".hocket" / f"{self._tasks.digest.hex()[:24]}.secret"
        except RuntimeError:
            raise UsageError("there is no home folder for the job's secret: name a file with --secret-file") from None


def arrange(tasks: Surroundings, environ: Mapping[str, str], secret: bytes, *, tls: str, is_open: bool) -> Meeting:
    """Where the tasks meet; all of them come to the same result."""
    if tasks.is_one_host and tasks.start:
        return Meeting(f"@hocket-tasks-{tasks.digest.hex()[:24]}", 0, secret, encrypted=False)
    address, port = tasks.meeting(environ)
    encrypted = tls == "on" or (tls == "auto" and not is_loopback(address))
    return Meeting(address, port, secret, encrypted, is_open)


def _check(path: Path) -> None:
    """Refuse a file that others can read."""
    try:
        status = path.stat()
    except OSError as error:
        raise UsageError(f"--secret-file {path}: {error.strerror}: write one with a secret, of mode 0600") from None
    mode = stat.S_IMODE(status.st_mode)
    if not stat.S_ISREG(status.st_mode) or mode & 0o077 or status.st_uid not in (os.geteuid(), 0):
        raise UsageError(
            f"--secret-file {path}: mode {mode:04o}, owner {status.st_uid}: nobody else may read it: chmod 600 {path}"
        )
