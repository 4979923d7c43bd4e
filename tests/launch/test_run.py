"""``hocket run`` with real processes: output, environment, errors and bad input."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

SCRIPT = str(Path(__file__).parent / "scripts.py")
HOCKET = [sys.executable, "-m", "hocket.launch.cli"]


def hocket(*args: str, **env: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [*HOCKET, *args], capture_output=True, text=True, timeout=120, env={**os.environ, **env}, check=False
    )


PLAIN = str(Path(__file__).parent / "plain.py")  # without torch


def run(workers: int, *args: str, **env: str) -> subprocess.CompletedProcess[str]:
    return hocket("run", "-n", str(workers), SCRIPT, *args, **env)


def test_workers_get_torchruns_environment_and_their_rank_on_every_line() -> None:
    done = hocket("run", "-n", "2", PLAIN, "environment", "--flag", "two words", OMP_NUM_THREADS="")
    assert done.returncode == 0, done.stderr
    lines = sorted(done.stdout.splitlines())
    for rank in range(2):
        assert (
            f"[{rank}] RANK={rank} LOCAL_RANK={rank} WORLD_SIZE=2 LOCAL_WORLD_SIZE=2 MASTER_ADDR=127.0.0.1 "
            f"OMP_NUM_THREADS={max(1, len(os.sched_getaffinity(0)) // 2)} args: --flag two words"
        ) in lines


def test_a_module_can_be_run(tmp_path: Path) -> None:
    (tmp_path / "my_module.py").write_text("import sys; print('hello', sys.argv[1:])")
    done = subprocess.run(
        [*HOCKET, "run", "-n", "1", "-m", "my_module", "--x", "1"], capture_output=True, text=True, cwd=tmp_path,
        timeout=60, check=False,
    )  # fmt: skip
    assert done.stdout == "[0] hello ['--x', '1']\n", done.stderr


def test_training_ends_well_and_logs_are_kept(tmp_path: Path) -> None:
    done = hocket("run", "-n", "2", "--log-dir", str(tmp_path / "logs"), "--strategy", "central", SCRIPT, "train")
    assert done.returncode == 0, done.stderr
    assert sorted(done.stdout.splitlines()) == ["[0] finished 0", "[1] finished 1"]
    assert (tmp_path / "logs" / "rank-1.log").read_text() == "finished 1\n"


def test_more_workers_than_cores() -> None:
    done = run(5, "train", "", "", *())
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("finished") == 5


@pytest.mark.few(1)
@pytest.mark.parametrize("order", ["first", "second"])
def test_scripts_may_use_torch_distributed_too(order: str) -> None:
    done = run(2, "distributed", order)
    assert done.returncode == 0, done.stderr
    assert sorted(done.stdout.splitlines()) == ["[0] sum 2 2", "[1] sum 2 2"]


def test_the_same_script_alone() -> None:
    done = subprocess.run([sys.executable, SCRIPT, "train"], capture_output=True, text=True, timeout=60, check=False)
    assert done.stdout == "finished 0\n", done.stderr


@pytest.mark.few(1)
@pytest.mark.parametrize("strategy", ["mirrored", "central"])
def test_the_same_script_under_torchrun(strategy: str) -> None:
    done = subprocess.run(
        [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "2", SCRIPT, "train"],
        capture_output=True, text=True, timeout=120, env={**os.environ, "HOCKET_STRATEGY": strategy}, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("finished") == 2


def test_a_progress_bar_becomes_its_last_state() -> None:
    done = hocket("run", "-n", "2", PLAIN, "bars")
    assert done.stderr.count("100%") == 2 and "25%" not in done.stderr
    assert "[0] 100%" in done.stderr.splitlines()


def test_a_traceback_that_is_only_logged_is_shown() -> None:
    done = run(1, "logged error")
    assert done.returncode == 0
    assert "[0] KeyError: 'only logged'" in done.stderr and "[0] going on" in done.stdout


def test_a_rank_that_takes_fewer_steps_is_named() -> None:
    done = run(3, "fewer steps")
    assert done.returncode == 1
    assert "ranks 0, 2 wait in hocket.barrier(), but rank 1 finished the script" in done.stderr


def test_who_waits_for_whom_is_said_and_at_the_timeout_all_stacks() -> None:
    done = hocket("run", "-n", "3", "--timeout", "5", SCRIPT, "stuck")
    assert done.returncode == 1
    assert "ranks 0, 2 waited 5 s in hocket.barrier() for rank 1 on " in done.stderr
    for rank in range(3):
        assert re.search(rf"\[{rank}\] (Current thread|Thread) 0x", done.stderr), f"no stack of rank {rank}"
    assert re.search(r"\[1\]   File .*scripts.py\", line \d+ in main", done.stderr)


def test_a_slow_rank_is_named_now_and_then(tmp_path: Path) -> None:
    with (tmp_path / "err").open("w") as err:  # rank 1 comes when it was named there
        command = [*HOCKET, "run", "-n", "3", SCRIPT, "slow rank", str(tmp_path / "err")]
        subprocess.run(command, stderr=err, timeout=120, check=True)
    lines = [line for line in (tmp_path / "err").read_text().splitlines() if "ranks 0, 2 waited" in line]
    assert all(line.startswith("[0] hocket: ") and "for rank 1 (alive)" in line for line in lines) and lines


def test_where_shared_memory_does_not_run_tcp_does() -> None:
    done = run(2, "other machine")
    assert done.returncode == 0, done.stderr
    assert "[0] hocket: shared memory needs x86-64 Linux; using TCP, which is slower" in done.stderr


def test_help_and_choices_need_no_torch() -> None:
    code = "import sys; from hocket.launch import cli; assert 'torch' not in sys.modules"
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60)
    assert "--strategy" in hocket("run", "--help").stdout


@pytest.mark.few(6)
@pytest.mark.parametrize(
    ("args", "message"),
    [
        (["run", "-n", "2", "nowhere.py"], "no script 'nowhere.py' in"),
        (["run", "-n", "2", "-m", "no.such.module"], "no module named 'no.such.module'"),
        (["run", "-n", "0", SCRIPT], "-n 0: a job needs at least one worker"),
        (["run", "-n", "-3", SCRIPT], "-n -3: a job needs at least one worker"),
        (["run", "-n", "many", SCRIPT], "-n many: must be a whole number of workers, or auto"),
        (["run", "-n", "100000", SCRIPT], "use at most -n"),
        (["run", "--strategy", "mirorred", SCRIPT], "unknown strategy 'mirorred': the choices are mirrored"),
        (["run", "--strategy", "central(fussed=True)", SCRIPT], "has no option 'fussed': it takes fused"),
        (["run", "-n", "2", "--servers", "2", "--strategy", "mirrored", SCRIPT], "leave out --servers 2, or use"),
        (["run", "--timeout", "soon", SCRIPT], "--timeout soon: must be a positive number of seconds"),
        (["run", "--on-nan", "explode", SCRIPT], "the choices are raise, skip, ignore"),
        (["run", "--transport", "pigeon", SCRIPT], "the choices are auto, shared-memory, gloo"),
        (["run", "--log-dir", "/dev/null/x", SCRIPT], "choose a folder that can be written to"),
        (["run", "-n", "2", "--interface", "eth0", SCRIPT], "--interface is for other hosts: name these"),
        (["run", "-H", "node1:x", SCRIPT], "'x' is no number of workers from 1: write for example node1:4"),
        (["run", "-H", "localhost:1", "--ssh", " ", "nowhere.py"], "no script 'nowhere.py' in"),
        (["run", "--hostfile", "/nowhere", SCRIPT], "No such file or directory; name a file with a host in every line"),
        (["bench", "step", "--models", "vgg"], "the choices are cnn, mlp, narrow"),
    ],
)
def test_bad_input_is_one_clear_line(args: list[str], message: str) -> None:
    done = hocket(*args)
    assert done.returncode == 2
    assert message in done.stderr and done.stderr.count("\n") == 1 and done.stderr.startswith("hocket: ")


def test_bad_environment_is_told_before_anything_starts() -> None:
    done = run(2, "train", HOCKET_STRATEGY="mirorred")
    assert done.returncode == 2 and "unknown strategy" in done.stderr


@pytest.mark.parametrize(
    ("before", "message"),
    [
        ("ulimit -n 20", "hocket: this shell allows 20 open files, and a job of 2 processes needs 56: call ulimit -n "),
        ("rmdir $PWD", "hocket: the working directory does not exist any more: change to another one"),
    ],
)
def test_an_unusual_shell_is_one_clear_line(tmp_path: Path, before: str, message: str) -> None:
    folder = tmp_path / "here"
    folder.mkdir()
    command = ["sh", "-c", f'{before}; exec "$@"', "sh", *HOCKET, "run", "-n", "2", SCRIPT, "train"]
    done = subprocess.run(command, cwd=folder, capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 2 and done.stderr.startswith(message) and len(done.stderr.splitlines()) == 1, done.stderr


def test_before_init() -> None:
    done = run(2, "no init")
    assert done.returncode == 1 and "call hocket.init()" in done.stderr.splitlines()[-1]


@pytest.mark.few(1)
@pytest.mark.parametrize("transport", ["shared-memory", "gloo"])
def test_transports(transport: str) -> None:
    done = hocket("run", "-n", "2", "--transport", transport, SCRIPT, "train")
    assert done.returncode == 0, done.stderr


def test_a_precedence_of_flag_environment_script() -> None:
    done = hocket("run", "-n", "2", "--strategy", "mirrored", SCRIPT, "train", HOCKET_STRATEGY="central")
    assert done.returncode == 0, done.stderr
    gloo = hocket("run", "-n", "2", "--transport", "gloo", SCRIPT, "train", HOCKET_STRATEGY="central")
    assert gloo.returncode == 1 and "needs shared memory" in gloo.stderr.splitlines()[-1]


def test_a_rank_that_never_joins_is_named() -> None:
    done = run(2, "absent")
    assert done.returncode == 1
    last = done.stderr.splitlines()[-1]
    assert "rank 1 on " in last and "finished without hocket.init(), in which rank 0 waits" in last


def test_spawned_data_loader_processes_are_no_workers() -> None:
    done = run(2, "spawn")
    assert done.returncode == 0, done.stderr
    assert sorted(done.stdout.splitlines()) == ["[0] batches 2", "[1] batches 2"]


def test_long_lines_are_whole_in_the_end() -> None:
    done = hocket("run", "-n", "1", PLAIN, "long line")
    assert done.stdout.count("b") == 3_000_000 and done.stdout.rstrip().endswith("c")


def test_what_the_terminal_cannot_show_is_replaced() -> None:
    done = hocket("run", "-n", "1", PLAIN, "umlaut", PYTHONIOENCODING="ascii")
    assert done.returncode == 0 and done.stdout == "[0] gr?n ?\n"


def test_a_script_may_replace_stderr() -> None:
    assert run(2, "tee").returncode == 0


def test_logs_on_a_full_disk_stop_and_the_job_goes_on(tmp_path: Path) -> None:
    (tmp_path / "rank-0.log").symlink_to("/dev/full")
    script = tmp_path / "script.py"
    script.write_text("print('one'); print('two')")
    done = hocket("run", "-n", "1", "--log-dir", str(tmp_path), str(script))
    assert done.returncode == 0 and done.stdout == "[0] one\n[0] two\n"
    assert "No space left on device; the logs stop here" in done.stderr
