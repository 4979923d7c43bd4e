"""The experiments run, and their page shows what they found."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
NAMES = ["downpour", "gossip", "hogwild", "outer", "post_local", "softsync", "staleness"]
ONCE = ["slow_link"]  # took too long for several seeds


@pytest.mark.few(1)
@pytest.mark.parametrize("name", NAMES + ONCE)
def test_it_runs(name: str, tmp_path: Path) -> None:
    command = [sys.executable, f"experiments/{name}.py", "--quick", "--out", str(tmp_path)]
    environment = {**os.environ, "PYTHONPATH": f"{os.environ.get('PYTHONPATH', '')}:{ROOT / 'src'}"}
    done = subprocess.run(command, capture_output=True, text=True, cwd=ROOT, timeout=120, check=False, env=environment)
    assert done.returncode == 0, done.stderr
    found = json.loads((tmp_path / f"{name}.json").read_text())
    assert len(done.stdout.splitlines()) >= len(found["rows"]) > 0
    assert (tmp_path / f"{name}.png").stat().st_size > 0


@pytest.mark.parametrize("name", NAMES)
def test_its_results_are_kept(name: str) -> None:
    folder = ROOT / "docs" / "experiments"
    assert json.loads((folder / f"{name}.json").read_text())["seeds"] > 1
    assert f"experiments/{name}.png" in (ROOT / "docs" / "experiments.md").read_text()
