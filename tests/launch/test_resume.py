"""A killed job is continued by the same command."""

import os
import re
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from products import rarely

SCRIPT = str(Path(__file__).parent / "scripts.py")


def command(folder: Path, strategy: str, *args: str) -> list[str]:
    checkpoint = ["--checkpoint", str(folder), "--checkpoint-every", "5", "--checkpoint-keep", "2"]
    launcher = [sys.executable, "-m", "hocket.launch.cli", "run", "-n", "2", "--strategy", strategy, "--on-loss", "end"]
    return [*launcher, *checkpoint, SCRIPT, "resume", *args]


def finish(*words: str, status: int = 0) -> subprocess.CompletedProcess[str]:
    done = subprocess.run(words, capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == status, done.stderr
    return done


def digest(done: subprocess.CompletedProcess[str]) -> str:
    found = set(re.findall(r"digest (\w+)", done.stdout))
    assert len(found) == 1 and done.stdout.count("digest") == 2, done.stdout + done.stderr
    return found.pop()


@pytest.mark.parametrize("strategy", [rarely("mirrored"), "central"])
def test_a_killed_job_goes_on_as_if_nothing_had_happened(tmp_path: Path, strategy: str) -> None:
    whole = digest(finish(*command(tmp_path / "whole", strategy)))
    folder = tmp_path / "saved"
    # The launcher is killed in the first epoch.
    with subprocess.Popen(command(folder, strategy, "8", "wait"), stdout=subprocess.PIPE, text=True) as killed:
        assert killed.stdout is not None
        while "waiting" not in (line := killed.stdout.readline()):
            assert line
        os.kill(killed.pid, signal.SIGKILL)
    # A worker is killed in the second one.
    failed = finish(*command(folder, strategy, "19", "SIGKILL"), status=128 + signal.SIGKILL)
    assert failed.stdout.count("from 5") == 2
    assert f"hocket: going on from {folder}/000001-step-5" in failed.stderr
    last = re.search(r"hocket: the last checkpoint is (\S+); the same command continues from it", failed.stderr)
    assert last is not None and Path(last[1]).name == "000003-step-15"
    # A rank raises at the very end of an epoch.
    finish(*command(folder, strategy, "24", "raise"), status=1)
    done = finish(*command(folder, strategy))
    assert "from 20" in done.stdout
    assert digest(done) == whole
    assert sorted(path.name for path in folder.iterdir()) == [".lock", "000006-step-30", "000007-step-35"]
