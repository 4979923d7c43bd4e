"""What a doctor says: of this machine, which is well, and of one on which things were made wrong on purpose."""

import json
import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from hocket.errors import UsageError
from hocket.lab.doctor import doctor_cli as command
from hocket.lab.doctor import software_check

NAMES = {
    "python", "hocket", "safetensors", "typer", "rich", "cryptography", "matplotlib", "tensorboard", "torch", "gloo",
    "nccl", "gpu", "shared memory", "/dev/shm", "open files", "processes", "cores", "threads", "memory", "swap", "load",
    "clock", "host name", "loopback", "interfaces", "leftovers", "left memory", "run folder", "temporary files",
    "all-reduce",
}  # fmt: skip
DOCTOR = [sys.executable, "-m", "hocket.launch.cli", "doctor"]


def doctor(*args: str, before: tuple[str, ...] = (), **env: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [*before, *DOCTOR, *args], env={**os.environ, **env}, capture_output=True, text=True, timeout=120, check=False
    )


def named(done: subprocess.CompletedProcess[str]) -> dict[str, dict[str, Any]]:
    """The findings by name."""
    found = json.loads(done.stdout)
    for entry in found["findings"]:
        assert entry["seen"] and bool(entry["remedy"]) == (entry["state"] != "ok"), entry
    assert done.returncode == (1 if found["wrong"] else 0)
    assert found["wrong"] == sum(entry["state"] == "wrong" for entry in found["findings"])
    return {entry["name"]: entry for entry in found["findings"]}


def test_this_machine_is_well() -> None:
    done = doctor("--json")
    found = named(done)
    assert done.returncode == 0, found
    assert set(found) - {"rigs"} == NAMES
    assert found["all-reduce"]["seen"].startswith("right on 2 workers here: 4 KiB in ")
    assert found["shared memory"]["seen"].startswith("memfd and futex work")


def test_things_made_wrong_at_once(tmp_path: Path) -> None:
    """All in one run, which is text: a limit, a variable, a driver, memory and a folder."""
    broken = tmp_path / "nvidia-smi"
    broken.write_text("#!/bin/sh\necho 'NVIDIA-SMI has failed: no driver'\nexit 9\n")
    broken.chmod(0o755)
    spoil = "ulimit -n 64; "
    enter: tuple[str, ...] = ()
    if subprocess.run(["unshare", "-m", "true"], check=False).returncode == 0:
        enter = ("unshare", "-m", "--propagation", "private")
        spoil += "mount -t tmpfs -o size=1m none /dev/shm; "
    done = doctor(
        "--quick", before=(*enter, "sh", "-c", spoil + 'exec "$@"', "sh"), OMP_NUM_THREADS="four",
        PATH=f"{tmp_path}:{os.environ['PATH']}", HOCKET_RUN_DIR="/proc/nowhere/runs", PYTHONIOENCODING="ascii",
    )  # fmt: skip
    assert done.returncode == 1, done.stderr
    lines = done.stdout.splitlines()
    told = {
        line.split("  ")[1].strip(): next(after for after in lines[n:] if after.strip().startswith("->"))
        for n, line in enumerate(lines)
        if line.startswith("WRONG")
    }
    expected = {"threads": "unset OMP_NUM_THREADS", "open files": "ulimit -n", "gpu": "NVIDIA driver",
                "run folder": "--run-dir", **({"/dev/shm": "--shm-size"} if enter else {})}  # fmt: skip
    assert set(told) == set(expected), done.stdout
    for name, remedy in expected.items():
        assert remedy in told[name]
    assert lines[-1].startswith(f"{len(expected)} things are wrong")
    assert done.stdout.isascii()


