"""Curves for TensorBoard, read back with its own reader."""

import subprocess
import sys
from pathlib import Path

import pytest

from observe.test_runs import SCRIPT, hocket


def test_curves_are_read_back(folder: Path) -> None:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    assert hocket("run", "-n", "2", "--tensorboard", SCRIPT, "train", "10").returncode == 0
    (run,) = (folder / "hocket-runs").iterdir()
    curves = EventAccumulator(str(run / "tensorboard"))
    curves.Reload()
    assert {"loss", "accuracy"} <= set(curves.Tags()["scalars"])
    points = curves.Scalars("loss")
    assert [point.step for point in points] == list(range(1, 11))
    assert [point.value for point in points] == pytest.approx([1 / step for step in range(1, 11)])
    assert curves.Scalars("hocket/samples_per_second")[-1].step == 100
    assert {"hocket/waiting", "hocket/communication"} <= set(curves.Tags()["scalars"])


def test_neither_torch_nor_tensorflow_is_imported() -> None:
    code = (
        "import sys, tempfile, pathlib\n"
        "from hocket.observe.tensorboard_file import TensorboardFile\n"
        "TensorboardFile(pathlib.Path(tempfile.mkdtemp()) / 'x').close()\n"
        "assert not {'torch', 'tensorflow'} & set(sys.modules)"
    )
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60)


def test_a_missing_package_is_said_before_anything_starts(folder: Path) -> None:
    without = (
        "import sys; sys.modules['tensorboard'] = None\n"
        "import importlib.util as u; find = u.find_spec\n"
        "u.find_spec = lambda name, *a: None if name == 'tensorboard' else find(name, *a)\n"
        "from hocket.launch.cli import main; main()"
    )
    done = subprocess.run(
        [sys.executable, "-c", without, "run", "-n", "1", "--tensorboard", SCRIPT, "train"],
        capture_output=True, text=True, timeout=60, check=False,
    )  # fmt: skip
    assert done.returncode == 2 and done.stderr.count("\n") == 1
    assert "pip install 'hocket[tensorboard]'" in done.stderr
    assert not list(folder.iterdir())
