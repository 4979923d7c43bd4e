"""Writes checkpoints in the background: every rank its part, and rank 0 makes a checkpoint of them.

The script only waits for the copy. Over several hosts the folder is on rank 0's (or all see it; nobody needs to know):
only the workers there write, and what other ranks alone have comes to rank 0 before anything is written.
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
from pathlib import Path
from typing import NoReturn

import torch

from hocket import spans
from hocket.errors import CheckpointError, MismatchError
from hocket.events import Happening, NoSink, PipeSink, Sink
from hocket.job.checkpoint import parts, tensor_file
from hocket.job.checkpoint.snapshot import Camera, Snapshot, Subjects
from hocket.job.checkpoint.store import Store
from hocket.job.checkpoint.tensor_file import Image
from hocket.job.runtime import Runtime
from hocket.server.client import Client
from hocket.transport.tensor_bytes import view_bytes


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
        self._writers = runtime.together.topology.home
        self._writes = runtime.together.rank in self._writers
        self._stores: dict[Path, Store] = {}
        ledger = runtime.config.ledger
        self._ledger: Sink = NoSink() if ledger is None else PipeSink(ledger)
        self._camera = Camera(runtime)
        self._image: Image | None = None
        self._last = Saving()
        self._good: Path | None = None
        self._failing = ""  # why checkpoints cannot be written now; it is said once

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
        theirs: dict[int, torch.Tensor] = {}
        if runtime.client is not None:  # one worker saves what is on the servers
            theirs = self._gather_own(runtime.client, subjects, always=patient)
            if not self._is_first(runtime.client):
                return Saving()
        if patient:
            self.settle()
        for check in runtime.checks.values():
            check.compare()
        with contextlib.ExitStack() as averaged, spans.span(spans.DATA, "take a checkpoint"):
            for strategy in runtime.strategies:
                averaged.enter_context(strategy.merged())
            return self._save(folder, subjects, keep, theirs)

    def _gather_own(self, client: Client, subjects: Subjects, *, always: bool) -> dict[int, torch.Tensor]:
        """What only others have (random numbers, buffers), as files by rank, if all workers are in step; collective.

        Where they are not, which all know alike, each may be at another step: then nobody waits, and nothing is here.

        Args:
            client: To the servers, where workers meet.
            subjects: What is saved.
            always: Whether all workers make the same call, also when they have not taken the same steps.
        """
        strategies, rank = self._runtime.strategies, self._runtime.config.rank
        if not strategies or not all(each.in_step for each in strategies) or not (always or client.is_even):
            return {}
        mine = view_bytes(self._camera.take_own(subjects)) if rank else b""
        found = client.gather("a checkpoint", bytes(mine))
        if len(found) < client.workers:
            return {}
        return {rank: torch.frombuffer(bytearray(data), dtype=torch.uint8) for rank, data in found.items() if rank}

    def _save(self, folder: Path, subjects: Subjects, keep: int, theirs: dict[int, torch.Tensor]) -> Saving | None:
        """What model and optimizer are now, with the files of other ranks that are here already."""
        runtime, busy = self._runtime, not self._last.done
        taken = self._camera.take(subjects, len(theirs))
        number = zlib.crc32(repr((taken.step, taken.number)).encode())
        place = zlib.crc32(str(folder).encode())
        rows = runtime.together.allgather(torch.tensor([number, place, busy])).tolist()
        if any(row[0] != rows[0][0] for row in rows) or any(rows[rank][1] != rows[0][1] for rank in self._writers):
            self._disagree(folder, taken)
        if any(row[2] for row in rows):
            if runtime.together.rank == 0:
                runtime.sink.put(Happening("checkpoint left out", {"step": runtime.step}))
            return None
        target = self._begin(folder, taken)
        image = self._copy(taken)
        remote = self._bring(image, taken) | theirs
        self._last = Saving()
        if self._writes:
            args = (self._last, target, image, taken, remote, keep)
            self._last._thread = threading.Thread(target=self._write, args=args, name="hocket-save")
            self._last._thread.start()
        return self._last

    def open(self, folder: Path) -> None:
        """Make sure, before any checkpoint is due, that they can be written to ``folder``; collective."""
        folder = folder.resolve()
        self._runtime.on_rank_0(lambda: self._stores.setdefault(folder, Store(folder, self._ledger)).open(keep=True))

    def _is_first(self, client: Client) -> bool:
        """Whether this worker saves for all: rank 0, or if it is lost the next one on its host, where the folder is."""
        rank = self._runtime.config.rank
        home = self._runtime.communicator.topology.home
        return rank == 0 or (rank in home and rank == min(set(home) & set(client.live()), default=-1))

    def settle(self) -> None:
        """Wait until nothing is being written by this rank."""
        with contextlib.suppress(CheckpointError):
            self._last.wait()

    def _disagree(self, folder: Path, taken: Snapshot) -> NoReturn:
        mine = json.dumps([f"the folder {folder}", f"step {taken.step}", *taken.described]).encode()
        described = [json.loads(part) for part in self._runtime.together.gather_bytes(mine)]
        for rank, other in enumerate(described):
            if rank not in self._writers:
                other[0] = described[0][0]  # is not used there
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
        kept = self._stores.setdefault(folder, Store(folder, self._ledger))
        path = self._runtime.on_rank_0(lambda: str(kept.begin(step, secrets.token_hex(6))), self._runtime.together)
        if self._runtime.together.rank == 0:
            self._runtime.sink.put(Happening("checkpoint begun", {"folder": path, "step": step}))
        return Path(path)

    def _copy(self, taken: Snapshot) -> Image:
        described = tensor_file.describe(taken.tensors)
        if self._image is None or self._image.described != described:
            self._image = Image(described)
        self._image.fill(taken.tensors.values())
        taken.tensors = {}
        return self._image

    def _bring(self, image: Image, taken: Snapshot) -> dict[int, torch.Tensor]:
        """Have on rank 0 what only ranks of other hosts have, as the files that it will write for them; collective."""
        if len(self._writers) == self._runtime.together.size:
            return {}
        mine = torch.empty(0, dtype=torch.uint8) if self._writes else image.content(taken.own)
        contents = self._runtime.together.collect(mine, 0)
        return {rank: content for rank, content in enumerate(contents) if rank not in self._writers}

    def _write(
        self,
        saving: Saving,
        folder: Path,
        image: Image,
        taken: Snapshot,
        remote: dict[int, torch.Tensor],
        keep: int,
    ) -> None:
        """In a thread of its own."""
        rank, begin = self._runtime.together.rank, time.perf_counter()
        try:
            written = parts.write(folder, rank, image, taken.own)
            if rank == 0:
                config, size = self._runtime.config, max(self._runtime.together.size, len(remote) + 1)
                files = parts.complete(folder, size, written, remote, config.timeout)
                saving.path = self._stores[folder.parent].commit(folder, taken.manifest, files, keep)
        except Exception as error:
            reason = (error.strerror if isinstance(error, OSError) else None) or str(error) or repr(error)
            self._fail(saving, folder, reason)
            return
        finally:
            if rank == 0:
                self._stores[folder.parent].release()
        if rank == 0:
            self._good, self._failing = saving.path, ""
            end = time.perf_counter()
            spans.add(spans.DATA, "write a checkpoint", begin, end, track="checkpoints")
            seconds = round(end - begin, 3)
            details = {"folder": str(folder), "path": str(saving.path), "step": taken.step, "seconds": seconds}
            self._runtime.sink.put(Happening("checkpoint saved", details))

    def _fail(self, saving: Saving, folder: Path, reason: str) -> None:
        rank = self._runtime.together.rank
        saving.error = f"the checkpoint {folder.name[1:].rpartition('.')[0]} could not be written: {reason}"
        if rank:
            parts.fail(folder, rank, reason)
            return
        shutil.rmtree(folder, ignore_errors=True)
        if reason != self._failing:
            self._failing = reason
            last = f"the last good one is {self._good}" if self._good else "there is no good one of this run yet"
            line = f"hocket: {saving.error}; training goes on, {last} (said once, until one can be written again)"
            print(line, file=sys.stderr, flush=True)
        self._runtime.sink.put(Happening("checkpoint failed", {"folder": str(folder), "reason": reason}))
