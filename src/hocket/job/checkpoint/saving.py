"""Writes checkpoints in the background: every rank its part, and rank 0 makes a checkpoint of them.

The script only waits for the copy. Ranks tell rank 0 how writing went by small files beside their parts.
"""

from __future__ import annotations

import contextlib
import itertools
import json
import secrets
import shutil
import sys
import threading
import time
import zlib
from dataclasses import asdict
from pathlib import Path
from typing import Any, NoReturn

import torch

from hocket.errors import CheckpointError, MismatchError
from hocket.events import Happening
from hocket.job.checkpoint import store, tensor_file
from hocket.job.checkpoint.packer import Text
from hocket.job.checkpoint.snapshot import Camera, Snapshot, Subjects
from hocket.job.checkpoint.store import Store
from hocket.job.checkpoint.tensor_file import Image, Written
from hocket.job.runtime import Runtime

_POLL = 0.01  # seconds between two looks for the parts of other ranks


class Saving:
    """A checkpoint that is being written."""

    def __init__(self) -> None:
        self.path: Path | None = None
        """Where it is, on rank 0, when it is complete."""
        self.error: str | None = None
        self._thread: threading.Thread | None = None

    @property
    def done(self) -> bool:
        """Whether this rank's part in it is over."""
        return self._thread is None or not self._thread.is_alive()

    def wait(self) -> None:
        """Until this rank's part (on rank 0: the checkpoint) is on the disk.

        Raises:
            CheckpointError: it could not be written.
        """
        if self._thread is not None:
            self._thread.join()
        if self.error is not None:
            raise CheckpointError(self.error)


