"""Where records of runs are: one folder each, named by date, time, script and six digits.

Three of the digits are the fraction of the second, so that runs sort by their start, and three are random.
"""

from __future__ import annotations

import re
import secrets
import time
from pathlib import Path

from hocket.errors import RecordError, UsageError
from hocket.observe.tables import FILE


def make(parent: Path, script: str) -> Path:
    """Make the folder of a new run below ``parent``; its name is the run's id."""
    name = re.sub(r"[^A-Za-z0-9.-]+", "-", script)[:40].strip("-.") or "script"
    while True:
        now = time.time()
        date = time.strftime("%Y-%m-%d_%H-%M-%S", time.localtime(now))
        folder = parent / f"{date}_{name}_{int(now % 1 * 4096):03x}{secrets.randbelow(4096):03x}"
        try:
            parent.mkdir(parents=True, exist_ok=True)
            folder.mkdir()
        except FileExistsError:
            if parent.is_dir():
                continue  # another run has taken this name
            raise RecordError(f"{parent} is no folder") from None
        except OSError as error:
            raise RecordError(error.strerror or str(error)) from None
        return folder


def all_in(parent: Path) -> list[Path]:
    """The folders of all runs, oldest first."""
    found = [file.parent for file in parent.glob(f"*/{FILE}")]
    return sorted(found, key=lambda folder: (folder.name[:19], folder.name[-6:]))


def find(parent: Path, part: str) -> Path:
    """The run whose id contains ``part``, or the one that began ``last``."""
    found = all_in(parent)
    if not found:
        raise UsageError(f"no runs in {parent}: start one with hocket run, or name another folder with --run-dir")
    if part == "last":
        return found[-1]
    matching = [folder for folder in found if part == folder.name] or [f for f in found if part in f.name]
    if len(matching) == 1:
        return matching[0]
    what = f"{len(matching)} runs have {part!r} in their id" if matching else f"no run has {part!r} in its id"
    choices = [folder.name for folder in matching or found]
    shown = ", ".join(choices[-5:]) + (f" and {len(choices) - 5} more" if len(choices) > 5 else "")
    raise UsageError(f"{what}; {'write more of one of' if matching else 'there are'} {shown}")
