"""How long a job takes to start: from the command until all workers are there, on this machine and on a Ray cluster."""

from __future__ import annotations

import subprocess
import sys
import tempfile
import time
from pathlib import Path
from statistics import median
from typing import Any

from hocket.errors import JobError

_SCRIPT = "import hocket\nhocket.init()\nif hocket.rank() == 0:\n    print('begun', flush=True)\n"


def measure(workers: int, rounds: int, address: str | None) -> list[dict[str, Any]]:
    """Rows of medians, in seconds, of both ways in turn; the Ray cluster is warm.

    Args:
        workers: How many workers.
        rounds: How often each way is measured.
        address: The Ray cluster; None is that of this machine.
    """
    on_ray = ["--on", "ray", *(["--address", address] if address else [])]
    ways: dict[str, list[str]] = {"this machine": [], "ray": on_ray}
    times: dict[str, list[float]] = {name: [] for name in ways}
    with tempfile.TemporaryDirectory(prefix="hocket-bench-") as folder:
        Path(folder, "start.py").write_text(_SCRIPT)
        for turn in range(rounds + 1):  # the first one warms up
            for name, flags in ways.items():
                seconds = _start(folder, ["-n", str(workers), *flags])
                times[name] += [seconds] if turn else []
    ratios = [far / near for near, far in zip(*times.values(), strict=True)]
    row = {f"{name} [s]": round(median(each), 2) for name, each in times.items()}
    spread = f"{min(ratios):.2f}-{max(ratios):.2f}"
    return [{"workers": workers, **row, "ratio": round(median(ratios), 2), "spread": spread}]


def _start(folder: str, flags: list[str]) -> float:
    """Seconds until all workers of a job are there."""
    command = [sys.executable, "-m", "hocket.launch.cli", "run", "--no-record", *flags, "start.py"]
    begun, found = time.perf_counter(), 0.0
    with subprocess.Popen(command, cwd=folder, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as job:
        assert job.stdout is not None and job.stderr is not None
        for line in job.stdout:
            if "begun" in line:
                found = time.perf_counter() - begun
        said = job.stderr.read()
    if job.returncode or not found:
        raise JobError(f"hocket run {' '.join(flags)} ended with status {job.returncode}: {said.strip()}")
    return found
