"""What ``hocket horovodrun`` says to ``hocket run``."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from hocket.errors import UsageError
from hocket.launch.horovodrun_cli import translate

HOCKET = [sys.executable, "-m", "hocket.launch.cli"]


@pytest.mark.parametrize(
    ("words", "told"),
    [
        ("-np 4 python train.py --lr 1", "-n 4 train.py --lr 1"),
        ("-np 4 -H a:2,b:2 python3.11 -u train.py", "-H a:2,b:2 -n 4 train.py"),
        ("--num-proc 2 --hostfile hosts python -m pkg.train", "--hostfile hosts -n 2 -m pkg.train"),
        ("-np 4 --min-np 2 --max-np 8 --host-discovery-script ./d.sh train.py", "--discover ./d.sh -n 2..8 train.py"),
        ("-np 4 --min-np 2 python t.py", "-n 2..4 t.py"),
        ("-np 2 -p 2222 -i key --network-interfaces eth0,eth1 python t.py",
         "--interface eth0,eth1 -n 2 --ssh|ssh -p 2222 -i key| t.py"),
        ("-np 2 --output-filename out --timeline-filename t.json --verbose --reset-limit 3 python t.py",
         "--log-dir out --timeline t.json --max-losses 3 -n 2 --verbose t.py"),
    ],
)  # fmt: skip
def test_what_is_the_same_under_another_name(words: str, told: str) -> None:
    before, _, rest = told.partition("|")
    inner, _, after = rest.partition("|")
    expected = [*before.split(), *([inner] if inner else []), *after.split()]
    found = translate(words.split())
    assert found.arguments == ["--as-horovod", *expected] and not found.ignored and not found.variables


def test_what_workers_read() -> None:
    flags = "--fusion-threshold-mb 32 --cycle-time-ms 3.5 --no-stall-check --stall-check-warning-time-seconds 9"
    assert translate([*flags.split(), "train.py"]).variables == {
        "HOROVOD_FUSION_THRESHOLD": str(32 << 20), "HOROVOD_CYCLE_TIME": "3.5", "HOROVOD_STALL_CHECK_DISABLE": "1",
        "HOROVOD_STALL_CHECK_TIME_SECONDS": "9",
    }  # fmt: skip


def test_what_has_no_meaning_is_named() -> None:
    told = translate(["-np", "2", "--autotune", "--start-timeout", "60", "--gloo", "--mpi-args=-x", "python", "t.py"])
    assert sorted(told.ignored) == ["--autotune", "--gloo", "--mpi-args", "--start-timeout"]
    assert told.arguments == ["--as-horovod", "-n", "2", "t.py"]


def test_a_configuration_file(tmp_path: Path) -> None:
    file = tmp_path / "config.yaml"
    file.write_text(
        "# settings\nparams:\n  fusion_threshold_mb: 16\n  cycle-time-ms: 2  # short\nautotune:\n  enabled: true\n"
        "timeline:\n  filename: 't.json'\nstall_check:\n  enabled: false\nverbose: true\n"
    )
    told = translate(["--config-file", str(file), "--cycle-time-ms", "4", "-np", "2", "python", "t.py"])
    assert told.arguments == ["--as-horovod", "--timeline", "t.json", "-n", "2", "--verbose", "t.py"]
    assert told.variables["HOROVOD_CYCLE_TIME"] == "4"
    assert told.variables["HOROVOD_FUSION_THRESHOLD"] == str(16 << 20)
    assert told.variables["HOROVOD_STALL_CHECK_DISABLE"] == "1" and told.ignored == ["--autotune"]
    file.write_text("params:\n  - 3\n")
    with pytest.raises(UsageError, match="line 2: '- 3' is no 'key: value'"):
        translate(["--config-file", str(file), "t.py"])


@pytest.mark.parametrize(
    ("words", "said"),
    [
        ("-np 2", "no command"),
        ("-np two python t.py", "invalid int value: 'two'"),
        ("--no-such-flag python t.py", "no command|no-such-flag"),
        ("-np 2 bash run.sh", "'bash' is no Python"),
        ("--min-np 2 python t.py", "say how many at most"),
    ],
)
def test_wrong_use(words: str, said: str) -> None:
    with pytest.raises(UsageError, match=said):
        translate(words.split())


def hocket(*words: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [*HOCKET, "horovodrun", *words], capture_output=True, text=True, timeout=60, env=dict(os.environ), check=False
    )


def test_the_command(tmp_path: Path) -> None:
    script = tmp_path / "script.py"
    script.write_text("import os, sys; print(os.environ['RANK'], os.environ['HOROVOD_CYCLE_TIME'], sys.argv[1:])")
    done = hocket("-np", "2", "--cycle-time-ms", "2", "--gloo", "python", str(script), "-np", "--gloo")
    assert done.returncode == 0, done.stderr
    assert sorted(done.stdout.splitlines()) == [f"[{rank}] {rank} 2 ['-np', '--gloo']" for rank in range(2)]
    assert done.stderr.strip() == "hocket: of no meaning here, and ignored: --gloo"
    assert "[X] PyTorch" in hocket("--check-build").stdout
    assert hocket("--version").stdout.startswith("0.28.1")
    wrong = hocket("-np", "2", "bash", "run.sh")
    assert wrong.returncode == 2 and wrong.stderr.startswith("hocket: horovodrun: 'bash' is no Python")