class Saver:
    """Writes the checkpoints of one job, one after the other."""

    def __init__(self, runtime: Runtime) -> None:
        self._runtime = runtime
        self._stores: dict[Path, Store] = {}
        self._camera = Camera(runtime)
        self._image: Image | None = None
        self._last = Saving()
        self._good: Path | None = None

    def save(self, folder: Path, subjects: Subjects, keep: int, *, patient: bool) -> Saving | None:
        """Copy everything and start to write it; collective.

        Args:
            folder: Of the checkpoints.
            subjects: What to save.
            keep: How many checkpoints to keep.
            patient: Wait for the one before if it is still being written, rather than leave this one out.

        Returns:
            None if it was left out.
        """
        runtime, folder = self._runtime, folder.resolve()
        if patient:
            self.settle()
        busy = not self._last.done
        taken = self._camera.take(subjects)
        number = zlib.crc32(repr((str(folder), taken.step, taken.number)).encode())
        rows = runtime.communicator.allgather(torch.tensor([number, busy])).tolist()
        if any(row[0] != rows[0][0] for row in rows):
            self._disagree(folder, taken)
        if any(row[1] for row in rows):
            if runtime.config.rank == 0:
                runtime.sink.put(Happening("checkpoint left out", {"step": runtime.step}))
            return None
        target = self._begin(folder, taken)
        image = self._copy(taken)
        self._last = Saving()
        thread = threading.Thread(target=self._write, args=(self._last, target, image, taken, keep), name="hocket-save")
        self._last._thread = thread
        thread.start()
        return self._last

    def open(self, folder: Path) -> None:
        """Make sure, before any checkpoint is due, that they can be written to ``folder``; collective."""
        folder = folder.resolve()
        self._runtime.on_rank_0(lambda: self._stores.setdefault(folder, Store(folder)).open(keep=True))

    def settle(self) -> None:
        """Wait until nothing is being written by this rank."""
        with contextlib.suppress(CheckpointError):
            self._last.wait()

    def _disagree(self, folder: Path, taken: Snapshot) -> NoReturn:
        mine = json.dumps([f"the folder {folder}", f"step {taken.step}", *taken.described]).encode()
        described = [json.loads(part) for part in self._runtime.communicator.gather_bytes(mine)]
        for rank, other in enumerate(described):
            for here, there in itertools.zip_longest(described[0], other, fillvalue="nothing"):
                if here != there:
                    raise MismatchError(
                        f"the ranks do not save the same: {here} on rank 0, {there} on rank {rank}; call hocket.save() "
                        "on all ranks at the same step, with the same objects"
                    )
        raise AssertionError("equal after all")

    def _begin(self, folder: Path, taken: Snapshot) -> Path:
        """Have rank 0 make the new folder, and everyone know it."""
        step = taken.step
        kept = self._stores.setdefault(folder, Store(folder))
        path = self._runtime.on_rank_0(lambda: str(kept.begin(step, secrets.token_hex(6))))
        if self._runtime.config.rank == 0:
            self._runtime.sink.put(Happening("checkpoint begun", {"folder": path, "step": step}))
        return Path(path)

    def _copy(self, taken: Snapshot) -> Image:
        described = tensor_file.describe(taken.tensors)
        if self._image is None or self._image.described != described:
            self._image = Image(described)
        self._image.fill(taken.tensors.values())
        taken.tensors = {}
        return self._image

    def _write(self, saving: Saving, folder: Path, image: Image, taken: Snapshot, keep: int) -> None:
        """In a thread of its own."""
        rank, begin = self._runtime.config.rank, time.perf_counter()
        try:
            written = _write_part(folder, rank, image, taken.own)
            if rank == 0:
                saving.path = self._commit(folder, taken.manifest, written, keep)
        except Exception as error:
            reason = (error.strerror if isinstance(error, OSError) else None) or str(error) or repr(error)
            self._fail(saving, folder, reason)
            return
        finally:
            if rank == 0:
                self._stores[folder.parent].release()
        if rank == 0:
            self._good = saving.path
            seconds = round(time.perf_counter() - begin, 3)
            details = {"folder": str(folder), "path": str(saving.path), "step": taken.step, "seconds": seconds}
            self._runtime.sink.put(Happening("checkpoint saved", details))

    def _commit(self, folder: Path, manifest: dict[str, Text], written: Written, keep: int) -> Path:
        """Wait for the parts of all ranks, and make a checkpoint of them."""
        files = {_part(0): written}
        deadline = time.monotonic() + self._runtime.config.timeout
        for rank in range(1, self._runtime.config.size):
            while not (outcome := _read_outcome(folder, rank)):
                if time.monotonic() > deadline:
                    raise CheckpointError(f"rank {rank} has not written its part in {self._runtime.config.timeout:g} s")
                time.sleep(_POLL)
            if "error" in outcome:
                raise CheckpointError(f"rank {rank}: {outcome['error']}")
            files[_part(rank)] = Written(**outcome)
            _outcome(folder, rank).unlink()
        return self._stores[folder.parent].commit(folder, manifest, files, keep)

    def _fail(self, saving: Saving, folder: Path, reason: str) -> None:
        rank = self._runtime.config.rank
        saving.error = f"the checkpoint {folder.name[1:].rpartition('.')[0]} could not be written: {reason}"
        if rank:  # what this rank has written makes room for the message
            with contextlib.suppress(OSError):
                (folder / _part(rank)).unlink(missing_ok=True)
                _draft(folder, rank).unlink(missing_ok=True)
                _tell(folder, rank, {"error": reason})
            return
        shutil.rmtree(folder, ignore_errors=True)
        last = f"the last good one is {self._good}" if self._good else "there is no good one of this run yet"
        print(f"hocket: {saving.error}; training goes on, {last}", file=sys.stderr, flush=True)
        self._runtime.sink.put(Happening("checkpoint failed", {"folder": str(folder), "reason": reason}))


def _write_part(folder: Path, rank: int, image: Image, metadata: str) -> Written:
    written = image.write(folder / _part(rank), metadata)
    if rank:
        _tell(folder, rank, asdict(written))
    return written


def _tell(folder: Path, rank: int, outcome: dict[str, Any]) -> None:
    store.write_file(_draft(folder, rank), json.dumps(outcome))
    _draft(folder, rank).rename(_outcome(folder, rank))


def _read_outcome(folder: Path, rank: int) -> dict[str, Any] | None:
    try:
        outcome: dict[str, Any] = json.loads(_outcome(folder, rank).read_text())
    except FileNotFoundError:
        return None
    return outcome


def _part(rank: int) -> str:
    return f"part-{rank}.safetensors"


def _draft(folder: Path, rank: int) -> Path:
    return folder / f"part-{rank}.draft"


def _outcome(folder: Path, rank: int) -> Path:
    return folder / f"part-{rank}.json"
