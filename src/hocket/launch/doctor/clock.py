"""Checks of the clock: against the file system here, and against other hosts by round trips."""

from __future__ import annotations

import os
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

from hocket import errors
from hocket.launch.doctor.finding import Finding, note, ok, wrong

_FILES = 2.0  # seconds between the clock and that of a file system that are worth a look
_HOSTS = 1.0
_NTP = "set the clock by NTP: timedatectl set-ntp true"


class Trip(NamedTuple):
    """One question for another's clock: when it was asked and answered by ours, and what theirs said."""

    asked: float
    answered: float
    theirs: float


def check(folder: str) -> list[Finding]:
    """Files that are written now should be of now, and those of Hocket of the past."""
    installed = Path(errors.__file__).stat().st_mtime
    if installed > time.time() + 3600:
        days = (installed - time.time()) / 86400
        return [wrong("clock", f"it stands {days:.1f} days before Hocket was installed here", _NTP)]
    try:
        with tempfile.TemporaryFile(dir=folder) as file:
            before = time.time()
            file.write(b"x")
            file.flush()
            stamp, after = os.fstat(file.fileno()).st_mtime, time.time()
    except OSError:
        return [ok("clock", "not compared with a file system: nothing can be written here")]
    apart = max(before - stamp, stamp - after, 0.0)
    if apart > _FILES:
        way = "ahead of" if stamp < before else "behind"
        seen = f"{apart:.1f} s {way} that of the file system of {folder}"
        return [note("clock", seen, f"set the clocks of this machine and of its file server by NTP ({_NTP})")]
    return [ok("clock", "agrees with the file system")]


def apart(trips: Sequence[Trip]) -> tuple[float, float]:
    """By how many seconds their clock is ahead of ours, and how far from it the truth can be: half the best trip."""
    best = min(trips, key=lambda trip: trip.answered - trip.asked)
    return best.theirs - (best.asked + best.answered) / 2, (best.answered - best.asked) / 2


def judge(ahead: float, uncertain: float) -> Finding:
    """What to say of a clock that is so much ahead of that of the machine on which the command runs."""
    way = "ahead of" if ahead > 0 else "behind"
    seen = f"{_seconds(abs(ahead))} {way} this machine's, ± {_seconds(uncertain)}"
    if abs(ahead) - uncertain > _HOSTS:
        return note("clocks", f"{seen}: times in logs and records will differ", _NTP)
    return ok("clocks", seen)


def _seconds(value: float) -> str:
    return f"{value:,.1f} s" if value >= 1 else f"{value * 1e3:.2f} ms"
