"""A process of its own that outlives the launcher: it ends what is left of a job, and removes what nobody finishes.

Workers tell it through a pipe, the ledger, of every temporary folder before they make it and when it is gone. What a
folder is for when its worker, or the launcher, is killed nobody knows any more, so it is removed.
"""

from __future__ import annotations

import contextlib
import os
import select
import shutil
import signal
import time
from pathlib import Path

from hocket import messages
from hocket.events import FOLDER_BEGUN, FOLDER_DONE, Happening, RecordDecoder
from hocket.launch import leftovers, mps

_PROTECT, _DISMISS, _MPS = 1, 2, 3  # kinds of messages from the launcher
_PATIENCE = 30.0  # seconds to try; a busy machine needs some to end its processes


class Guardian:
    """Kills the rest of a job when the launcher ends without having said so.

    Attributes:
        pid: The process.
        ledger: The descriptor through which workers tell of their temporary folders.

    Args:
        folder: Is removed, too, if the launcher does not dismiss its guardian.
    """

    def __init__(self, folder: str = "") -> None:
        reader, self._writer = os.pipe()
        heard, self.ledger = os.pipe()
        self.pid = os.fork()
        if self.pid == 0:
            _guard(reader, heard, folder)
        os.close(reader)
        os.close(heard)

    def protect(self, mark: str) -> None:
        """From now on, end the job of this mark."""
        os.write(self._writer, messages.encode(_PROTECT, {"mark": mark}, b""))

    def protect_mps(self, folder: str) -> None:
        """End the job's MPS daemon, too, which is in ``folder`` or will be."""
        os.write(self._writer, messages.encode(_MPS, {"folder": folder}, b""))

    def dismiss(self) -> None:
        """The job has ended in order, and its processes are gone; returns when its temporary folders are, too."""
        with contextlib.suppress(BrokenPipeError):
            os.write(self._writer, messages.encode(_DISMISS, {}, b""))
        os.close(self._writer)
        os.close(self.ledger)
        with contextlib.suppress(ChildProcessError):
            os.waitpid(self.pid, 0)


class Unfinished:
    """Temporary folders that were begun, from what the processes of one host tell."""

    def __init__(self) -> None:
        self._records = RecordDecoder()
        self._folders: set[str] = set()

    def follow(self, data: bytes) -> None:
        """Take in some bytes of the ledger."""
        for record in self._records.feed(data):
            if not isinstance(record, Happening) or not isinstance(folder := record.details.get("folder"), str):
                continue
            if record.name == FOLDER_BEGUN and Path(folder).name.startswith("."):  # it is not believed blindly
                self._folders.add(folder)
            elif record.name == FOLDER_DONE:
                self._folders.discard(folder)

    def remove(self) -> bool:
        """Remove what nobody is left to finish; whether all of it is gone."""
        for folder in self._folders:
            shutil.rmtree(folder, ignore_errors=True)
        self._folders = {folder for folder in self._folders if Path(folder).exists()}
        return not self._folders


_early: Guardian | None = None


def begin(folder: str) -> None:
    """Have the guardian of the job that is to come now, so that ``folder`` is not left behind."""
    global _early
    _early = Guardian(folder)


def guard(mark: str) -> Guardian:
    """The guardian of the job with this mark."""
    global _early
    guardian, _early = _early or Guardian(), None
    guardian.protect(mark)
    return guardian


def end() -> None:
    """Dismiss the guardian of a job that has not come."""
    global _early
    guardian, _early = _early, None
    if guardian is not None:
        guardian.dismiss()


def _guard(reader: int, heard: int, folder: str) -> None:
    try:
        os.setsid()
        for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
            signal.signal(number, signal.SIG_IGN)
        # Hold nothing of the launcher's: who reads its output must see the end of it.
        null = os.open(os.devnull, os.O_RDWR)
        for descriptor in range(3):
            os.dup2(null, descriptor)
        kept = sorted((reader, heard))
        for low, high in zip((2, *kept), (*kept, 1 << 16), strict=True):
            os.closerange(low + 1, high)
        os.set_blocking(heard, False)
        unfinished = Unfinished()
        mark, mps_folder, is_dismissed = _wait(reader, heard, unfinished)
        deadline = time.monotonic() + _PATIENCE
        if mps_folder and not is_dismissed:
            leftovers.kill(mark)
            mps.end(mark, mps_folder)
        while time.monotonic() < deadline:
            if mark and not is_dismissed:
                leftovers.kill(mark)
            _hear(heard, unfinished)
            if folder and not is_dismissed:
                shutil.rmtree(folder, ignore_errors=True)
            if unfinished.remove() and not (folder and not is_dismissed and Path(folder).exists()):
                break
            time.sleep(0.02)  # somebody still writes there
    finally:
        os._exit(0)


def _wait(reader: int, heard: int, unfinished: Unfinished) -> tuple[str, str, bool]:
    """The mark of the job, the folder of its MPS, and whether the launcher has dismissed this process, or is gone."""
    mark, mps_folder, decoder = "", "", messages.Decoder()
    poll = select.poll()  # select() refuses descriptors from 1024 on, which a caller with many files may have
    poll.register(reader, select.POLLIN)
    poll.register(heard, select.POLLIN)
    while True:
        ready = {descriptor for descriptor, _ in poll.poll()}
        if heard in ready:
            _hear(heard, unfinished)
        if reader in ready:
            if not (data := os.read(reader, 1 << 12)):
                return mark, mps_folder, False
            for message, _ in decoder.feed(data):
                if message.kind == _DISMISS:
                    return mark, mps_folder, True
                if message.kind == _MPS:
                    mps_folder = message.head["folder"]
                else:
                    mark = message.head["mark"]


def _hear(heard: int, unfinished: Unfinished) -> None:
    with contextlib.suppress(BlockingIOError):
        while data := os.read(heard, 1 << 16):
            unfinished.follow(data)
