"""Which checkpoint is loaded, and by which way it comes to each host.

Rank 0 decides which. A host that finds the very same one at its own path (of a file system that all share, or as a
copy) reads it; if one does not, rank 0 sends the contents to all. Every rank knows the way before anything is read.
"""

from __future__ import annotations

import contextlib
import sys
from pathlib import Path

from hocket.errors import CheckpointError
from hocket.job.checkpoint import store
from hocket.job.checkpoint.source import Files, Sent, Source
from hocket.job.runtime import Runtime


def find(runtime: Runtime, path: Path) -> tuple[Path, Source]:
    """The newest intact checkpoint in ``path``, or the one that it is: where it is for rank 0, and what is in it.

    Collective; what is wrong with it is raised on all ranks.
    """

    def look() -> tuple[str, str, str]:
        chosen = store.find(path, _say)
        return str(chosen), str(chosen.relative_to(path)), store.identify(chosen)

    found, below, identity = runtime.on_rank_0(look)
    return Path(found), _open(runtime, Path(found), path / below, identity)


def _open(runtime: Runtime, found: Path, mine: Path, identity: str) -> Source:
    communicator, topology = runtime.communicator, runtime.communicator.topology
    told = ""
    if topology.rank == 0:
        told = str(found)
    elif topology.local_rank == 0 and _is_intact(mine, identity):  # looks for all of its host
        told = str(mine)
    here = communicator.gather_bytes(told.encode())[topology.local[0]].decode()
    files, reason = None, "it is not there, or another one"
    if here:
        try:
            files, reason = Files(Path(here)), ""
        except Exception as error:  # of this system, of safetensors, of JSON: whatever it is, it cannot be read here
            reason = f"{type(error).__name__}: {error}"
    reasons = [told.decode() for told in communicator.gather_bytes(reason.encode())]
    if reasons[0]:
        raise CheckpointError(f"checkpoint {found} on {topology.name_of(0)} cannot be read: {reasons[0]}")
    if files is not None and not any(reasons):
        return files
    if topology.rank == 0:
        without = dict.fromkeys(topology.name_of(rank) for rank, reason in enumerate(reasons) if reason)
        _say(f"hocket: {found} is sent from {topology.name_of(0)}: not found on {', '.join(without)}")
    return Sent(communicator, files if topology.rank == 0 else None)


def warn_of_others(runtime: Runtime, folder: Path) -> None:
    """Say so if another host has a newer checkpoint in its ``folder`` than rank 0, where the decision is; collective.

    It is not loaded: whoever lists the hosts of a job in another order than before may not want to begin anew.
    """
    topology = runtime.communicator.topology
    if len(topology.hosts) == 1:
        return
    mine = ""
    if topology.local_rank == 0:
        with contextlib.suppress(OSError, IndexError):
            mine = store.committed(folder)[-1].name
    names = [told.decode() for told in runtime.communicator.gather_bytes(mine.encode())]
    newest = store.step_of(names[0])
    if topology.rank == 0 and (newer := [rank for rank, name in enumerate(names) if store.step_of(name) > newest]):
        host = topology.name_of(newer[0])
        _say(
            f"hocket: {host} has a newer checkpoint in {folder} ({names[newer[0]]}) than {topology.name_of(0)}, where "
            f"rank 0 is: to go on from it, list {host} first, or copy it to {topology.name_of(0)}"
        )


def _is_intact(path: Path, identity: str) -> bool:
    try:
        return store.identify(path) == identity and not store.inspect(path)
    except CheckpointError:
        return False


def _say(line: str) -> None:
    print(line, file=sys.stderr, flush=True)
