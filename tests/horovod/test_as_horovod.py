"""Scripts that say ``import horovod.torch as hvd`` run untouched."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

EXAMPLES = Path(__file__).parents[2] / "examples" / "horovod"


def run(workers: int, script: Path, *args: str, **env: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "hocket.launch.cli", "run", "-n", str(workers), "--as-horovod", str(script), *args],
        capture_output=True, text=True, timeout=120, env={**os.environ, **env}, check=False,
    )  # fmt: skip


def test_the_plain_example_trains_as_one_process_does() -> None:
    pytest.importorskip("sklearn")
    said = []
    for workers in (1, 2):
        arguments = ["--epochs", "2", "--batch-size", str(64 // workers), "--base-lr", str(0.04 / workers)]
        done = run(workers, EXAMPLES / "plain.py", *arguments)
        assert done.returncode == 0, done.stderr
        assert not done.stderr.strip(), done.stderr
        said.append(re.findall(r"epoch \d: loss \S+, accuracy", done.stdout))
    assert len(said[0]) == 2 and said[0] == said[1]


def test_process_sets_example() -> None:
    done = run(4, EXAMPLES / "sets.py")
    assert done.returncode == 0, done.stderr
    assert "mean weights: 1.00 1.00 2.00 2.00" in done.stdout


IMPORTS = """
import importlib, sys
import horovod, horovod.torch, horovod.torch.mpi_ops, horovod.common.process_sets
from horovod.common.exceptions import HorovodInternalError, HostsUpdatedInterrupt
from horovod.torch.compression import Compression
from horovod.torch.functions import broadcast_object
from horovod.torch.mpi_ops import rank, allreduce_async_
import hocket.horovod.torch
assert horovod.torch is hocket.horovod.torch and horovod.torch.init is hocket.horovod.torch.init
assert horovod.__version__ == "0.28.1"
for name in ("horovod.keras", "horovod.tensorflow", "horovod.mxnet"):
    try:
        importlib.import_module(name)
    except ImportError as error:
        assert "Hocket has horovod.torch alone" in str(error), error
    else:
        raise AssertionError(name)
horovod.torch.init()
print("rank", rank())
"""


def test_modules_are_found_by_horovods_names_before_an_installed_one(tmp_path: Path) -> None:
    installed = tmp_path / "site" / "horovod"
    installed.mkdir(parents=True)
    (installed / "__init__.py").write_text("raise SystemExit('the installed one')")
    script = tmp_path / "script.py"
    script.write_text(IMPORTS)
    there = os.pathsep.join(filter(None, (str(installed.parent), os.environ.get("PYTHONPATH"))))
    done = run(2, script, PYTHONPATH=there)
    assert done.returncode == 0, done.stderr
    assert sorted(done.stdout.splitlines()) == ["[0] rank 0", "[1] rank 1"]
    assert done.stderr.count("--as-horovod: 'import horovod' is Hocket, not") == 1, done.stderr


def test_the_elastic_example_goes_on_without_a_killed_worker() -> None:
    done = run(3, EXAMPLES / "elastic.py", "--kill", "1", HOCKET_ON_LOSS="continue")
    assert done.returncode == 0, done.stderr
    assert "rank 1 on" in done.stderr and "the others go on" in done.stderr
    assert re.search(r"epoch 0: .* workers 3", done.stdout) and re.search(r"epoch 3: .* workers 2", done.stdout)
    assert "weights: 1.00" in done.stdout or "weights: 0.99" in done.stdout
