"""Copies of a script that do not know of each other, because something else than a launcher of Hocket's made them."""

from __future__ import annotations

import json
import sys
from collections import Counter
from collections.abc import Mapping
from pathlib import Path
from typing import NamedTuple

_STEP = 1 << 31  # Slurm numbers from here on what is no step of srun: a batch script, an interactive shell


class Copies(NamedTuple):
    """How many there seem to be, which of them this one is, by what sign, and on which hosts if that is known."""

    total: int
    number: int
    sign: str
    hosts: dict[str, int] | None = None  # copies by host; empty if there are several, and they are not known


def warn(environ: Mapping[str, str]) -> None:
    """Say a line on standard error if the environment shows that this process is one of several; one copy says it."""
    found = find(environ)
    if found is None or found.total < 2:
        return
    speaker = 0
    many = str(found.total)
    if found.sign == "PMIX_RANK":  # which does not say how many there are, so the first one cannot know
        speaker, many = 1, "several"
    # What mpirun or srun starts has one screen; what TF_CONFIG describes may have as many as there are hosts.
    if found.number == speaker or found.sign == "TF_CONFIG":
        print(
            f"hocket: this seems to be one of {many} copies of the script ({found.sign}), and each of them trains "
            f"alone, on all the data: make them one job with '{_command(found)}'",
            file=sys.stderr,
            flush=True,
        )


def find(environ: Mapping[str, str]) -> Copies | None:
    """What the environment says of copies; None if it says nothing."""
    for sign, rank, here in (
        ("OMPI_COMM_WORLD_SIZE", "OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_LOCAL_SIZE"),
        ("PMI_SIZE", "PMI_RANK", "MPI_LOCALNRANKS"),
    ):
        if count := _number(environ, sign):
            spread = 0 < _number(environ, here) < count
            return Copies(count, _number(environ, rank), f"{sign}={count}", {} if spread else None)
    if "SLURM_PROCID" in environ and 0 <= _number(environ, "SLURM_STEP_ID", -1) < _STEP:
        count = _number(environ, "SLURM_STEP_NUM_TASKS") or _number(environ, "SLURM_NTASKS")
        spread = (_number(environ, "SLURM_STEP_NUM_NODES") or _number(environ, "SLURM_NNODES")) > 1
        return Copies(count, _number(environ, "SLURM_PROCID"), f"SLURM_NTASKS={count}", {} if spread else None)
    if "PMIX_RANK" in environ:
        number = _number(environ, "PMIX_RANK")
        return Copies(number + 1, number, "PMIX_RANK")  # at least
    return _of_tensorflow(environ.get("TF_CONFIG", ""))


def _of_tensorflow(text: str) -> Copies | None:
    try:
        told = json.loads(text)
        tasks = [str(address) for addresses in told["cluster"].values() for address in addresses]
    except (ValueError, KeyError, TypeError, AttributeError):
        return None
    hosts = Counter(address.rpartition(":")[0] or address for address in tasks)
    return Copies(len(tasks), 0, "TF_CONFIG", dict(hosts) if len(hosts) > 1 else None)


def _command(found: Copies) -> str:
    script = Path(sys.argv[0]).name or "train.py"
    if found.hosts is None:
        return f"hocket run -n {found.total} {script}"
    hosts = ",".join(f"{host}:{count}" for host, count in found.hosts.items())
    return f"hocket run -H {hosts or 'HOST1:N1,HOST2:N2'} {script}"


def _number(environ: Mapping[str, str], name: str, default: int = 0) -> int:
    text = environ.get(name, "")
    return int(text) if text.isdecimal() else default
