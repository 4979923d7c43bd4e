"""Timelines of several hosts: their clocks differ by hours, and the spans are where they belong."""

import json
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from launch.sshd import Sshd

AHEAD = 5000  # seconds
SPANS = """
import os, time
from hocket import spans
from hocket.events import PipeSink
spans.start(PipeSink(int(os.environ["HOCKET_EVENTS"])))
with spans.span(spans.COMPUTE, "clock %d" % time.clock_gettime(time.CLOCK_MONOTONIC)):
    time.sleep(0.01)
spans.stop()
"""


@pytest.mark.skipif(
    not shutil.which("unshare")
    or subprocess.run(["unshare", "--time", "--monotonic", "1", "true"], capture_output=True, check=False).returncode
    != 0,
    reason="this kernel, or this user, cannot make time namespaces",
)
def test_hosts_whose_clocks_differ_are_on_one_time_axis(sshd: Sshd, tmp_path: Path) -> None:
    python = tmp_path / "python"
    python.write_text(f'#!/bin/sh\nexec unshare --time --monotonic {AHEAD} --fork "{sys.executable}" "$@"\n')
    python.chmod(0o755)
    done = sshd.run("a:1,b:1", tmp_path, SPANS, "--python", str(python), "--timeline", "out.json")
    assert done.returncode == 0, done.stderr
    found = [event for event in json.loads((tmp_path / "out.json").read_text()) if event["ph"] == "X"]
    assert len(found) == 2
    here = float(Path("/proc/uptime").read_text().split()[0])
    for event in found:
        assert int(event["name"].split()[1]) > here + AHEAD - 600  # its own clock is ahead
        assert 0 < event["ts"] < 100e6  # microseconds since the launcher began
