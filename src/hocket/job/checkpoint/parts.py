"""The files of a checkpoint in the making, one for each rank, and how those who write them tell rank 0 about it.

The workers on rank 0's host write theirs, and rank 0 those of other hosts, whose contents have come to it.
"""

from __future__ import annotations

import contextlib
import json
import time
import zlib
from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch

from hocket.errors import CheckpointError
from hocket.job.checkpoint import store
from hocket.job.checkpoint.tensor_file import Image, Written
from hocket.transport.tensor_bytes import view_bytes

_POLL = 0.01  # seconds between two looks for the parts of other ranks


def write(folder: Path, rank: int, image: Image, metadata: str) -> Written:
    """Write this rank's part, and tell rank 0."""
    written = image.write(folder / _part(rank), metadata)
    if rank:
        _tell(folder, rank, asdict(written))
    return written


def fail(folder: Path, rank: int, reason: str) -> None:
    """Tell rank 0 that this rank's part could not be written."""
    with contextlib.suppress(OSError):
        (folder / _part(rank)).unlink(missing_ok=True)  # makes room for the message
        _draft(folder, rank).unlink(missing_ok=True)
        _tell(folder, rank, {"error": reason})


def complete(
    folder: Path, size: int, mine: Written, remote: Mapping[int, torch.Tensor], timeout: float
) -> dict[str, Written]:
    """On rank 0: have the parts of all ranks in ``folder``; what their files are like.

    Args:
        folder: Of the checkpoint.
        size: How many ranks there are.
        mine: What rank 0 has written.
        remote: What the files of ranks on other hosts contain.
        timeout: Seconds to wait for the workers on this host.
    """
    files, deadline = {_part(0): mine}, time.monotonic() + timeout
    for rank in range(1, size):
        if rank in remote:
            files[_part(rank)] = _write_for(folder, rank, remote[rank])
            continue
        while not (outcome := _read_outcome(folder, rank)):
            if time.monotonic() > deadline:
                raise CheckpointError(f"rank {rank} has not written its part in {timeout:g} s")
            time.sleep(_POLL)
        if "error" in outcome:
            raise CheckpointError(f"rank {rank}: {outcome['error']}")
        files[_part(rank)] = Written(**outcome)
        _outcome(folder, rank).unlink()
    return files


def _write_for(folder: Path, rank: int, content: torch.Tensor) -> Written:
    data = view_bytes(content)
    store.write_file(folder / _part(rank), data)
    return Written(len(data), zlib.crc32(data))


def _tell(folder: Path, rank: int, outcome: dict[str, Any]) -> None:
    store.write_file(_draft(folder, rank), json.dumps(outcome).encode())
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
