"""A folder of checkpoints: each becomes visible by one rename when all of it is on the disk, the last few are kept.

folder/
  .lock                      held by the job that writes here
  000004-step-2000/          a checkpoint: the manifest, and one file of tensors for each rank
    checkpoint.json
    part-0.safetensors …
  .000005-step-2500.3fa9…/   one that is being written
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import hashlib
import json
import os
import re
import shutil
import socket
import time
import zlib
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import Any

from hocket import __version__
from hocket.errors import CheckpointError
from hocket.events import FOLDER_BEGUN, FOLDER_DONE, Happening, NoSink, Sink
from hocket.job.checkpoint import tensor_file
from hocket.job.checkpoint.tensor_file import Written
from hocket.job.packing import Text, join, write

FORMAT = 1
_SUCCESSION = 20.0  # seconds in which the process of a worker that has left or was lost has to end
_MANIFEST = "checkpoint.json"
_NAME = re.compile(r"(\d{6,})-step-(\d+)")
_KEYS = {
    "files": dict, "size": int, "step": int, "batches": int, "samples": int, "steps": list, "warmups": list,
    "strategies": list, "objects": dict, "loaders": dict, "aliases": dict,
}  # fmt: skip


class CheckpointFolder:
    """A folder of checkpoints, for the one process that writes to it.

    Args:
        folder: The folder of the checkpoints.
        ledger: Is told of temporary folders, so that somebody removes them if this process is killed.
        job: The mark of the job, whose next worker writes here when this one has left; empty if there is none.
    """

    def __init__(self, folder: Path, ledger: Sink | None = None, job: str = "") -> None:
        self.folder, self._job = folder, job
        self._ledger = ledger or NoSink()
        self._lock: int | None = None
        self._keeps = False

    def open(self, *, keep: bool = False) -> None:
        """Make the folder, and keep other jobs from writing there until ``release``, or until this process ends."""
        self._keeps |= keep
        try:
            if not self.folder.is_dir():
                self.folder.mkdir(parents=True, exist_ok=True)
                _flush(self.folder.parent)
            self._take_lock()
        except OSError as error:
            raise self._refusal(error) from None

    def begin(self, step: int, token: str) -> Path:
        """Make the folder of a new checkpoint, not visible as one yet."""
        self.open()
        try:
            number = max((_number(path) for path in committed(self.folder)), default=0) + 1
            folder = self.folder / f".{number:06d}-step-{step}.{token}"
            self._note(FOLDER_BEGUN, folder)
            folder.mkdir()
        except OSError as error:
            raise self._refusal(error) from None
        return folder

    def commit(self, folder: Path, manifest: dict[str, Text], files: dict[str, Written], keep: int) -> Path:
        """Make a checkpoint of ``folder``, whose files are complete and flushed; then remove the oldest ones."""
        described = {name: asdict(written) for name, written in files.items()}
        text = join({"format": write(FORMAT), "hocket": write(__version__), **manifest, "files": write(described)})
        content = json.dumps({"crc32": zlib.crc32(text.encode())}) + "\n" + text + "\n"
        write_file(folder / _MANIFEST, content.encode())
        _flush(folder)
        final = self._rename(folder)
        _flush(self.folder)
        self._note(FOLDER_DONE, folder)
        for old in committed(self.folder)[:-keep]:
            self._remove(old)
        return final

    def _rename(self, folder: Path) -> Path:
        number, step = _NAME.match(folder.name[1:]).groups()  # type: ignore[union-attr]
        while True:
            final = self.folder / f"{int(number):06d}-step-{step}"
            try:
                if not final.exists():  # an empty folder would be replaced
                    folder.rename(final)
                    return final
            except OSError:
                if not final.exists():
                    raise
            number = int(number) + 1

    def _remove(self, path: Path) -> None:
        """Remove a checkpoint: it disappears at once, not file by file."""
        hidden = self.folder / f".{path.name}.removed"
        with contextlib.suppress(OSError):
            self._note(FOLDER_BEGUN, hidden)
            path.rename(hidden)
            shutil.rmtree(hidden)
            self._note(FOLDER_DONE, hidden)

    def _note(self, what: str, folder: Path) -> None:
        self._ledger.put(Happening(what, {"folder": str(folder)}))

    def release(self) -> None:
        """Let other jobs write here, unless ``open`` was told otherwise."""
        if self._lock is not None and not self._keeps:
            os.close(self._lock)
            self._lock = None

    def _refusal(self, error: OSError) -> CheckpointError:
        return CheckpointError(
            f"cannot write checkpoints to {self.folder}: {error.strerror}; choose a folder that can be written to"
        )

    def _take_lock(self) -> None:
        """Lock the folder, and clean up after jobs that were killed."""
        if self._lock is not None:
            return
        lock = os.open(self.folder / ".lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o666)
        deadline = time.monotonic() + _SUCCESSION
        while self._lock is None:
            try:
                fcntl.lockf(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
                self._lock = lock
            except OSError as error:
                if error.errno not in (errno.EAGAIN, errno.EACCES):
                    os.close(lock)
                    raise
                holder, _, job = os.pread(lock, 200, 0).decode(errors="replace").strip().partition("\n")
                if self._job and job == self._job and time.monotonic() < deadline:
                    time.sleep(0.02)
                    continue
                os.close(lock)
                raise CheckpointError(
                    f"another job ({holder or 'unknown'}) writes checkpoints to {self.folder}: wait for its end, or "
                    "choose another folder"
                ) from None
        os.ftruncate(lock, 0)
        os.write(lock, f"process {os.getpid()} on {socket.gethostname()}\n{self._job}\n".encode())
        for path in self.folder.glob(".*-step-*"):
            shutil.rmtree(path, ignore_errors=True)


def committed(folder: Path) -> list[Path]:
    """The checkpoints in ``folder``, the oldest first."""
    found = [path for path in folder.iterdir() if _NAME.fullmatch(path.name)] if folder.is_dir() else []
    return sorted(found, key=_number)


def step_of(name: str) -> int:
    """The step at which the checkpoint of this name was taken; -1 if the name is none of a checkpoint."""
    match = _NAME.fullmatch(name)
    return int(match[2]) if match else -1


def find(path: Path, say: Callable[[str], None]) -> Path:
    """The newest intact checkpoint in the folder ``path``, or the one that ``path`` is.

    ``say`` is told of damaged checkpoints.
    """
    if (path / _MANIFEST).exists() or _NAME.fullmatch(path.name):
        if damage := inspect(path):
            raise CheckpointError(f"checkpoint {path} is damaged: {damage}; load another one")
        return path
    candidates = committed(path)
    for candidate in reversed(candidates):
        damage = inspect(candidate)
        if not damage:
            return candidate
        say(f"hocket: checkpoint {candidate} is damaged ({damage}): trying the one before")
    if candidates:
        raise CheckpointError(f"none of the {len(candidates)} checkpoints in {path} is intact: see above")
    raise CheckpointError(f"there is no checkpoint in {path}: check the path")


def inspect(path: Path) -> str:
    """What is wrong with a checkpoint; nothing if all of its files are intact.

    Raises:
        CheckpointError: the checkpoint was written by a newer version of Hocket.
    """
    try:
        first, _, text = (path / _MANIFEST).read_text(encoding="utf-8").partition("\n")
        content: dict[str, Any] = json.loads(text)
        intact = json.loads(first)["crc32"] == zlib.crc32(text[:-1].encode())
    except FileNotFoundError:
        return f"{_MANIFEST} is missing"
    except (OSError, ValueError, TypeError, KeyError):
        return f"{_MANIFEST} cannot be read"
    if not intact:
        return f"{_MANIFEST} was altered"
    if not _has(content, {"format": int, "hocket": str}):
        return f"{_MANIFEST} is not one of a checkpoint"
    if content["format"] > FORMAT:
        raise CheckpointError(
            f"checkpoint {path} was written by Hocket {content['hocket']} (format {content['format']}), and this is "
            f"{__version__} (format {FORMAT}): update Hocket"
        )
    if not _has(content, _KEYS) or not all(map(_is_file, content["files"].items())):
        return f"{_MANIFEST} is not one of a checkpoint"
    for name, expected in content["files"].items():
        try:
            if (size := (path / name).stat().st_size) != expected["nbytes"]:
                return f"{name} has {size:,} bytes instead of {expected['nbytes']:,}"
            if tensor_file.measure(path / name).crc32 != expected["crc32"]:
                return f"{name} was altered"
        except FileNotFoundError:
            return f"{name} is missing"
        except OSError as error:
            return f"{name} cannot be read: {error.strerror}"
    return ""


def _has(content: Any, kinds: dict[str, type]) -> bool:
    """Whether ``content`` is a dictionary with these keys, and values of these types."""
    if not isinstance(content, dict):
        return False
    return all(isinstance(content.get(key), kind) and content[key] is not True for key, kind in kinds.items())


def _is_file(item: tuple[str, Any]) -> bool:
    """Whether an entry of the manifest describes a file in the checkpoint's own folder."""
    return Path(item[0]).name == item[0] and _has(item[1], {"nbytes": int, "crc32": int})


def identify(path: Path) -> str:
    """What tells a checkpoint from all others: its manifest, with the checksums of its files; nothing if unreadable."""
    try:
        return hashlib.sha256((path / _MANIFEST).read_bytes()).hexdigest()
    except OSError:
        return ""


def read_manifest(path: Path) -> dict[str, Any]:
    """The manifest of a checkpoint that ``find`` has found."""
    content: dict[str, Any] = json.loads((path / _MANIFEST).read_text(encoding="utf-8").partition("\n")[2])
    return content


def write_file(path: Path, data: bytes | memoryview) -> None:
    """Write a small file and flush it to the disk."""
    descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o666)
    try:
        while data:
            data = data[os.write(descriptor, data) :]
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _flush(folder: Path) -> None:
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _number(path: Path) -> int:
    return int(path.name.partition("-")[0])