def test_a_python_without_torch(tmp_path: Path) -> None:
    """A real interpreter, with all packages that are here but one."""
    import torch

    packages = Path(torch.__file__).parent.parent
    for path in packages.iterdir():
        if not path.name.startswith(("torch", "functorch")):
            (tmp_path / path.name).symlink_to(path)
    python, src = str(Path(sys.executable).resolve()), Path(__file__).parents[3] / "src"
    env = {**os.environ, "PYTHONPATH": f"{os.environ.get('PYTHONPATH', '')}:{src}:{tmp_path}"}
    done = subprocess.run(
        [python, *DOCTOR[1:], "--json"], env=env, capture_output=True, text=True, timeout=60, check=False
    )
    found = named(done)
    assert found["torch"]["state"] == "wrong" and "not installed" in found["torch"]["seen"], found["torch"]
    assert "pip install" in found["torch"]["remedy"]
    assert found["all-reduce"]["state"] == "note" and "not tried" in found["all-reduce"]["seen"]
    assert found["python"]["state"] == "ok" and "no virtual environment" in found["python"]["seen"]


@pytest.mark.few(2)
@pytest.mark.parametrize(
    ("code", "said"),
    [
        ("import os; os.abort()", "SIGABRT"),
        ("raise ImportError('libcudart.so.13: cannot open shared object file')", "libcudart.so.13: cannot open"),
        ("print('hello'); raise SystemExit(3)", "status 3"),
        ("import time; time.sleep(600)", "took more than 1 s"),
    ],
)
def test_an_import_of_torch_that_fails(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, code: str, said: str) -> None:
    (tmp_path / "torch").mkdir()
    (tmp_path / "torch" / "__init__.py").write_text(code)
    monkeypatch.setenv("PYTHONPATH", f"{tmp_path}:{os.environ.get('PYTHONPATH', '')}")
    found = software_check.judge_torch(software_check.TorchImport().facts(1.0 if "took" in said else 30.0))
    assert found[0].state == "wrong" and said in found[0].seen and found[0].remedy


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGKILL])
def test_ended_in_the_middle(tmp_path: Path, number: signal.Signals) -> None:
    """While torch is imported; the fixture of all tests sees that nothing is left."""
    (tmp_path / "torch").mkdir()
    (tmp_path / "torch" / "__init__.py").write_text(f"open({str(tmp_path / 'fifo')!r}, 'w').write('x')\nimport time\n"
                                                    "time.sleep(600)")  # fmt: skip
    os.mkfifo(tmp_path / "fifo")
    env = {**os.environ, "PYTHONPATH": f"{tmp_path}:{os.environ.get('PYTHONPATH', '')}"}
    process = subprocess.Popen(DOCTOR, env=env, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True)
    assert (tmp_path / "fifo").read_text() == "x"
    process.send_signal(number)
    _, said = process.communicate(timeout=30)
    if number is signal.SIGKILL:
        assert process.returncode == -number
    else:
        assert process.returncode == 128 + number and said == f"hocket: ended by {number.name}\n"


@pytest.mark.parametrize(
    ("flags", "told"),
    [
        ({"host": "a", "hostfile": Path("b")}, "use one of them"),
        ({"ssh": "ssh -v"}, "--ssh is for other hosts"),
        ({"python": "python3"}, "--python is for other hosts"),
        ({"host": "a:0"}, "no number of workers"),
        ({"host": "a", "ssh": "'"}, "as a shell would read it"),
        ({"hostfile": Path("/nowhere")}, "name a file with a host in every line"),
    ],
)
def test_wrong_use(flags: dict[str, Any], told: str) -> None:
    """In this process: how such an error becomes a line and a status is the same for all commands."""
    with pytest.raises(UsageError, match=told) as raised:
        command.doctor(**flags)
    assert "\n" not in str(raised.value)


def test_a_folder_that_is_gone(tmp_path: Path) -> None:
    gone = tmp_path / "gone"
    gone.mkdir()
    script = 'rmdir "$0" && exec "$@"'
    done = subprocess.run(
        ["sh", "-c", script, str(gone), *DOCTOR], cwd=gone, capture_output=True, text=True, timeout=60, check=False
    )
    assert done.returncode == 2 and "hocket: the working folder cannot be used" in done.stderr.splitlines()[-1]
