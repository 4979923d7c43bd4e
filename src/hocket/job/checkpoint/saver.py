"""Writes checkpoints in the background: every rank writes its part, and rank 0 makes a checkpoint of the parts.

The script only waits for the copy. With several hosts the folder is on rank 0's host (others may see it, too): only
the workers there write, and what only other ranks have comes to rank 0 before anything is written.
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
from collections.abc import Callable, Collection, Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any, NoReturn

import torch

from hocket import spans
from hocket.errors import CheckpointError, MismatchError
from hocket.events import Happening, NoSink, PipeSink, Sink
from hocket.job.checkpoint import checkpoint_folder, tensor_file
from hocket.job.checkpoint.checkpoint_folder import CheckpointFolder
from hocket.job.checkpoint.reading import on_rank_0
from hocket.job.checkpoint.snapshot import Camera, Snapshot, Subjects
from hocket.job.checkpoint.tensor_file import Image, Written
from hocket.job.worker import Worker
from hocket.server.server_client import Client
from hocket.transport.tensor_bytes import view_bytes


class Saving:
    """A checkpoint that is being written."""

    def __init__(self) -> None:
        self.path: Path | None = None
        """The path of the checkpoint, on rank 0, when it is complete."""
        self.error: str | None = None
        self._thread: threading.Thread | None = None

    @property
    def done(self) -> bool:
        """Whether this rank has written its part."""
        return self._thread is None or not self._thread.is_alive()

    def wait(self) -> None:
        """Wait until this rank's part (on rank 0: the checkpoint) is on the disk.

        Raises:
            CheckpointError: the checkpoint could not be written.
        """
        if self._thread is not None:
            self._thread.join()
        if self.error is not None:
            raise CheckpointError(self.error)


class Saver:
    """Writes the checkpoints of one job, one after the other."""

    def __init__(self, worker: Worker) -> None:
        self._worker = worker
        self._folders: dict[Path, CheckpointFolder] = {}
        ledger = worker.config.ledger
        self._ledger: Sink = NoSink() if ledger is None else PipeSink(ledger)
        self._camera, self._generation = Camera(worker), worker.together.generation
        self._image: Image | None = None
        self._last = Saving()
        self._good: Path | None = None
        self._failing = ""  # why checkpoints cannot be written now; each reason is printed once

    @property
    def _writers(self) -> Collection[int]:
        """The ranks that write their own parts."""
        return self._worker.together.topology.home

    def save(self, folder: Path, subjects: Subjects, keep: int, *, patient: bool) -> Saving | None:
        """Copy everything and start to write it; collective.

        Args:
            folder: The folder of the checkpoints.
            subjects: What to save.
            keep: How many checkpoints to keep.
            patient: Whether to wait for a checkpoint that is still being written, rather than leave this one out.

        Returns:
            None if the checkpoint was left out.
        """
        worker, folder = self._worker, folder.resolve()
        theirs: dict[int, torch.Tensor] = {}
        if worker.client is not None:  # one worker saves what is on the servers
            theirs = self._gather_own(worker.client, subjects, always=patient)
            if not self._is_first(worker.client):
                return Saving()
        if patient:
            self.settle()
        for check in worker.training.checks.values():
            check.compare()
        with contextlib.ExitStack() as averaged, spans.span(spans.DATA, "take a checkpoint"):
            for strategy in worker.training.strategies:
                averaged.enter_context(strategy.merged())
            return self._save(folder, subjects, keep, theirs)

    def _gather_own(self, client: Client, subjects: Subjects, *, always: bool) -> dict[int, torch.Tensor]:
        """What only others have (random numbers, buffers), as files by rank, if all workers are in step; collective.

        Where workers are not in step, which all know alike, nobody waits, and the result is empty.

        Args:
            client: The connection to the servers, through which workers meet.
            subjects: What is saved.
            always: Whether all workers make the same call, also when they have not taken the same steps.
        """
        strategies, rank = self._worker.training.strategies, self._worker.config.rank
        if not strategies or not all(each.spec.in_step for each in strategies) or not (always or client.is_even):
            return {}
        mine = view_bytes(self._camera.take_own(subjects)) if rank else b""
        found = client.gather("a checkpoint", bytes(mine))
        if len(found) < client.workers:
            return {}
        return {rank: torch.frombuffer(bytearray(data), dtype=torch.uint8) for rank, data in found.items() if rank}

    def _save(self, folder: Path, subjects: Subjects, keep: int, theirs: dict[int, torch.Tensor]) -> Saving | None:
        """Save model and optimizer as they are now, with the files of other ranks that are here already.

        If workers are lost meanwhile, the others take everything again: each has another part of it to write.
        """
        while True:
            group, generation = self._worker.together, self._worker.together.generation
            if generation != self._generation:
                self._camera, self._image, self._generation = Camera(self._worker), None, generation
            taken = self._take(folder, subjects, theirs)
            if group.generation == generation:
                break
            if taken is not None and group.rank == 0:
                shutil.rmtree(taken[0], ignore_errors=True)
                self._folders[folder].release()
        if taken is None:
            return None
        self._last = Saving()
        if group.rank in self._writers:
            args = (self._last, *taken, keep, group.rank, group.size, generation)
            self._last._thread = threading.Thread(target=self._write, args=args, name="hocket-save")
            self._last._thread.start()
        return self._last

    def _take(
        self, folder: Path, subjects: Subjects, theirs: dict[int, torch.Tensor]
    ) -> tuple[Path, Image, Snapshot, dict[int, torch.Tensor]] | None:
        """All that is to be written, and where; None if a checkpoint is still being written. Collective."""
        worker, busy = self._worker, not self._last.done
        taken = self._camera.take(subjects, len(theirs))
        number = zlib.crc32(repr((taken.step, taken.number)).encode())
        place = zlib.crc32(str(folder).encode())
        rows = worker.together.allgather(torch.tensor([number, place, busy])).tolist()
        if any(row[0] != rows[0][0] for row in rows) or any(rows[rank][1] != rows[0][1] for rank in self._writers):
            self._disagree(folder, taken)
        if any(row[2] for row in rows):
            if worker.together.rank == 0:
                worker.sink.put(Happening("checkpoint left out", {"step": worker.training.counts.step}))
            return None
        target = self._begin(folder, taken)
        image = self._copy(taken)
        return target, image, taken, self._bring(image, taken) | theirs

    def open(self, folder: Path) -> None:
        """Make sure, before any checkpoint is due, that checkpoints can be written to ``folder``; collective."""
        folder = folder.resolve()
        kept = self._folder(folder)
        on_rank_0(self._worker.communicator, lambda: kept.open(keep=True))

    def adopt(self, folder: Path) -> None:
        """Write checkpoints to a folder that other workers have opened."""
        folder = folder.resolve()
        self._folder(folder)

    def _folder(self, folder: Path) -> CheckpointFolder:
        job = self._worker.config.job or ""
        return self._folders.setdefault(folder, CheckpointFolder(folder, self._ledger, job))

    def _is_first(self, client: Client) -> bool:
        """Whether this worker saves for all: rank 0, or the next on the host of the folder that stays."""
        rank = self._worker.config.rank
        home = self._worker.communicator.topology.home
        if rank == 0:
            return True
        there = {rank, *client.live()} - ({*client.wanted()["leaving"]} - {rank})
        return rank in home and rank == min(set(home) & there)

    def settle(self) -> None:
        """Wait until nothing is being written by this rank."""
        with contextlib.suppress(CheckpointError):
            self._last.wait()

    def _disagree(self, folder: Path, taken: Snapshot) -> NoReturn:
        mine = json.dumps([f"the folder {folder}", f"step {taken.step}", *taken.described]).encode()
        described = [json.loads(part) for part in self._worker.together.gather_bytes(mine)]
        for rank, other in enumerate(described):
            if rank not in self._writers:
                other[0] = described[0][0]  # this entry is not used there
            for here, there in itertools.zip_longest(described[0], other, fillvalue="nothing"):
                if here != there:
                    raise MismatchError(
                        f"the ranks do not save the same: {here} on rank 0, {there} on rank {rank}; call hocket.save() "
                        "on all ranks at the same step, with the same objects"
                    )
        raise AssertionError("equal after all")

    def _begin(self, folder: Path, taken: Snapshot) -> Path:
        """Have rank 0 make the new folder, and tell everyone its path."""
        step = taken.step
        kept = self._folder(folder)
        path = on_rank_0(self._worker.together, lambda: str(kept.begin(step, secrets.token_hex(6))))
        if self._worker.together.rank == 0:
            self._worker.sink.put(Happening("checkpoint begun", {"folder": path, "step": step}))
        return Path(path)

    def _copy(self, taken: Snapshot) -> Image:
        described = tensor_file.describe(taken.tensors)
        if self._image is None or self._image.described != described:
            self._image = Image(described)
        self._image.fill(taken.tensors.values())
        taken.tensors = {}
        return self._image

    def _bring(self, image: Image, taken: Snapshot) -> dict[int, torch.Tensor]:
        """Bring what only ranks of other hosts have to rank 0, as files that it writes for them; collective."""
        if len(self._writers) == self._worker.together.size:
            return {}
        writes = self._worker.together.rank in self._writers
        mine = torch.empty(0, dtype=torch.uint8) if writes else image.content(taken.own)
        contents = self._worker.together.collect(mine, 0)
        return {rank: content for rank, content in enumerate(contents) if rank not in self._writers}

    def _write(
        self,
        saving: Saving,
        folder: Path,
        image: Image,
        taken: Snapshot,
        remote: dict[int, torch.Tensor],
        keep: int,
        rank: int,
        size: int,
        generation: int,
    ) -> None:
        """Write the checkpoint, in a thread of its own; rank and size may be others meanwhile."""
        group, begin = self._worker.together, time.perf_counter()
        try:
            written = write_part(folder, rank, image, taken.own)
            if rank == 0:
                everyone, timeout = max(size, len(remote) + 1), self._worker.config.timeout
                files = complete(folder, everyone, written, remote, timeout, lambda: group.generation != generation)
                saving.path = self._folders[folder.parent].commit(folder, taken.manifest, files, keep)
        except Exception as error:
            reason = (error.strerror if isinstance(error, OSError) else None) or str(error) or repr(error)
            self._fail(saving, folder, reason, rank)
            return
        finally:
            if rank == 0:
                self._folders[folder.parent].release()
        if rank == 0:
            self._good, self._failing = saving.path, ""
            end = time.perf_counter()
            spans.add(spans.DATA, "write a checkpoint", begin, end, track="checkpoints")
            seconds = round(end - begin, 3)
            details = {"folder": str(folder), "path": str(saving.path), "step": taken.step, "seconds": seconds}
            self._worker.sink.put(Happening("checkpoint saved", details))

    def _fail(self, saving: Saving, folder: Path, reason: str, rank: int) -> None:
        saving.error = f"the checkpoint {folder.name[1:].rpartition('.')[0]} could not be written: {reason}"
        if rank:
            tell_failure(folder, rank, reason)
            return
        shutil.rmtree(folder, ignore_errors=True)
        if reason != self._failing:
            self._failing = reason
            last = f"the last good one is {self._good}" if self._good else "there is no good one of this run yet"
            line = f"hocket: {saving.error}; training goes on, {last} (said once, until one can be written again)"
            print(line, file=sys.stderr, flush=True)
        self._worker.sink.put(Happening("checkpoint failed", {"folder": str(folder), "reason": reason}))


_POLL = 0.01  # seconds between two looks for the parts of other ranks


def write_part(folder: Path, rank: int, image: Image, metadata: str) -> Written:
    """Write this rank's part, and tell rank 0."""
    written = image.write(folder / _part(rank), metadata)
    if rank:
        _tell(folder, rank, asdict(written))
    return written


