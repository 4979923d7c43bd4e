"""``hocket compare`` with real processes; the script tells what a training would tell, without torch."""

import json
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from hocket.lab.compare import comparison_folder
from hocket.lab.compare.results import Comparison
from hocket.lab.rig import rig_needs

SCRIPT = str(Path(__file__).parent / "telling.py")
COMPARE = [sys.executable, "-m", "hocket.launch.cli", "compare"]


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty working directory."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("HOCKET_RUN_DIR")
    return tmp_path


def compare(*args: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run([*COMPARE, *args], capture_output=True, text=True, timeout=120, check=False)


def wait_for(condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 60
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.05)


def only(folder: Path) -> Comparison:
    """The one that was made there."""
    (found,) = (folder / "hocket-compare").iterdir()
    return comparison_folder.load(found)


def test_all_strategies_are_run_and_one_that_fails_is_shown_with_its_reason(folder: Path) -> None:
    names = "central, local_sgd(period=4); asynchronous"
    done = compare("-n", "2", "--strategies", names, "--repeat", "2", SCRIPT, "fail", "central", "{seed}")
    assert done.returncode == 0, done.stderr
    found = only(folder)
    assert [entry.name for entry in found.entries] == [
        "one worker", "central on 2", "local_sgd(period=4) on 2", "asynchronous on 2",
    ]  # fmt: skip
    assert found.missing == 0 and found.repeats == 2 and found.metrics == ["loss", "accuracy"]
    good = [result for entry in found.entries for result in entry.good]
    assert [(result.workers, result.repeat) for result in good] == [(1, 0), (1, 1), (2, 0), (2, 1), (2, 0), (2, 1)]
    assert all(result.told["seed"] == str(result.repeat) for result in good)
    assert all(result.samples == 160 and result.pass_samples == 32 for result in good)
    assert [result.sent for result in good[2:]] == [4000] * 4
    assert "ValueError: central is broken on purpose" in found.entries[1].failure
    assert "central on 2 failed: " in done.stdout and "One worker had 2 threads" in done.stdout
    assert "run 8 of 8, asynchronous on 2, repeat 2: loss 0.2, accuracy 0.5" in done.stderr
    (made,) = (folder / "hocket-compare").iterdir()
    assert "trained ['central', '1']" in (made / "logs" / "one-worker-repeat-2.log").read_text()


@pytest.mark.all_combinations
def test_a_run_that_has_reached_the_target_is_ended(folder: Path) -> None:
    args = ["-n", "2", "--strategies", "mirrored", "--until", "accuracy=0.3", "--json", "--out", "out"]
    done = compare(*args, SCRIPT, "forever")
    assert done.returncode == 0, done.stderr
    found = comparison_folder.from_json(json.loads(done.stdout))
    assert found == comparison_folder.load(folder / "out")
    for entry in found.entries:
        (result,) = entry.good
        assert result.reached is not None and (result.reached.value, result.reached.samples) == (0.3, 96)
        assert result.passes == 3.0 and len(result.curves["loss"]) == 3
        assert result.sent == 600 * result.workers**2, "what was sent later does not count"


def test_an_unknown_metric_is_noticed_while_the_baseline_runs(folder: Path) -> None:
    done = compare("-n", "2", "--until", "acuracy=0.9", SCRIPT, "forever")
    assert done.returncode == 2
    assert done.stderr.splitlines()[-1] == (
        "hocket: --until acuracy: the script does not report it; what it reports is loss, accuracy"
    )
    for what in ("silent", "silent forever"):
        done = compare("-n", "2", "--until", "accuracy=0.9", SCRIPT, what)
        assert done.returncode == 2 and "the script reports no metrics" in done.stderr


def test_an_unknown_metric_is_noticed_where_one_worker_fails(folder: Path) -> None:
    done = compare("-n", "2", "--strategies", "mirrored,central", "--until", "nothing=1", SCRIPT, "fail alone")
    assert done.returncode == 2, done.stdout
    assert done.stderr.splitlines()[-1].startswith("hocket: --until nothing: the script does not report it")
    assert "central on 2" not in done.stderr


def test_a_target_that_was_wanted_is_not_forgotten_where_nothing_can_be_compared_with_it(folder: Path) -> None:
    done = compare("-n", "2", "--strategies", "mirrored", "--until", "q=0.001", "--out", "out", SCRIPT, "lost")
    assert done.returncode == 0, done.stderr
    found = comparison_folder.load(folder / "out")
    assert found.target is None and found.wanted == "q=0.001"
    assert "q=0.001 was not reached: no value of q that was reported is a number." in done.stdout


def test_a_script_that_reports_nothing_is_compared_by_speed(folder: Path) -> None:
    done = compare("-n", "2", "--strategies", "mirrored", SCRIPT, "silent")
    assert done.returncode == 0 and "compared by samples per second" in done.stdout, done.stderr


def test_bad_input_is_one_line_before_anything_runs(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (folder / "file").write_text("")
    wrong = {
        "unknown strategy 'locl_sgd': the choices are mirrored": ["--strategies", "mirrored,locl_sgd"],
        "can be written to": ["--out", "file/out"],
        "--hosts 4": ["--rate", "1gbit"],
        "no script 'nothing.py'": ["nothing.py"],
        "accuracy=0.95": ["--until", "accuracy"],
        "--repeat 0: must be a whole number from 1": ["--repeat", "0"],
        "--threads -1: must be a whole number from 1": ["--threads", "-1"],
        "--timeout abc: must be a positive number": [],
    }
    for words, args in wrong.items():
        if not args:
            monkeypatch.setenv("HOCKET_TIMEOUT", "abc")
        done = compare(*args, SCRIPT, "train")
        assert done.returncode == 2 and words in done.stderr, done.stderr
        assert done.stderr.startswith("hocket: ") and len(done.stderr.splitlines()) == 1
    assert [path.name for path in folder.iterdir()] == ["file"]


@pytest.mark.few(1)
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGKILL])
def test_an_interrupted_comparison_leaves_nothing_running_and_goes_on(folder: Path, number: signal.Signals) -> None:
    command = [*COMPARE, "-n", "2", "--strategies", "mirrored,central", SCRIPT, "stay"]
    job = subprocess.Popen(command, stderr=subprocess.PIPE, stdout=subprocess.PIPE, text=True)

    def is_at_work() -> bool:
        logs = list(folder.glob("hocket-compare/*/logs/mirrored-on-2-repeat-1.log"))
        return bool(logs) and logs[0].read_text().count("trained") == 2

    wait_for(is_at_work)
    started = os.listdir(next(folder.glob("hocket-compare/*/runs")))  # noqa: PTH208
    job.send_signal(number)
    _, said = job.communicate(timeout=60)
    if number == signal.SIGINT:
        assert job.returncode == 130 and "the same command goes on from here" in said
        assert "1 run" not in said and only(folder).missing == 2
    wait_for(lambda: not _processes_of(folder))
    assert len(only(folder).entries) == 1 and len(started) == 2
    # The same command, of which the script now ends: the baseline is not run again.
    again = subprocess.Popen(command, stderr=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    assert again.stderr is not None
    lines = [again.stderr.readline(), again.stderr.readline()]
    again.send_signal(signal.SIGTERM)
    rest = again.stderr.read()
    assert again.stdout is not None
    again.stdout.read()
    again.stdout.close()
    again.stderr.close()
    assert again.wait(timeout=60) == 128 + signal.SIGTERM, rest
    assert "is continued: 1 of its runs is there, 2 are left" in lines[0] and "run 2 of 3, mirrored on 2" in lines[1]


@pytest.mark.few(1)
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_who_interrupts_the_report_loses_no_run(folder: Path, number: signal.Signals) -> None:
    Path("{seed}").mkdir()
    shutil.copy(SCRIPT, "{seed}/telling.py")  # not to be taken for the seed
    options = ["-n", "2", "--strategies", "mirrored"]
    command = [*COMPARE, *options, "{seed}/telling.py", "train", "{seed}"]
    job = subprocess.Popen(command, stderr=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    assert job.stdout is not None
    job.stdout.readline()  # of the table
    job.send_signal(number)
    _, said = job.communicate(timeout=60)
    assert job.returncode == 128 + number and "the same command goes on from here" in said, said
    assert not list(folder.glob("hocket-compare/*/report.html"))
    done = compare(*options, "./{seed}/telling.py", "train", "{seed}")  # the same script by another name
    assert done.returncode == 0 and "is continued: all of its runs are there" in done.stderr, done.stderr
    assert "run 1 of" not in done.stderr and len(list(folder.glob("hocket-compare/*/report.html"))) == 1


@pytest.mark.all_combinations
def test_who_interrupts_what_failed_before_is_told_so(folder: Path) -> None:
    (folder / "broken").write_text("")
    options = ["-n", "2", "--strategies", "mirrored", "--out", "out", SCRIPT, "fail while", "broken"]
    assert compare(*options).returncode == 1
    (folder / "broken").unlink()
    job = subprocess.Popen([*COMPARE, *options], stderr=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    log = folder / "out" / "logs" / "mirrored-on-2-repeat-1.log"
    wait_for(lambda: "it stays" in log.read_text())
    job.send_signal(signal.SIGINT)
    _, said = job.communicate(timeout=60)
    assert job.returncode == 130 and "the same command goes on from here" in said, said


def test_other_threads_are_another_comparison(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    options = ["-n", "2", "--strategies", "mirrored", "--out", "out", SCRIPT, "train"]
    assert compare(*options).returncode == 0
    monkeypatch.setenv("OMP_NUM_THREADS", "7")
    done = compare(*options)
    assert done.returncode == 2 and "holds another comparison (libraries differs)" in done.stderr


@pytest.mark.skipif(bool(rig_needs.missing()), reason="a rig needs root and some programs")
def test_hosts_of_a_rig_have_the_environment_that_one_worker_has(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OF_THE_SCRIPT", "two words = 1")
    done = compare("--hosts", "2", "--strategies", "mirrored", "--out", "out", SCRIPT, "train")
    assert done.returncode == 0, done.stderr
    for name, workers in (("one-worker", 1), ("mirrored-on-2", 2)):
        text = (folder / "out" / "logs" / f"{name}-repeat-1.log").read_text()
        assert text.count("trained [] two words = 1") == workers, text


def _processes_of(folder: Path) -> list[str]:
    """Processes whose working directory is there."""
    found = []
    for process in Path("/proc").glob("[0-9]*"):
        try:
            if (process / "cwd").readlink() == folder:
                found.append(process.name)
        except OSError:
            continue
    return [pid for pid in found if int(pid) != os.getpid()]
