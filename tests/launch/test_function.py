"""``hocket.launch()``: functions of modules, scripts and notebooks on fresh workers."""

import importlib.util
import inspect
import os
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import pytest
import torch

import hocket
from hocket.errors import JobError, StrategyError, UsageError
from launch import cells, functions

SHELLS = [
    "PLAIN",
    pytest.param(
        "IPYTHON",
        marks=pytest.mark.skipif(importlib.util.find_spec("IPython") is None, reason="IPython is not installed"),
    ),
]


@pytest.fixture(autouse=True)
def no_folder_left(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Nothing of a call stays on the disk."""
    with tempfile.TemporaryDirectory() as name:  # short: data loaders make sockets there, whose paths have 107 bytes
        monkeypatch.setenv("TMPDIR", name)
        monkeypatch.setattr(tempfile, "tempdir", None)
        yield
        deadline = time.monotonic() + 5
        while left := list(Path(name).glob("hocket-*")):
            assert time.monotonic() < deadline, f"left behind: {left}"
            time.sleep(0.02)


def test_a_function_of_a_module_and_every_kind_of_plain_data() -> None:
    shared = torch.arange(10.0)
    more = {"a": np.ones((2, 2)), "b.c": torch.zeros(1), "b": {"c": torch.ones(1)}}
    result = hocket.launch(functions.everything, [shared[2:5], shared, (1, {2: "x"})], n=2, more=more)
    assert (result["more"]["b.c"].item(), result["more"]["b"]["c"].item()) == (0.0, 1.0), "names that look alike"
    assert result["who"] == (0, 2) and result[3] == [None, True, 1.5, float("inf"), b"\x00"]
    assert torch.equal(result["extra"][0], shared[2:5]) and torch.equal(result["extra"][1], shared)
    assert result["extra"][2] == (1, {2: "x"}) and result["set"] == {1, 2} and result["complex"] == 1 + 2j
    assert torch.equal(result["tensor"], torch.arange(6).reshape(2, 3).t())
    assert isinstance(result["array"], np.ndarray) and result["array"].tolist() == [0.0, 1.0, 2.0]
    assert result["more"]["a"].tolist() == [[1.0, 1.0], [1.0, 1.0]]
    assert result["half"].dtype is torch.bfloat16 and result["parameter"].tolist() == [1.0, 1.0]


def test_it_works_where_torch_has_used_its_threads() -> None:
    torch.set_num_threads(2)
    (torch.randn(400, 400) @ torch.randn(400, 400)).sum()
    torch.set_num_threads(1)
    results: list[float] = []
    thread = threading.Thread(target=lambda: results.append(hocket.launch(functions.total, torch.ones(3), n=2)))
    thread.start()
    thread.join()
    assert results == [9.0]


def test_two_workers_train_as_one() -> None:
    one, two = (hocket.launch(functions.train, 4, n=n, strategy=hocket.Central()) for n in (1, 2))
    assert all(torch.allclose(one[name], two[name], atol=1e-6) for name in one)


def test_settings_are_those_of_the_command_line() -> None:
    told = hocket.launch(functions.environment, n=1, strategy=hocket.Central(fused=True), timeout=70, on_nan="skip")
    assert told == {"HOCKET_STRATEGY": "central(fused=True)", "HOCKET_TIMEOUT": "70", "HOCKET_ON_NAN": "skip"}
    assert hocket.launch(functions.timeout, 3.0, n=1, timeout=70) == 3.0


@pytest.mark.few(4)
@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: hocket.launch(functions.train, 1, n=0), "-n 0: a job needs at least one worker"),
        (lambda: hocket.launch(functions.train, 1, n=1, timeout=-1), "--timeout -1: must be a positive number"),
        (lambda: hocket.launch(functions.train, 1, n=1, on_nan="x"), "--on-nan x: the choices are"),
        (lambda: hocket.launch(functions.train, n=1), "cannot be called with these arguments: missing a required"),
        (lambda: hocket.launch(functions.train, 1, n=1, wrong=2), "unexpected keyword argument 'wrong'"),
        (lambda: hocket.launch(functions.timeout, n=1, timeout=5), "'timeout' is an option of hocket.launch() and of"),
        (lambda: hocket.launch(3, n=1), "hocket.launch() needs a function, not 3"),
        (lambda: hocket.launch(functions.give, "model", n=1), "the result of give() is a torch.nn.modules.linear.Line"),
        (lambda: hocket.launch(functions.give, "path", n=1), "the result of give().at is a pathlib"),
        (lambda: hocket.launch(functions.give, "function", n=1), "the result of give() is a builtins.function"),
    ],
)
def test_a_wrong_use_is_one_line(call: object, message: str) -> None:
    assert callable(call)
    with pytest.raises(UsageError) as caught:
        call()
    assert message in str(caught.value) and "\n" not in str(caught.value)


def test_an_unknown_strategy_starts_nothing() -> None:
    with pytest.raises(StrategyError, match="unknown strategy 'x'"):
        hocket.launch(functions.train, 1, n=1, strategy="x")


@pytest.mark.few(1)
@pytest.mark.parametrize(("how", "words"), [("raise", "ended with exit code 1"), ("SIGKILL", "was killed by SIGKILL")])
def test_the_report_is_in_the_error_and_nowhere_else(how: str, words: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(JobError) as caught:
        hocket.launch(functions.end, how, n=2)
    lines = str(caught.value).splitlines()
    assert lines[0].startswith("rank 1 on ") and words in lines[0]
    if how == "raise":
        assert lines[-1] == "ValueError: this rank is broken"
        assert 'raise ValueError("this rank is broken")' in lines[-2] and "functions.py" in lines[-3]
        assert lines[-4] == "Traceback (most recent call last):", "the user's frames alone"
    shown = capsys.readouterr()
    assert sorted(shown.out.splitlines()) == ["[0] about to end", "[1] about to end"]
    assert "broken" not in shown.err and "SIGKILL" not in shown.err


def test_a_function_that_exits_has_no_result() -> None:
    with pytest.raises(JobError, match=r"rank 0 ended before exit_well\(\) returned"):
        hocket.launch(functions.exit_well, n=1)


def test_workers_launch_nothing() -> None:
    with pytest.raises(JobError, match=r"hocket.launch\(\) was called in a worker of a job"):
        hocket.launch(functions.launch_again, n=1)


def test_a_nested_function_of_a_module() -> None:
    scale = torch.tensor(3.0)

    def inner(x: float, /, y: float = 2.0) -> float:
        return float(scale * x * y) + len(functions.__name__)

    assert hocket.launch(inner, 2.0, n=1) == 12.0 + len(functions.__name__)


@pytest.mark.few(1)
@pytest.mark.parametrize("shell", SHELLS)
def test_functions_of_a_notebook(shell: str) -> None:
    done = cells.run(getattr(cells, shell), cells.DEFINITIONS, cells.CALLS)
    assert done.returncode == 0 and "all well" in done.stdout, done.stderr


@pytest.mark.all_combinations
def test_functions_of_a_script(tmp_path: Path) -> None:
    script = tmp_path / "script.py"
    script.write_text(cells.DEFINITIONS + cells.FEW_CALLS)  # without a guard: workers do not run the script
    done = subprocess.run([sys.executable, script], capture_output=True, text=True, timeout=240, check=False)
    assert done.returncode == 0 and done.stdout.count("all well") == 1, done.stderr


@pytest.mark.few(1)
@pytest.mark.parametrize("shell", SHELLS)
def test_what_cannot_be_sent_is_named_with_a_remedy(shell: str) -> None:
    done = cells.run(getattr(cells, shell), cells.DEFINITIONS, cells.REFUSED)
    assert done.returncode == 0, done.stderr
    lines = done.stdout.splitlines()
    assert len(lines) == len(cells.MESSAGES), done.stdout
    for line, message in zip(lines, cells.MESSAGES, strict=True):
        assert message in line


@contextmanager
def sleeper(before: str = "") -> Iterator["subprocess.Popen[str]"]:
    """A process in ``hocket.launch()``, with workers that sleep; it runs ``before`` first."""
    code = f"{before}import hocket\nfrom launch import functions\nhocket.launch(functions.sleep, 600, n=2)"
    path = os.pathsep.join([str(Path(__file__).parent.parent), os.environ.get("PYTHONPATH", "")])
    with subprocess.Popen(
        [sys.executable, "-c", code], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
        env={**os.environ, "PYTHONPATH": path},
    ) as process:  # fmt: skip
        try:
            assert process.stdout is not None
            for line in process.stdout:
                if "sleeping" in line:
                    break
            yield process
        finally:
            process.kill()


def test_an_interrupt_ends_the_job_and_comes_back() -> None:
    with sleeper() as process:
        process.send_signal(signal.SIGINT)
        _, err = process.communicate(timeout=30)
    assert process.returncode == -signal.SIGINT and err.splitlines()[-1] == "KeyboardInterrupt", err


def test_the_callers_death_leaves_nothing() -> None:
    with sleeper() as process:  # the fixtures look for processes, and for the folder
        process.kill()
        process.communicate(timeout=30)


def test_the_death_of_caller_and_launcher_leaves_nothing() -> None:
    with sleeper() as process:
        (launcher,) = map(int, Path(f"/proc/{process.pid}/task/{process.pid}/children").read_text().split())
        folder = Path(Path(f"/proc/{launcher}/cmdline").read_text().split("\0")[-3])
        assert folder.is_dir()
        os.kill(process.pid, signal.SIGSTOP)  # or it could clean up before it dies
        os.kill(launcher, signal.SIGKILL)
        process.kill()
        process.communicate(timeout=30)
        leave = time.monotonic() + 60
        while folder.exists():
            assert time.monotonic() < leave
            time.sleep(0.02)


def test_the_folder_goes_while_threads_of_the_dead_caller_take_their_time() -> None:
    """On a busy machine a killed process dies thread by thread; here the main thread is dead and another one is not."""
    dies = (
        "import ctypes, platform, signal, threading\n"
        "number = {'x86_64': 60, 'aarch64': 93}[platform.machine()]\n"  # exit, of one thread
        "signal.signal(signal.SIGUSR1, lambda *_: ctypes.CDLL(None).syscall(number, 0))\n"
        "threading.Thread(target=threading.Event().wait, daemon=True).start()\n"
    )
    with sleeper(dies) as process:
        (launcher,) = map(int, Path(f"/proc/{process.pid}/task/{process.pid}/children").read_text().split())
        folder = Path(Path(f"/proc/{launcher}/cmdline").read_text().split("\0")[-3])
        assert folder.is_dir()
        process.send_signal(signal.SIGUSR1)
        leave = time.monotonic() + 60
        while folder.exists():
            assert time.monotonic() < leave
            time.sleep(0.02)
        assert process.poll() is None, "it is dead for its children alone"


def test_the_launchers_death_is_an_error_of_the_caller() -> None:
    with sleeper() as process:
        (launcher,) = Path(f"/proc/{process.pid}/task/{process.pid}/children").read_text().split()
        os.kill(int(launcher), signal.SIGKILL)
        _, err = process.communicate(timeout=30)
    assert process.returncode == 1 and "JobError: the launcher ended with status -9" in err


@pytest.mark.parametrize("before", ["import hocket", "import hocket, hocket.launch.cli", "import hocket.launch"])
def test_the_package_can_be_called_and_imported(before: str) -> None:
    code = f"import sys; {before}; assert callable(hocket.launch); import hocket.launch.cli\n"
    code += "assert callable(hocket.launch) and hocket.launch.cli.app and 'torch' not in sys.modules"
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60)


def test_the_signature_is_that_of_the_function() -> None:
    from hocket.launch.function import launch

    assert list(inspect.signature(hocket.launch).parameters) == list(inspect.signature(launch).parameters)