def tell_failure(folder: Path, rank: int, reason: str) -> None:
    """Tell rank 0 that this rank's part could not be written."""
    with contextlib.suppress(OSError):
        (folder / _part(rank)).unlink(missing_ok=True)  # makes room for the message
        _draft(folder, rank).unlink(missing_ok=True)
        _tell(folder, rank, {"error": reason})


def complete(
    folder: Path,
    size: int,
    mine: Written,
    remote: Mapping[int, torch.Tensor],
    timeout: float,
    has_changed: Callable[[], bool],
) -> dict[str, Written]:
    """On rank 0: wait for the parts of all ranks in ``folder``; returns the size and checksum of each file.

    Args:
        folder: The folder of the checkpoint.
        size: How many ranks there are.
        mine: What rank 0 has written.
        remote: What the files of ranks on other hosts contain.
        timeout: Seconds to wait for the workers on this host.
        has_changed: Whether workers were lost meanwhile.
    """
    files, deadline = {_part(0): mine}, time.monotonic() + timeout
    for rank in range(1, size):
        if rank in remote:
            files[_part(rank)] = _write_for(folder, rank, remote[rank])
            continue
        while not (outcome := _read_outcome(folder, rank)):
            if time.monotonic() > deadline:
                raise CheckpointError(f"rank {rank} has not written its part in {timeout:g} s")
            if has_changed():
                raise CheckpointError("a worker was lost meanwhile")
            time.sleep(_POLL)
        if "error" in outcome:
            raise CheckpointError(f"rank {rank}: {outcome['error']}")
        files[_part(rank)] = Written(**outcome)
        _outcome(folder, rank).unlink()
    return files


def _write_for(folder: Path, rank: int, content: torch.Tensor) -> Written:
    data = view_bytes(content)
    checkpoint_folder.write_file(folder / _part(rank), data)
    return Written(len(data), zlib.crc32(data))


def _tell(folder: Path, rank: int, outcome: dict[str, Any]) -> None:
    checkpoint_folder.write_file(_draft(folder, rank), json.dumps(outcome).encode())
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
