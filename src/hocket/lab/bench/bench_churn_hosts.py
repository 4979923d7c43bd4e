"""What it costs to lose workers on several hosts: as ``bench_churn``, on a rig."""

from __future__ import annotations

import random
import signal
from pathlib import Path
from tempfile import TemporaryDirectory

from hocket.lab.bench.bench_churn import Row, bench_job, disturb_all, recovery, spread
from hocket.lab.rig import Rig


def recover(kills: int) -> list[Row]:
    """How long the others wait after a kill, on three hosts with one worker each, and when a new worker is there."""
    with TemporaryDirectory(prefix="hocket-bench-") as place, Rig.up(3, name="bench-churn") as rig:
        shell = Path(place, "shell")
        rig.write_shell(shell)
        hosts = ",".join(f"{name}:1" for name in rig.hosts)
        flags = {"hosts": hosts, "ssh": shell, "transport": "tcp", "on_loss": "replace", "max_losses": 10**6}
        with bench_job(3, "small", **flags) as job:
            events = disturb_all(job, kills, signal.SIGKILL, random.Random(0), spare=False)
            steps = job.finish()
    found = [recovery(steps, event, 3) for event in events]
    return [
        spread("from SIGKILL to the next step of the others, a rig of 3 hosts", [wait for wait, _ in found], "s"),
        spread("from SIGKILL to the first step of the new worker, no spare", [there for _, there in found], "s"),
    ]
